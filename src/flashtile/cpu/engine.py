"""From an AttentionProblem to kernel calls: chooses the kind, lays out scratch memory, runs the tasks."""

from __future__ import annotations

from array import array
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from numba import types

from . import call as c
from . import forward as forward_pass
from .cache import DiskCache
from .rows import TABLE_BYTES
from .simd import BFLOAT16, BFLOAT16_PAIRS, FLOAT16, FLOAT32, FLOAT64, TARGET, Kind
from .workers import run

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import AttentionProblem

_KINDS = {
    torch.float64: FLOAT64,
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16_PAIRS if TARGET.bfloat16_dot else BFLOAT16,
    torch.float16: FLOAT16,
}


@cache
def compiled(dispatcher: Any, kind: Kind) -> Any:
    """The machine code of one kernel for one kind, from disk or compiled now."""
    signature = types.int64(kind.numba_type, types.int64, types.int64, types.int64)
    dispatcher._cache = DiskCache(dispatcher.py_func.__name__)
    dispatcher.compile(signature)
    entry = dispatcher.overloads[signature.args].entry_point
    return lambda call, scratch, limit: entry(kind, call, scratch, limit)


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
    return (count + 1 + kind.lanes) // kind.lanes * kind.lanes


def forward(problem: AttentionProblem, out: Tensor, lse: Tensor) -> None:
    """Writes O (B, Hq, Sq, Dv) and LSE (B, Hq, Sq) of one problem."""
    query, value = problem.query, problem.value
    batch, heads, query_length, head_dim = query.shape
    key_length, value_dim = value.shape[2], value.shape[3]
    if batch * heads * query_length == 0:
        return
    kind, call = _KINDS[query.dtype], c.describe(problem)
    c.put(call, c.OUT, c.tensor_fields(out))
    c.put(call, c.LSE, c.tensor_fields(lse, 3))
    width, size = forward_pass.COLUMNS * kind.lanes, kind.compute_size
    kv_heads = call[c.KV_HEADS]
    tiles = -(-query_length * call[c.GROUP] // width)
    keys = tile_keys(head_dim, value_dim)
    call[c.TILES], call[c.TILE_KEYS] = tiles, keys
    scratch = _lay_out(
        call,
        {
            c.AT_ROWS: TABLE_BYTES,
            c.AT_QUERY: _padded(kind, head_dim) * width * size,
            c.AT_SCORES: keys * width * size,
            c.AT_OUT: value_dim * width * size,
            c.AT_KEY: keys * _padded(kind, head_dim) * size,
            c.AT_VALUE: keys * _padded(kind, value_dim) * size,
            c.AT_BIAS: keys * width * size,
        },
    )
    work = 2.0 * batch * heads * query_length * key_length * (head_dim + value_dim)
    run(compiled(forward_pass.forward, kind), call, batch * kv_heads * tiles, scratch, work)
