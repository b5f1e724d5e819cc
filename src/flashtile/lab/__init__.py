"""The papers as code one can run: standard attention, FlashAttention and FlashAttention-2 in plain PyTorch.

Every access to memory is counted, there are closed forms for the counts, and online softmax goes step by
step. This is for understanding and predicting; `flashtile.attention` is what to compute with. `flashtile lab`
prints the counts.
"""

from flashtile.lab import flash1, flash2, occupancy, recording, standard, theory
from flashtile.lab.algorithms import ALGORITHMS, Algorithm, Run, run
from flashtile.lab.memory import Block, Counts, Memory
from flashtile.lab.online import Step, blocked, elementwise, mean_of_blocks, steps
from flashtile.lab.setting import Blocks, Setting

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Block",
    "Blocks",
    "Counts",
    "Memory",
    "Run",
    "Setting",
    "Step",
    "blocked",
    "elementwise",
    "flash1",
    "flash2",
    "mean_of_blocks",
    "occupancy",
    "recording",
    "run",
    "standard",
    "steps",
    "theory",
]
