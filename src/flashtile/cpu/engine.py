"""From an AttentionProblem to kernel runs, forward and backward."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashtile.sinks import gradient_terms

from . import call as c
from .backward import backward as backward_kernel
from .backward import row_deltas
from .entries import entry
from .far import with_all_together, with_keys_together
from .gemm import COLUMNS
from .kinds import Kind
from .plans import KINDS, Plan, lay_out, plan_of, put_schedule, row_room, tile_keys, tiles_of
from .ragged import Extent, in_rounds, schedule, sequences_of
from .rows import TABLE_BYTES
from .workers import run

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import AttentionProblem, Gradients

# Memory for dQ of the packed sequences that one run of the backward pass takes, if they are several.
_ROUND_BYTES = 2**26


def forward(problem: AttentionProblem, out: Tensor, lse: Tensor) -> None:
    """Writes O (B, Hq, Sq, Dv) and LSE (B, Hq, Sq) of one problem."""
    problem = with_keys_together(problem, KINDS[problem.query.dtype])
    _execute(plan_of(problem, out, lse), problem, out, lse)
    if problem.query_starts is not None:
        end = int(problem.query_starts[-1])
        out[:, :, end:] = 0.0
        lse[:, :, end:] = -torch.inf


def _execute(
    plan: Plan, problem: AttentionProblem, out: Tensor, lse: Tensor, rest: Tensor | None = None
) -> None:
    space = torch.empty(plan.space, dtype=torch.uint8, device="cpu") if plan.space else None
    for step in plan.steps:
        call = step.call[:]
        c.put_addresses(call, problem)
        call[c.OUT], call[c.LSE] = out.data_ptr(), lse.data_ptr()
        if rest is not None:
            c.put(call, c.LSE_REST, c.tensor_fields(rest, 3))
        if space is not None:
            call[c.SPACE] = space.data_ptr()
        run(step.entry, call, step.tasks, step.scratch, step.work)


def backward(
    problem: AttentionProblem,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    gradients: Gradients,
) -> None:
    """Writes every gradient that is wanted, from the saved O and LSE."""
    query, value = problem.query, problem.value
    batch, heads, query_length, _ = query.shape
    key_length, value_dim = value.shape[2], value.shape[3]
    delta = torch.zeros_like(lse, memory_format=torch.contiguous_format) if grad_lse is None else -grad_lse
    if 0 in (batch, heads, query_length, key_length):
        _fill_empty(gradients)
    else:
        kind = KINDS[query.dtype]
        if grad_out.stride(-1) != 1:  # that of out.sum(): one number, which tiles would gather one by one
            grad_out = grad_out.contiguous()
        problem, grad_out = with_all_together(problem, grad_out, kind)
        call = c.describe(problem)
        for tensor, at in ((out, c.OUT), (grad_out, c.GRAD_OUT), (gradients.query, c.GRAD_QUERY)):
            c.put(call, at, c.tensor_fields(tensor))
        for tensor, at in ((gradients.key, c.GRAD_KEY), (gradients.value, c.GRAD_VALUE)):
            c.put(call, at, c.tensor_fields(tensor))
        # Nobody knows the maxima of the whole rows that a part belongs to.
        maxima, rest = (lse, None) if problem.part is not None else _split_lse(problem, lse)
        c.put(call, c.LSE, c.tensor_fields(maxima, 3))
        c.put(call, c.LSE_REST, c.tensor_fields(rest, 3))
        c.put(call, c.DELTA, c.tensor_fields(delta, 3))
        rows = float(batch * heads * query_length)
        run(entry(row_deltas, kind), call, batch * heads, 0, 4 * rows * value_dim)
        _run_backward(problem, kind, call, gradients)
        _clear_rest(problem, gradients)
    if gradients.sinks is not None and problem.sinks is not None:
        _sum_into(gradients.sinks, gradient_terms(problem.sinks, lse, delta), (0, 2))


def _split_lse(problem: AttentionProblem, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """LSE as it is; in two parts for rows where it is too large to tell many keys from few.

    A row whose every key has the bias -1e10, say, has the LSE -1e10 in float32, however many keys there are.
    For such rows the forward pass runs again and keeps the row maximum and the log of the row sum apart.
    """
    # P recomputed from a larger LSE would be off by more than 5e-4 (float64: 1e-10).
    large = (lse.abs() > (2.0**13 if lse.dtype == torch.float32 else 2.0**20)) & lse.isfinite()
    if not bool(large.any()):
        return lse, None
    maxima, rest = (torch.empty_like(lse, memory_format=torch.contiguous_format) for _ in range(2))
    out = problem.query.new_empty(*problem.query.shape[:3], problem.value.shape[3])
    _execute(plan_of(problem, out, maxima), problem, out, maxima, rest)
    return torch.where(large, maxima, lse), torch.where(large, rest, 0.0)


def _fill_empty(gradients: Gradients) -> None:
    for tensor in (gradients.query, gradients.key, gradients.value, gradients.bias, gradients.alibi_slopes):
        if tensor is not None:
            tensor.zero_()


def _clear_rest(problem: AttentionProblem, gradients: Gradients) -> None:
    """Packed rows behind the last sequence."""
    for starts, tensors in (
        (problem.query_starts, (gradients.query,)),
        (problem.key_starts, (gradients.key, gradients.value)),
    ):
        if starts is not None:
            for tensor in tensors:
                tensor[:, :, int(starts[-1]) :] = 0.0


def _sum_into(target: Tensor, terms: Tensor, dims: tuple[int, ...]) -> None:
    """Sums on one thread: torch's own sum splits its work by the number of threads, and the bits would
    follow.
    """
    if not dims:
        target.copy_(terms)
        return
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is the right NaN
        total = terms.contiguous().numpy().sum(axis=dims)
    target.copy_(torch.from_numpy(total).view(target.shape))


def _run_backward(problem: AttentionProblem, kind: Kind, call: array[int], gradients: Gradients) -> None:
    heads, head_dim, value_dim = problem.query.shape[1], problem.query.shape[3], problem.value.shape[3]
    width, size = COLUMNS * kind.lanes, kind.compute_size
    keys, split = tile_keys(head_dim, value_dim), split_keys(head_dim, value_dim)
    extent = _extent(problem, kind, call, split)
    batch, query_length, key_length = extent.batch, extent.queries, extent.keys
    compute = problem.query.dtype if size == 8 else torch.float32
    space = torch.empty(extent.places * head_dim * width, dtype=compute, device="cpu")
    progress = array("q", bytes(8 * extent.tasks))
    bias, slopes = None, None
    if gradients.bias is not None:
        # Broadcast rows or columns collect per head; a full plane collects in place, its sharers taking
        # turns.
        plane = gradients.bias.shape[2:]  # of a packed call, perhaps larger than the longest sequence
        in_place = (plane[0] > 1 or query_length == 1) and (plane[1] > 1 or key_length == 1)
        if plane == (1, 1):
            plane = torch.Size((query_length, 1))  # tiles and splits would meet in one number
        bias = (
            gradients.bias.zero_()
            if in_place
            else torch.zeros(batch, heads, *plane, dtype=compute, device="cpu")
        )
        c.put(call, c.GRAD_BIAS, c.tensor_fields(bias))
    if gradients.alibi_slopes is not None:
        slopes = torch.zeros(batch, heads, extent.splits, dtype=compute, device="cpu")
        call[c.GRAD_SLOPES] = slopes.data_ptr()
    call[c.TILES], call[c.SPLITS] = extent.tiles, extent.splits
    call[c.TILE_KEYS], call[c.SPLIT_KEYS] = keys, split
    call[c.SPACE], call[c.PROGRESS] = space.data_ptr(), c.address(progress)
    key_row, value_row = row_room(kind, head_dim) * size, row_room(kind, value_dim) * size
    scratch = lay_out(
        call,
        {
            c.AT_ROWS: TABLE_BYTES,
            c.AT_QUERY: width * key_row,
            c.AT_GRAD_OUT: width * value_row,
            c.AT_QUERY_ROWS: width * key_row,
            c.AT_GRAD_OUT_ROWS: width * value_row,
            **dict.fromkeys((c.AT_SCORES, c.AT_GRAD_SCORES, c.AT_SLOPE, c.AT_BIAS), keys * width * size),
            **dict.fromkeys((c.AT_ROUNDED, c.AT_GRAD_ROUNDED), keys * width * 2),
            **dict.fromkeys((c.AT_KEY, c.AT_KEY_COLUMNS, c.AT_GRAD_KEY), split * key_row),
            **dict.fromkeys((c.AT_VALUE, c.AT_GRAD_VALUE), split * value_row),
        },
    )
    _run_rounds(kind, call, extent, progress, scratch, heads * (4.0 * value_dim + 6.0 * head_dim))
    if gradients.bias is not None and bias is not None and bias is not gradients.bias:
        _sum_into(gradients.bias, bias, _broadcast_dims(bias, gradients.bias))
    if gradients.alibi_slopes is not None and slopes is not None:
        _sum_into(gradients.alibi_slopes, slopes, (0, 2) if gradients.alibi_slopes.shape[0] == 1 else (2,))


def _run_rounds(
    kind: Kind, call: array[int], extent: Extent, progress: array[int], scratch: int, per_pair: float
) -> None:
    work = entry(backward_kernel, kind)
    if extent.sequences is None:
        run(work, call, extent.tasks, scratch, per_pair * extent.pairs)
        return
    for plan in extent.rounds:
        put_schedule(call, plan)
        ctypes.memset(c.address(progress), 0, 8 * plan.tasks)
        run(work, call, plan.tasks, scratch, per_pair * extent.sequences.only(plan.table[:, 1]).pairs)


def _extent(problem: AttentionProblem, kind: Kind, call: array[int], split: int) -> Extent:
    """The tasks of the backward pass, and with sequences of their own lengths the tables that list them."""
    kv_heads = call[c.KV_HEADS]
    if problem.ragged:
        return _ragged_extent(problem, kind, call, split)
    batch, _, queries, _ = problem.query.shape
    keys = problem.key.shape[2]
    tiles, splits = tiles_of(kind, call, queries), -(-keys // split)
    heads, pairs = batch * kv_heads, float(batch * queries * keys)
    return Extent(batch, queries, keys, pairs, tiles, splits, heads * tiles, heads * splits, (), None)


def _ragged_extent(problem: AttentionProblem, kind: Kind, call: array[int], split: int) -> Extent:
    sequences, kv_heads = sequences_of(problem), call[c.KV_HEADS]
    tiles, splits = tiles_of(kind, call, sequences.queries), np.maximum(1, -(-sequences.keys // split))
    plan = schedule(sequences, kv_heads * splits, tiles, splits, kv_heads * tiles)
    # A sequence takes a whole tile of dQ for each head, however short it is.
    tile_bytes = call[c.HEAD_DIM] * COLUMNS * kind.lanes * kind.compute_size
    rounds = in_rounds(plan, _ROUND_BYTES // tile_bytes)
    call[c.SEQUENCES] = sequences.table.ctypes.data
    return Extent(
        problem.sequences,
        int(sequences.queries.max()),
        int(sequences.keys.max()),
        sequences.pairs,
        int(tiles.max()),
        int(splits.max()),
        max((one.places for one in rounds), default=0),
        max((one.tasks for one in rounds), default=0),
        tuple(rounds),
        sequences,
    )


def _broadcast_dims(full: Tensor, target: Tensor) -> tuple[int, ...]:
    return tuple(i for i, (n, m) in enumerate(zip(full.shape, target.shape, strict=True)) if n != m)


def split_keys(head_dim: int, value_dim: int) -> int:
    """Keys whose dK and dV one task of the backward pass owns: their accumulators stay in the second-level
    cache.
    """
    return 512 if max(head_dim, value_dim) <= 64 else 256 if max(head_dim, value_dim) <= 128 else 128
