"""The first paper's example (Figure 2, left) beside the model: what is reproduced, and what is not.

GPT-2 medium: N = 1024, d = 64, 16 heads, batch 64, fp16, A100, forward and backward. The paper gives 66.6
GFLOPs, 40.3 GB of HBM reads and writes and 41.7 ms for standard attention; 75.2 GFLOPs, 4.4 GB and 7.3 ms for
FlashAttention.

**FlashAttention's traffic** is that of Algorithms 1 and 4 with line 1's block sizes for the A100's 192 KB.

**Standard attention's traffic** is more than Algorithms 0 and 3 move, 11 N x N matrices and 12 N x d ones. An
implementation made of PyTorch's operators gives the mask and dropout passes of their own (`OPERATORS`): 18
N x N matrices, which make 40.3 GB. The paper does not say that this is how it was counted; its repository's
benchmark of standard attention computes it so, with the scale in the product, an added mask and dropout.

**FLOPs** do not agree: two products forward and four backward, of 2 N^2 d FLOPs for each of 64 x 16 heads,
are 825 GFLOPs, and the recomputed one makes 962. What the paper's two numbers differ by, 8.6 GFLOPs, is one
product for 64 heads rather than 1024. If products were counted so and all else for every head, 66.6 would
leave 15.1 GFLOPs for all else, where the model counts 14.1. This is a guess, not the paper's statement.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.lab import theory
from flashtile.lab.algorithms import Algorithm
from flashtile.lab.memory import Counts
from flashtile.lab.roofline import CARDS, bound

LENGTH, HEAD_DIM, HEADS, BATCH, SRAM = 1024, 64, 16, 64, 192 * 1024
PRODUCT = 2 * LENGTH**2 * HEAD_DIM  # FLOPs of one matrix product of one head

# Standard attention operator by operator: passes over an N x N matrix of fp16. A mask that all heads share
# is read from a cache; one of dropout takes a byte for each entry, half a pass.
OPERATORS: tuple[tuple[str, float], ...] = (
    ("S = scale Q K^T: write S", 1),
    ("add the mask: read, write S", 2),
    ("softmax: read S, write P", 2),
    ("dropout: read P, write it and a byte mask", 2.5),
    ("O = P V: read P", 1),
    ("dV = P^T dO: read P", 1),
    ("dP = dO V^T: write dP", 1),
    ("dropout: read dP and the byte mask, write dP", 2.5),
    ("softmax: read P and dP, write dS", 3),
    ("dQ = dS K: read dS", 1),
    ("dK = dS^T Q: read dS", 1),
)


@dataclass(frozen=True)
class Published:
    """The paper's numbers for one algorithm."""

    gflops: float
    gigabytes: float
    milliseconds: float


PUBLISHED: dict[Algorithm, Published] = {
    "standard": Published(66.6, 40.3, 41.7),
    "flash1": Published(75.2, 4.4, 7.3),
}


def model(algorithm: Algorithm) -> Counts:
    """The counts of forward and backward of all heads, with dropout."""
    shape = theory.Shape(
        query_length=LENGTH, key_length=LENGTH, head_dim=HEAD_DIM, value_head_dim=HEAD_DIM, dropout=True
    )
    forward, backward = (
        theory.one_pass(algorithm, direction, shape, theory.block_sizes(algorithm, direction, SRAM, HEAD_DIM))
        for direction in theory.DIRECTIONS
    )
    return (forward.counts + backward.counts).times(HEADS * BATCH)


def operators_traffic() -> int:
    """Bytes that standard attention moves operator by operator: `OPERATORS`, and the 12 N x d matrices."""
    passes = sum(passes for _, passes in OPERATORS)
    return int((passes * LENGTH**2 + 12 * LENGTH * HEAD_DIM) * 2 * HEADS * BATCH)


@dataclass(frozen=True)
class Line:
    """One number of the paper beside the model's."""

    quantity: str
    paper: float
    model: float
    unit: str


def comparison() -> list[Line]:
    """Every number of the paper's figure beside the model's; times are the roofline's lower bounds."""
    standard, flash = model("standard"), model("flash1")
    times = [1e3 * bound(CARDS["a100"], counts, "fp16").seconds for counts in (standard, flash)]
    published = PUBLISHED["standard"], PUBLISHED["flash1"]
    return [
        Line("standard: traffic, Algorithms 0 and 3", published[0].gigabytes, standard.traffic / 1e9, "GB"),
        Line("standard: traffic, by operators", published[0].gigabytes, operators_traffic() / 1e9, "GB"),
        Line("FlashAttention: traffic", published[1].gigabytes, flash.traffic / 1e9, "GB"),
        Line("standard: FLOPs", published[0].gflops, standard.flops / 1e9, "GFLOP"),
        Line("FlashAttention: FLOPs", published[1].gflops, flash.flops / 1e9, "GFLOP"),
        Line("standard: time, at least", published[0].milliseconds, times[0], "ms"),
        Line("FlashAttention: time, at least", published[1].milliseconds, times[1], "ms"),
    ]


def notes() -> list[str]:
    """What the comparison means, as sentences with the numbers in them."""
    passes = sum(passes for _, passes in OPERATORS)
    standard, flash = PUBLISHED["standard"].gflops, PUBLISHED["flash1"].gflops
    left = standard - 6 * PRODUCT * BATCH / 1e9
    other = model("standard").other / 1e9
    return [
        "Algorithms 0 and 3 move 11 N x N matrices. Mask and dropout as operators of their own make it "
        f"{passes:g}; the paper does not say which it counts.",
        f"The FLOPs do not agree. The paper's two differ by {flash - standard:.1f} GFLOP, which is one "
        f"product for {(flash - standard) * 1e9 / PRODUCT:.0f} heads, not for {HEADS * BATCH}.",
        f"Were products counted for {BATCH} heads only, {left:.1f} GFLOP would be left for all else, near "
        f"the model's {other:.1f}: a guess, not the paper's statement.",
        "Times are what an A100's sheet allows at best for the model's counts; the paper's are measured.",
    ]
