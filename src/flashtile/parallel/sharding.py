"""``shard`` and ``unshard``: a tensor cut along the sequence for the ranks of a group, and put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from flashtile.arguments import check_tensor
from flashtile.parallel.agreement import DTYPES, agree, documents_code
from flashtile.parallel.exchange import Group, exchange, gather
from flashtile.parallel.grid import Grid, grid_of, rank_in, size_of
from flashtile.parallel.layouts import (
    Chunk,
    Layout,
    checked_documents,
    checked_layout,
    even_chunks,
    even_layout,
    layout_of,
)
from flashtile.problem import compute_dtype


def shard(
    tensor: Tensor,
    group: Group | DeviceMesh | None = None,
    dim: int = 1,
    layout: Layout = "contiguous",
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's part of a tensor that is whole on every rank: tokens, labels, position ids, hidden states.

    Args:
        tensor: any shape and dtype, the same on every rank.
        group: the ranks that share the sequence, by default all; or a DeviceMesh (see ``mesh_attention``).
        dim: the dimension of the sequence.
        layout: ``"contiguous"``: rank r has the r-th of P runs of positions; ``"zigzag"``: the runs r and
            2P - 1 - r of 2P, which balances the work of a causal mask. Lengths that P (or 2P) does not divide
            make the first runs one longer.
        cu_seqlens: (documents + 1,) where packed documents begin, and the length of all at the end: each
            document is cut so for itself, which balances the work of documents that see only themselves. A
            rank's part has its runs of the first document, then those of the second, and so on.

    Returns:
        A view, or a copy where there are several runs. Differentiable: the gradient of the whole tensor is
        that of this rank's part, and 0 elsewhere.

    Raises:
        TypeError: not a tensor, or not a group.
        ValueError: an unknown layout or dimension, or documents of another length.
    """
    return cut(tensor, grid_of(group), dim, layout, cu_seqlens)


def cut(
    tensor: Tensor, grid: Grid, dim: int, layout: Layout, cu_seqlens: Tensor | Sequence[int] | None
) -> Tensor:
    """``shard`` for the ranks of a grid."""
    dim = _checked(tensor, dim, layout)
    documents = checked_documents(cu_seqlens, tensor.shape[dim])
    for runs in runs_of(grid, tensor.shape[dim], layout, documents):
        parts = [tensor.narrow(dim, *run) for run in runs]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def runs_of(
    grid: Grid, length: int, layout: Layout, documents: tuple[int, ...] | None
) -> Iterator[list[Chunk]]:
    """The runs of positions that this rank's ring takes of the whole, then those that it takes of these."""
    ring = even_layout(length, size_of(grid.ring), layout, documents)[rank_in(grid.ring)]
    yield ring
    yield [even_chunks(sum(run.length for run in ring), size_of(grid.heads))[rank_in(grid.heads)]]


def unshard(
    tensor: Tensor,
    group: Group | DeviceMesh | None = None,
    dim: int = 1,
    layout: Layout = "contiguous",
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The whole tensor, on every rank, of the parts that ``shard`` gives: its inverse.

    Contiguous parts of a sequence without ``cu_seqlens`` may have any lengths. Differentiable: what comes
    back to a part is the sum of the gradients of all ranks, added in float32 in the order of the ranks.

    Raises:
        TypeError: not a tensor, or not a group.
        ValueError: an unknown layout or dimension, or parts that do not fit together, on every rank.
        RuntimeError: a rank failed or did not answer within the group's timeout.
    """
    return join(tensor, grid_of(group), dim, layout, cu_seqlens)


def join(
    tensor: Tensor, grid: Grid, dim: int, layout: Layout, cu_seqlens: Tensor | Sequence[int] | None
) -> Tensor:
    """``unshard`` for the ranks of a grid."""
    dim = _checked(tensor, dim, layout)
    if grid.heads is not None:
        tensor = _whole(tensor, grid.heads, dim, "contiguous", None)
    return tensor if grid.ring is None else _whole(tensor, grid.ring, dim, layout, cu_seqlens)


def _checked(tensor: Tensor, dim: int, layout: object) -> int:
    check_tensor("tensor", tensor)
    checked_layout(layout)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"tensor must hold real numbers, integers or bools, got {tensor.dtype}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim must be a dimension of a tensor of shape {tuple(tensor.shape)}, got {dim}")
    return dim % tensor.dim()


class _Shard(NamedTuple):
    dimensions: int
    length: int
    numbers_per_position: int
    dtype: int
    recorded: int
    zigzag: int
    cu_seqlens: int


def _whole(
    tensor: Tensor, group: Group, dim: int, layout: Layout, cu_seqlens: Tensor | Sequence[int] | None
) -> Tensor:
    length = tensor.shape[dim]
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    numbers = tensor.movedim(dim, 0).shape[1:].numel()
    facts = _Shard(
        tensor.dim(),
        length,
        numbers,
        DTYPES.index(tensor.dtype),
        recorded,
        layout == "zigzag",
        documents_code(cu_seqlens),
    )
    everyone = agree("unshard", group, facts, None, {"length"}, near=tensor)
    lengths = [one.length for one in everyone]
    chunks = layout_of(lengths, layout, "shards", checked_documents(cu_seqlens, sum(lengths)))
    whole: Tensor = gather_chunks(tensor.movedim(dim, 0), group, chunks, "unshard")
    return whole.movedim(0, dim)


def gather_chunks(tensor: Tensor, group: Group, chunks: list[list[Chunk]], step: str) -> Tensor:
    """(own length, ...) -> (whole length, ...), the chunks of all ranks in the order of their positions."""
    return _Gather.apply(tensor, group, chunks, step)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, chunks: list[list[Chunk]], step: str) -> Tensor:
        ctx.group, ctx.chunks, ctx.step, ctx.dtype = group, chunks, step, tensor.dtype
        lengths = [sum(chunk.length for chunk in own) for own in chunks]
        whole = tensor.new_empty(sum(lengths), *tensor.shape[1:])
        for own, part in zip(chunks, gather(group, tensor, lengths, step), strict=True):
            for chunk, piece in zip(own, part.split_with_sizes([chunk.length for chunk in own]), strict=True):
                whole[chunk.span] = piece
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.chunks[rank_in(ctx.group)]
        outgoing = [[torch.cat([grad[chunk.span] for chunk in chunks])] for chunks in ctx.chunks]
        shape = (sum(chunk.length for chunk in own), *grad.shape[1:])
        parts = exchange(ctx.group, outgoing, [[shape]] * len(outgoing), f"{ctx.step}, backward")
        total = torch.zeros(shape, dtype=compute_dtype(grad.dtype), device=grad.device)
        for (part,) in parts:
            total += part
        return total.to(ctx.dtype), None, None, None
