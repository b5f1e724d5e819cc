"""Peak memory of one training step, tiles against a matrix of scores: `long_context_memory.py 8192`.

Works on Linux and macOS, which tell a process its peak.
"""

from __future__ import annotations

import multiprocessing
import sys

import torch
from torch import Tensor

import flashtile
from flashtile import masks
from flashtile.bench.memory import peak_bytes, reset_peak

HEADS, HEAD_DIM = 2, 64


def standard(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = query @ key.mT * HEAD_DIM**-0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def tiled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flashtile.attention(query, key, value, mask=masks.causal())


def train_step(name: str, length: int) -> tuple[Tensor, ...]:
    attention = {"flashtile": tiled, "standard": standard}[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator).requires_grad_() for _ in range(3)]
    out = attention(*inputs)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))


def growth(name: str, length: int) -> float:
    """MiB by which one training step raises the peak of a process that has made a small one before."""
    train_step(name, 64)
    reset_peak()
    before = peak_bytes()
    train_step(name, length)
    return (peak_bytes() - before) / 2**20


def main(length: int = 4096) -> None:
    for ours, theirs in zip(train_step("flashtile", 512), train_step("standard", 512), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    grown = {}
    for name in ("flashtile", "standard"):
        # A process of its own: compiling kernels, done above, makes a high peak, which macOS cannot reset.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            grown[name] = pool.apply(growth, (name, length))
        print(f"{name:<10} length {length}: {grown[name]:7.1f} MiB more, inputs and results included")
    assert 0 < grown["flashtile"] < grown["standard"] / 4


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
