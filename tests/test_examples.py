"""Every example runs as a user runs it, in a process of its own, and its own checks hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Loading its model takes longest by far: test_transformers_weights runs it on the one that is loaded there.
ELSEWHERE = {"finetune_smollm2"}
FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ELSEWHERE)
TINY_GPT = "--layers 1 --width 32 --heads 2 --context 64 --batch 2 --steps 3 --sample 20 --output {folder}"
SMALLER = {
    "long_context_memory": ["2048"],
    "train_gpt": TINY_GPT.split(),
}
LAUNCHERS = {"ring_attention": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_its_checks_hold(example, tmp_path):
    launcher = LAUNCHERS.get(example.stem, [])
    arguments = [part.format(folder=tmp_path) for part in SMALLER.get(example.stem, [])]
    command = [sys.executable, "-W", "error", *launcher, str(example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples():
    assert len(EXAMPLES) >= 12
