"""Ulysses: an all-to-all turns shards of the sequence with all heads into whole sequences with some heads.

Jacobs et al.: DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtile.parallel.exchange import Group, exchange
from flashtile.parallel.grid import rank_in
from flashtile.parallel.layouts import Chunk, even_chunks
from flashtile.problem import compute_dtype


class HeadShare(NamedTuple):
    """The query heads of a rank and the key heads that they read."""

    heads: Chunk
    kv_heads: Chunk


def share_heads(heads: int, kv_heads: int, ranks: int) -> list[HeadShare]:
    """The heads of every rank, as evenly as key heads allow.

    Key heads go whole to a rank as long as there is one for each. Else several ranks share a key head, each
    with some of its query heads; ranks beyond the number of query heads have none.
    """
    group = heads // max(1, kv_heads)
    if ranks <= kv_heads or kv_heads == 0:
        return [
            HeadShare(Chunk(own.start * group, own.length * group), own)
            for own in even_chunks(kv_heads, ranks)
        ]
    return [
        HeadShare(Chunk(kv_head * group + own.start, own.length), Chunk(kv_head, min(1, own.length)))
        for kv_head, sharing in enumerate(even_chunks(ranks, kv_heads))
        for own in even_chunks(group, sharing.length)
    ]


class Swap(NamedTuple):
    """An all-to-all between heads and positions; ``lengths`` are those of the shards of all ranks."""

    operation: str
    group: Group
    chunks: list[Chunk]  # the heads of every rank; those of two ranks may be the same
    lengths: list[int]

    @property
    def heads(self) -> int:
        return max(chunk.end for chunk in self.chunks)

    def to_heads(self, tensor: Tensor, what: str) -> Tensor:
        """(B, all heads, own length, D) -> (B, own heads, whole length, D)."""
        batch, _, _, width = tensor.shape
        own = self.chunks[rank_in(self.group)]
        outgoing = [[tensor[:, chunk.span]] for chunk in self.chunks]
        shapes = [[(batch, own.length, length, width)] for length in self.lengths]
        received = exchange(self.group, outgoing, shapes, f"{self.operation}: all-to-all of {what}")
        return torch.cat([part for (part,) in received], dim=2)

    def to_positions(self, tensor: Tensor, what: str) -> Tensor:
        """(B, own heads, whole length, D) -> (B, all heads, own length, D); shared ones add up."""
        batch, _, _, width = tensor.shape
        length = self.lengths[rank_in(self.group)]
        outgoing = [[part] for part in tensor.split_with_sizes(self.lengths, dim=2)]
        shapes = [[(batch, chunk.length, length, width)] for chunk in self.chunks]
        received = exchange(self.group, outgoing, shapes, f"{self.operation}: all-to-all of {what}")
        dtype = compute_dtype(tensor.dtype)
        total = torch.zeros(batch, self.heads, length, width, dtype=dtype, device=tensor.device)
        for chunk, (part,) in zip(self.chunks, received, strict=True):
            total[:, chunk.span] += part
        return total.to(tensor.dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, swap: Swap, what: str) -> Tensor:
        ctx.swap, ctx.what = swap, what
        return swap.to_heads(tensor, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.swap.to_positions(grad, f"the gradient of {ctx.what}"), None, None


class _ToPositions(torch.autograd.Function):
    """Output and LSE together: both come back, zeros if need be, whichever of them a rank has used."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, swap: Swap) -> tuple[Tensor, Tensor]:
        ctx.swap = swap
        return swap.to_positions(out, "the output"), swap.to_positions(lse[..., None], "the LSE")[..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        grad_out = ctx.swap.to_heads(grad_out, "the gradient of the output")
        grad_lse = ctx.swap.to_heads(grad_lse[..., None], "the gradient of the LSE")
        return grad_out, grad_lse[..., 0], None


def to_heads(tensor: Tensor, swap: Swap, what: str) -> Tensor:
    return _ToHeads.apply(tensor, swap, what)  # type: ignore[no-any-return, no-untyped-call]


def to_positions(out: Tensor, lse: Tensor, swap: Swap) -> tuple[Tensor, Tensor]:
    return _ToPositions.apply(out, lse, swap)  # type: ignore[no-any-return, no-untyped-call]
