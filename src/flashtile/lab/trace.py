"""`flashtile lab --trace`: the algorithms themselves on random numbers, their counts beside theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile import masks, reference
from flashtile.bench.console import table
from flashtile.lab.algorithms import ALGORITHMS, Algorithm, run
from flashtile.lab.memory import Counts
from flashtile.lab.report import TITLES, Case
from flashtile.lab.theory import DIRECTIONS, Direction
from flashtile.problem import AttentionProblem

MOST_SCORES, MOST_TILES = 2**24, 2**15


@dataclass(frozen=True)
class Traced:
    """One pass of one algorithm: what was counted, what theory says, and the error of its results.

    The error is the largest one against the oracle, over the largest number there if that is above 1.
    """

    algorithm: Algorithm
    direction: Direction
    counted: Counts
    expected: Counts
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.counted == self.expected and self.error <= self.allowed


def refusal(case: Case) -> str | None:
    """Why a case is too large to run tile by tile in Python; None if it is not."""
    heads = case.batch * case.heads
    if heads * case.length**2 > MOST_SCORES:
        return f"runs at most {MOST_SCORES} scores, got {heads} x {case.length} x {case.length}"
    tiles = 0
    for algorithm in ALGORITHMS[1:]:
        for direction in DIRECTIONS:
            blocks = case.blocks_of(algorithm, direction)
            tiles += heads * -(-case.length // blocks.rows) * -(-case.length // blocks.columns)
    return f"runs at most {MOST_TILES} tiles, got {tiles}" if tiles > MOST_TILES else None


def trace(case: Case) -> list[Traced]:
    """Run all three algorithms in float64, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, case.batch, case.heads, case.length, case.head_dim)
    query, key, value, grad_out = torch.randn(shape, generator=generator, dtype=torch.float64)
    exact = _oracle(case, query, key, value, grad_out)
    # Sums of as many terms as keys and head_dim, and a few roundings besides.
    allowed = (case.length + case.head_dim + 16) * torch.finfo(torch.float64).eps
    found = []
    for algorithm in ALGORITHMS:
        done = run(
            algorithm,
            query,
            key,
            value,
            grad_out,
            blocks=case.blocks_of(algorithm, "forward"),
            backward_blocks=case.blocks_of(algorithm, "backward"),
            mask=masks.causal() if case.causal else None,
            element_size=case.element_size,
        )
        assert done.gradients is not None
        assert done.backward is not None
        errors = [_error([done.out], exact[:1]), _error(done.gradients, exact[1:])]
        for direction, counts, error in zip(DIRECTIONS, (done.forward, done.backward), errors, strict=True):
            expected = case.counts(algorithm, direction)
            found.append(Traced(algorithm, direction, counts, expected, error, allowed))
    return found


def _oracle(case: Case, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in (query, key, value))
    problem = AttentionProblem(query, key, value, case.head_dim**-0.5, upper=case.shape.upper)
    out, _ = reference.attention(problem)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)]


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
        for ours, theirs in zip(found, exact, strict=True)
    )


def text(traced: list[Traced]) -> str:
    """Counted numbers, exact, and whether the closed form gives the same."""
    header = ["counted", "bytes read", "bytes written", "matmul", "other FLOPs", "on chip", "theory", "error"]
    rows = [
        [
            f"{TITLES[one.algorithm]}, {one.direction}",
            *[f"{n:,}" for n in (one.counted.read, one.counted.written, one.counted.matmul)],
            f"{one.counted.other:,}",
            f"{one.counted.on_chip:,}",
            "equal" if one.counted == one.expected else "DIFFERS",
            f"{one.error:.0e}{'' if one.error <= one.allowed else ' WRONG'}",
        ]
        for one in traced
    ]
    return table(header, rows)


def as_list(traced: list[Traced]) -> list[dict[str, Any]]:
    return [{**asdict(one), "agrees": one.agrees} for one in traced]
