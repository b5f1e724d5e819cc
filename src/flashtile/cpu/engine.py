"""From an AttentionProblem to kernel calls: chooses the kind, lays out scratch memory, runs the tasks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from . import call as c
from .backward import backward as backward_kernel
from .backward import row_deltas
from .decode import decode, merge
from .entries import Entry, entry
from .forward import forward as forward_kernel
from .gemm import COLUMNS
from .kinds import BFLOAT16, BFLOAT16_PAIRS, FLOAT16, FLOAT32, FLOAT64, TARGET, Kind
from .rows import TABLE_BYTES
from .workers import run

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import AttentionProblem, Gradients

_KINDS = {
    torch.float64: FLOAT64,
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16_PAIRS if TARGET.bfloat16_dot else BFLOAT16,
    torch.float16: FLOAT16,
}


def tile_keys(head_dim: int, value_dim: int) -> int:
    """Keys of one tile: as many as keep the tile and its scores near the processor."""
    return 128 if max(head_dim, value_dim) <= 256 else 64


def _lay_out(call: array[int], parts: dict[int, int]) -> int:
    """Places the parts of scratch memory one behind the other on 64-byte boundaries; returns the size."""
    total = 0
    for part, size in parts.items():
        call[part] = total
        total += (size + 63) // 64 * 64
    return total


def _padded(kind: Kind, count: int) -> int:
    """At least count + 1, in whole vectors: an odd count of pairs needs one more."""
    return int(count // kind.lanes + 1) * kind.lanes


class _Step(NamedTuple):
    """One kernel run over the call: tasks, bytes of scratch memory per thread, FLOPs."""

    entry: Entry
    tasks: int
    scratch: int
    work: float


class _Plan(NamedTuple):
    """A forward call but for its addresses."""

    call: array[int]
    steps: tuple[_Step, ...]
    space: int  # bytes of memory shared by the tasks


_plans: dict[tuple[Any, ...], _Plan] = {}
_PLANS = 512
# More queries go in tiles. Heads of a group do not count: no row's bits depend on other heads.
_DECODE_QUERIES = 8
_DECODE_SPLIT_KEYS = 1024


def forward(problem: AttentionProblem, out: Tensor, lse: Tensor) -> None:
    """Writes O (B, Hq, Sq, Dv) and LSE (B, Hq, Sq) of one problem."""
    plan = _plain_plan(problem, out, lse) if _is_plain(problem) else _plan_forward(problem, out, lse)
    _execute(plan, problem, out, lse)


def _execute(
    plan: _Plan, problem: AttentionProblem, out: Tensor, lse: Tensor, rest: Tensor | None = None
) -> None:
    call = plan.call[:]
    call[c.QUERY], call[c.KEY] = problem.query.data_ptr(), problem.key.data_ptr()
    call[c.VALUE] = problem.value.data_ptr()
    call[c.OUT], call[c.LSE] = out.data_ptr(), lse.data_ptr()
    if rest is not None:
        c.put(call, c.LSE_REST, c.tensor_fields(rest, 3))
    if plan.space:
        space = torch.empty(plan.space, dtype=torch.uint8, device="cpu")
        call[c.SPACE] = space.data_ptr()
    for step in plan.steps:
        run(step.entry, call, step.tasks, step.scratch, step.work)


def _is_plain(problem: AttentionProblem) -> bool:
    """Whether shapes, strides and numbers describe the call: no tensor but query, key and value."""
    return (
        problem.mask is None
        and problem.bias is None
        and problem.first is None
        and problem.last is None
        and problem.alibi_slopes is None
        and problem.sinks is None
        and not problem.dropout_p
    )


def _plain_plan(problem: AttentionProblem, out: Tensor, lse: Tensor) -> _Plan:
    """The plan of a plain call, remembered: a small call takes less time than its description."""
    query, key, value = problem.query, problem.key, problem.value
    signature = (
        query.dtype, query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        out.stride(), lse.stride(), problem.scale, problem.softcap, problem.lower, problem.upper,
    )  # fmt: skip
    plan = _plans.get(signature)
    if plan is None:
        if len(_plans) >= _PLANS:
            _plans.clear()
        plan = _plans[signature] = _plan_forward(problem, out, lse)
    return plan


def _plan_forward(problem: AttentionProblem, out: Tensor, lse: Tensor) -> _Plan:
    query, value = problem.query, problem.value
    batch, heads, query_length, head_dim = query.shape
    key_length, value_dim = value.shape[2], value.shape[3]
    call = c.describe(problem)
    c.put(call, c.OUT, c.tensor_fields(out))
    c.put(call, c.LSE, c.tensor_fields(lse, 3))
    call[c.TILE_KEYS] = tile_keys(head_dim, value_dim)
    work = 2.0 * batch * heads * query_length * key_length * (head_dim + value_dim)
    kind = _KINDS[query.dtype]
    if query_length <= _DECODE_QUERIES:
        return _plan_decode(BFLOAT16 if kind.pairs else kind, call, batch, work)
    width, size = COLUMNS * kind.lanes, kind.compute_size
    call[c.TILES] = -(-query_length * call[c.GROUP] // width)
    tile = call[c.TILE_KEYS] * width * size
    parts = {
        c.AT_ROWS: TABLE_BYTES,
        c.AT_QUERY: _padded(kind, head_dim) * width * size,
        c.AT_SCORES: tile,
        c.AT_OUT: value_dim * width * size,
        c.AT_KEY: call[c.TILE_KEYS] * _padded(kind, head_dim) * size,
        c.AT_VALUE: call[c.TILE_KEYS] * _padded(kind, value_dim) * size,
        c.AT_BIAS: tile,
    }
    tasks = batch * call[c.KV_HEADS] * call[c.TILES]
    return _Plan(call, (_Step(entry(forward_kernel, kind), tasks, _lay_out(call, parts), work),), 0)


def _plan_decode(kind: Kind, call: array[int], batch: int, work: float) -> _Plan:
    """Few queries: tasks are splits of the keys for one vector of rows each, merged afterwards."""
    size, keys = kind.compute_size, call[c.TILE_KEYS]
    key_row, value_row = _padded(kind, call[c.HEAD_DIM]) * size, _padded(kind, call[c.VALUE_DIM]) * size
    call[c.TILES] = -(-call[c.QUERY_LENGTH] * call[c.GROUP] // kind.lanes)
    call[c.SPLIT_KEYS] = _DECODE_SPLIT_KEYS
    splits = call[c.SPLITS] = max(1, -(-call[c.KEY_LENGTH] // _DECODE_SPLIT_KEYS))
    parts = {
        c.AT_ROWS: TABLE_BYTES,
        c.AT_QUERY: kind.lanes * key_row,
        c.AT_OUT: kind.lanes * value_row,
        c.AT_KEY: keys * key_row,
        c.AT_VALUE: keys * value_row,
        **dict.fromkeys((c.AT_SCORES, c.AT_BIAS), keys * kind.lanes * size),
    }
    scratch, blocks = _lay_out(call, parts), batch * call[c.KV_HEADS] * call[c.TILES]
    steps = (_Step(entry(decode, kind), blocks * splits, scratch, work),)
    if splits == 1:
        return _Plan(call, steps, 0)
    space = kind.lanes * (2 * size + value_row) * blocks * splits
    return _Plan(call, (*steps, _Step(entry(merge, kind), blocks, scratch, space / 2)), space)


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
    batch, heads, query_length, head_dim = query.shape
    key_length, value_dim = value.shape[2], value.shape[3]
    delta = torch.zeros_like(lse, memory_format=torch.contiguous_format) if grad_lse is None else -grad_lse
    if 0 in (batch, heads, query_length, key_length):
        _fill_empty(gradients)
    else:
        kind, call = _KINDS[query.dtype], c.describe(problem)
        if grad_out.stride(-1) != 1:  # that of out.sum(): one number, which tiles would gather one by one
            grad_out = grad_out.contiguous()
        for tensor, at in ((out, c.OUT), (grad_out, c.GRAD_OUT), (gradients.query, c.GRAD_QUERY)):
            c.put(call, at, c.tensor_fields(tensor))
        for tensor, at in ((gradients.key, c.GRAD_KEY), (gradients.value, c.GRAD_VALUE)):
            c.put(call, at, c.tensor_fields(tensor))
        maxima, rest = _split_lse(problem, lse)
        c.put(call, c.LSE, c.tensor_fields(maxima, 3))
        c.put(call, c.LSE_REST, c.tensor_fields(rest, 3))
        c.put(call, c.DELTA, c.tensor_fields(delta, 3))
        rows = float(batch * heads * query_length)
        run(entry(row_deltas, kind), call, batch * heads, 0, 4 * rows * value_dim)
        _run_backward(problem, kind, call, gradients, rows * key_length * (4 * value_dim + 6 * head_dim))
    if gradients.sinks is not None and problem.sinks is not None:
        # The sink's probability is exp(sink - LSE), and its value is 0: dS = P (0 - delta).
        share = torch.exp(problem.sinks.view(1, -1, 1) - lse)
        _sum_into(gradients.sinks, (-share * delta).masked_fill(lse == -torch.inf, 0.0), (0, 2))


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
    _execute(_plan_forward(problem, out, maxima), problem, out, maxima, rest)
    return torch.where(large, maxima, lse), torch.where(large, rest, 0.0)


def _fill_empty(gradients: Gradients) -> None:
    for tensor in (gradients.query, gradients.key, gradients.value, gradients.bias, gradients.alibi_slopes):
        if tensor is not None:
            tensor.zero_()


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


def _run_backward(
    problem: AttentionProblem, kind: Kind, call: array[int], gradients: Gradients, work: float
) -> None:
    batch, heads, query_length, head_dim = problem.query.shape
    key_length, value_dim = problem.value.shape[2], problem.value.shape[3]
    width, size, kv_heads = COLUMNS * kind.lanes, kind.compute_size, call[c.KV_HEADS]
    tiles = -(-query_length * call[c.GROUP] // width)
    keys = tile_keys(head_dim, value_dim)
    split = split_keys(head_dim, value_dim)
    splits = -(-key_length // split)
    compute = problem.query.dtype if size == 8 else torch.float32
    space = torch.empty(batch * kv_heads * tiles * head_dim * width, dtype=compute, device="cpu")
    progress = array("q", bytes(8 * batch * kv_heads * splits))
    bias, slopes = None, None
    if gradients.bias is not None:
        # Broadcast rows or columns collect per head; a full plane collects in place, its sharers taking
        # turns.
        plane = gradients.bias.shape[2:]
        in_place = plane == (query_length, key_length)
        if plane == (1, 1):
            plane = torch.Size((query_length, 1))  # tiles and splits would meet in one number
        bias = (
            gradients.bias.zero_()
            if in_place
            else torch.zeros(batch, heads, *plane, dtype=compute, device="cpu")
        )
        c.put(call, c.GRAD_BIAS, c.tensor_fields(bias))
    if gradients.alibi_slopes is not None:
        slopes = torch.zeros(batch, heads, splits, dtype=compute, device="cpu")
        call[c.GRAD_SLOPES] = slopes.data_ptr()
    call[c.TILES], call[c.TILE_KEYS], call[c.SPLIT_KEYS], call[c.SPLITS] = tiles, keys, split, splits
    call[c.SPACE], call[c.PROGRESS] = space.data_ptr(), c.address(progress)
    key_row, value_row = _padded(kind, head_dim) * size, _padded(kind, value_dim) * size
    scratch = _lay_out(
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
    run(entry(backward_kernel, kind), call, batch * kv_heads * splits, scratch, work)
    if gradients.bias is not None and bias is not None and bias is not gradients.bias:
        _sum_into(gradients.bias, bias, _broadcast_dims(bias, gradients.bias))
    if gradients.alibi_slopes is not None and slopes is not None:
        _sum_into(gradients.alibi_slopes, slopes, (0, 2) if gradients.alibi_slopes.shape[0] == 1 else (2,))


def _broadcast_dims(full: Tensor, target: Tensor) -> tuple[int, ...]:
    return tuple(i for i, (n, m) in enumerate(zip(full.shape, target.shape, strict=True)) if n != m)


def split_keys(head_dim: int, value_dim: int) -> int:
    """Keys whose dK and dV one task of the backward pass owns: their accumulators stay in the second-level
    cache.
    """
    return 512 if max(head_dim, value_dim) <= 64 else 256 if max(head_dim, value_dim) <= 128 else 128
