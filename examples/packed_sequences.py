"""Sequences of different lengths in one call, packed without padding: the same results, less work."""

from __future__ import annotations

import itertools
import time

import torch

import flashtile
from flashtile import masks

LENGTHS = [30, 700, 5, 250, 120, 1, 90, 400]
HEADS, HEAD_DIM = 4, 64


def main() -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    query, key, value = torch.randn(3, int(ends[-1]), HEADS, HEAD_DIM)  # (total, heads, head_dim)
    query.requires_grad_()

    out = flashtile.attention_varlen(query, key, value, ends, mask=masks.causal())
    out.square().sum().backward()

    # Each sequence alone, and all of them padded to the longest.
    for first, last in itertools.pairwise(ends):
        own = [tensor[first:last].detach().transpose(0, 1)[None] for tensor in (query, key, value)]
        alone = flashtile.attention(*own, mask=masks.causal())
        assert torch.equal(out[first:last].transpose(0, 1), alone[0])
    padded = torch.randn(3, len(LENGTHS), HEADS, max(LENGTHS), HEAD_DIM)
    mask = masks.causal() & masks.key_lengths(LENGTHS)

    def packed_call() -> None:
        flashtile.attention_varlen(query.detach(), key, value, ends, mask=masks.causal())

    def padded_call() -> None:
        flashtile.attention(*padded, mask=mask)

    print(f"{len(LENGTHS)} sequences, {sum(LENGTHS)} tokens; padded: {len(LENGTHS) * max(LENGTHS)}")
    for name, call in (("packed", packed_call), ("padded", padded_call)):
        call()
        start = time.perf_counter()
        call()
        print(f"  {name}: {1e3 * (time.perf_counter() - start):.2f} ms")
    print(
        "every sequence has the bits it gets alone; the gradient has no row for padding:", *query.grad.shape
    )


if __name__ == "__main__":
    main()
