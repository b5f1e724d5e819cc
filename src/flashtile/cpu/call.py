"""One call described for the kernels: an int64 array of addresses, strides (in bytes), sizes and options.

Passing one address keeps a call at microseconds and the compiled code independent of NumPy dtypes and
layouts.
"""

from __future__ import annotations

import struct
from array import array
from itertools import count
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .kinds import I64
from .llvm import offset, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import AttentionProblem

_index = count()


def _fields(n: int) -> int:
    """The first of n consecutive fields."""
    first = next(_index)
    for _ in range(n - 1):
        next(_index)
    return first


# A tensor takes five fields: address and the strides of batch, head, row and element. Address 0 means absent.
HEADS, KV_HEADS, GROUP, QUERY_LENGTH, KEY_LENGTH, HEAD_DIM, VALUE_DIM = (_fields(1) for _ in range(7))
QUERY, KEY, VALUE, OUT, MASK, BIAS, GRAD_OUT = (_fields(5) for _ in range(7))
GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS = (_fields(5) for _ in range(4))
# Address; batch, head, row. Where LSE_REST is given, LSE holds row maxima and LSE_REST logs of row sums.
LSE, LSE_REST, DELTA = _fields(4), _fields(4), _fields(4)
FIRST, LAST, SLOPES = _fields(3), _fields(3), _fields(3)  # address; batch, row (slopes: batch, head)
SINKS = _fields(2)  # address; head
LOWER, UPPER = _fields(1), _fields(1)
SCALE, SOFTCAP, KEEP_SCALE = (_fields(1) for _ in range(3))  # float64 bits; softcap 0 = none
# DROPOUT: whether there is any; words >= the threshold are kept.
DROPOUT, DROPOUT_THRESHOLD, SEED_LOW, SEED_HIGH = (_fields(1) for _ in range(4))
# What counts positions and heads in the whole of which this call is a part, in elements (see problem.Part).
PART_QUERY, PART_KEY, PART_HEAD, PART_HEADS, PART_DIAGONAL = (_fields(1) for _ in range(5))
TILES, SPLITS = _fields(1), _fields(1)
SPLIT_KEYS, SPACE, PROGRESS, GRAD_SLOPES = (_fields(1) for _ in range(4))  # of decode and backward
TILE_KEYS = _fields(1)
TOGETHER, AT_NEXT = _fields(1), _fields(1)  # blocks of a decode task, and how far apart their parts lie
# Sequences of their own lengths (see sequences.py): tables of int64, address 0 where all are alike.
SEQUENCES, SCHEDULE, SCHEDULE_ROWS = (_fields(1) for _ in range(3))
BLOCK_TABLE, BLOCK_TABLE_ROW, PAGE_SIZE = (_fields(1) for _ in range(3))  # int32; bytes; 0 = no pages
# Offsets of the parts of one worker's scratch memory.
AT_QUERY, AT_SCORES, AT_OUT, AT_KEY, AT_VALUE, AT_BIAS, AT_ROWS = (_fields(1) for _ in range(7))
AT_KEY_COLUMNS, AT_GRAD_OUT, AT_QUERY_ROWS, AT_GRAD_OUT_ROWS, AT_GRAD_SCORES = (_fields(1) for _ in range(5))
AT_SLOPE, AT_ROUNDED, AT_GRAD_ROUNDED, AT_GRAD_KEY, AT_GRAD_VALUE = (_fields(1) for _ in range(5))
AT_PAGES, AT_ADDRESSES = (_fields(1) for _ in range(2))
# The schedule: TASKS in all, at most LIMIT per visit of a thread, which owns SCRATCH_STEP bytes of SCRATCH.
TASKS, LIMIT, SCRATCH, SCRATCH_STEP = (_fields(1) for _ in range(4))
_fields(8)  # the counters that threads share lie on a cache line of their own
NEXT_TASK, NEXT_SLOT = _fields(1), _fields(1)
SIZE = next(_index)

UNBOUNDED = 1 << 40


@intrinsic
def field(tc: Any, call: Any, index: Any) -> Any:
    """One int64 field of the call."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(pointer(b, offset(b, args[0], args[1], 8), I64), align=8)

    return types.int64(types.int64, types.int64), gen


@intrinsic
def real_field(tc: Any, call: Any, index: Any) -> Any:
    """One float64 field of the call."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(pointer(b, offset(b, args[0], args[1], 8), ir.DoubleType()), align=8)

    return types.float64(types.int64, types.int64), gen


def float_bits(x: float) -> int:
    return int(struct.unpack("q", struct.pack("d", x))[0])


def tensor_fields(tensor: Tensor | None, dims: int = 4) -> list[int]:
    """Address and byte strides; a dimension of size 1 is broadcast: its stride is 0."""
    if tensor is None:
        return [0] * (dims + 1)
    size = tensor.element_size()
    strides = [s * size if n != 1 else 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True)]
    return [tensor.data_ptr(), *strides]


def describe(problem: AttentionProblem) -> array[int]:
    """The fields every kernel reads; outputs and the schedule are filled in by the caller."""
    query, key, value = problem.query, problem.key, problem.value
    _, heads, query_length, head_dim = query.shape
    kv_heads, key_length = key.shape[1], key.shape[2]
    call = array("q", bytes(8 * SIZE))
    call[:GROUP] = array("q", (heads, kv_heads))
    group = heads // kv_heads if kv_heads else 0
    call[GROUP:QUERY] = array("q", (group, query_length, key_length, head_dim, value.shape[3]))
    put(call, QUERY, [*tensor_fields(query), *tensor_fields(key), *tensor_fields(value)])
    call[LOWER] = -UNBOUNDED if problem.lower is None else _bound(problem.lower)
    call[UPPER] = UNBOUNDED if problem.upper is None else _bound(problem.upper)
    call[SCALE] = float_bits(problem.scale)
    call[PART_HEADS] = heads
    if problem.part is not None:
        first_query, first_key, head, all_heads, diagonal = problem.part
        # Kernels know their own diagonal, keys - queries.
        diagonal += first_query - first_key - (key_length - query_length)
        put(call, PART_QUERY, [first_query, first_key, head, all_heads, diagonal])
    _describe_options(call, problem)
    return call


def _bound(x: int) -> int:
    return max(-UNBOUNDED, min(int(x), UNBOUNDED))


def _describe_options(call: array[int], problem: AttentionProblem) -> None:
    for at, dims, tensor in optional_tensors(problem):
        if tensor is not None:
            put(call, at, tensor_fields(tensor, dims))
    if problem.block_table is not None:
        put(call, BLOCK_TABLE, [*tensor_fields(problem.block_table, 2)[:2], problem.key.shape[2]])
    if problem.softcap:
        call[SOFTCAP] = float_bits(problem.softcap)
    if problem.dropout_p:
        # dropout_p = 1 keeps nothing: no word passes but the largest, and that one is scaled by 0.
        call[DROPOUT] = 1
        call[DROPOUT_THRESHOLD] = min(int(problem.dropout_p * 2**32), 2**32 - 1)
        call[KEEP_SCALE] = float_bits(1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1.0 else 0.0)
        seed = int(problem.seed)
        call[SEED_LOW] = seed & 0xFFFFFFFF
        call[SEED_HIGH] = (seed >> 32) & 0xFFFFFFFF


def optional_tensors(problem: AttentionProblem) -> tuple[tuple[int, int, Tensor | None], ...]:
    """Of each tensor that a problem may lack: where a call has its address, and its dimensions."""
    return (
        (MASK, 4, problem.mask),
        (BIAS, 4, problem.bias),
        (FIRST, 2, problem.first),
        (LAST, 2, problem.last),
        (SLOPES, 2, problem.alibi_slopes),
        (SINKS, 1, problem.sinks),
    )


def put_addresses(call: array[int], problem: AttentionProblem) -> None:
    """The addresses of everything that a plan knows but for where it lies."""
    call[QUERY], call[KEY] = problem.query.data_ptr(), problem.key.data_ptr()
    call[VALUE] = problem.value.data_ptr()
    for at, _, tensor in optional_tensors(problem):
        if tensor is not None:
            call[at] = tensor.data_ptr()
    if problem.block_table is not None:
        call[BLOCK_TABLE] = problem.block_table.data_ptr()


def put(call: array[int], index: int, values: list[int]) -> None:
    call[index : index + len(values)] = array("q", values)


def address(call: array[Any]) -> int:
    return call.buffer_info()[0]
