"""What a forward call runs: kinds of tiles, layout of scratch memory, tasks; everything but addresses."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from . import call as c
from .decode import decode, merge
from .entries import Entry, entry
from .forward import forward as forward_kernel
from .gemm import COLUMNS
from .kinds import BFLOAT16, BFLOAT16_PAIRS, FLOAT16, FLOAT32, FLOAT64, TARGET, Kind
from .ragged import Schedule, Sequences, schedule, sequences_of
from .rows import TABLE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import AttentionProblem
    from .ragged import Integers

KINDS = {
    torch.float64: FLOAT64,
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16_PAIRS if TARGET.bfloat16_dot else BFLOAT16,
    torch.float16: FLOAT16,
}


def tile_keys(head_dim: int, value_dim: int) -> int:
    """Keys of one tile: as many as keep the tile and its scores near the processor."""
    return 128 if max(head_dim, value_dim) <= 256 else 64


def lay_out(call: array[int], parts: dict[int, int], start: int = 0) -> int:
    """Places the parts of scratch memory one behind the other on 64-byte boundaries; returns their end."""
    total = start
    for part, size in parts.items():
        call[part] = total
        total += (size + 63) // 64 * 64
    return total


def row_room(kind: Kind, count: int) -> int:
    """Numbers of a row in scratch memory: at least count + 1, since an odd count of pairs needs one more."""
    return int(count // kind.lanes + 1) * kind.lanes


class Step(NamedTuple):
    """One kernel run: its call but for the addresses, tasks, bytes of scratch memory per thread, FLOPs."""

    entry: Entry
    call: array[int]
    tasks: int
    scratch: int
    work: float


class Plan(NamedTuple):
    """A forward call but for its addresses."""

    steps: tuple[Step, ...]
    space: int  # bytes of memory shared by the tasks
    tables: tuple[Any, ...] = ()  # what the calls point to and nobody else holds


_plans: dict[tuple[Any, ...], Plan] = {}
_PLANS = 512
# More queries go in tiles. Heads of a group do not count: no row's bits depend on other heads.
_DECODE_QUERIES = 8
_DECODE_SPLIT_KEYS = 1024
# So many heads that lie at most so many bytes apart are decoded together. Farther apart, nothing is gained.
_TOGETHER, _NEAR_BYTES = 8, 2**16


def plan_of(problem: AttentionProblem, out: Tensor, lse: Tensor) -> Plan:
    """The plan of a forward call, remembered where shapes, strides and numbers say all but addresses."""
    keys = _common_keys(problem)
    if keys is None or problem.dropout_p:
        return _plan(problem, out, lse, keys)
    return _remembered(problem, out, lse, keys)


def _common_keys(problem: AttentionProblem) -> int | None:
    """How many keys each sequence has; None where that, or where they lie, takes a table to say."""
    if not problem.ragged:
        return problem.key.shape[2]
    if problem.key_lengths is None or problem.query_starts is not None or problem.batch_index is not None:
        return None
    lengths = problem.key_lengths.tolist()
    return lengths[0] if lengths and lengths.count(lengths[0]) == len(lengths) else None


def _remembered(problem: AttentionProblem, out: Tensor, lse: Tensor, keys: int) -> Plan:
    """The plan made for an earlier call of the same layout: a small call takes less time than its plan."""
    query, key, value = problem.query, problem.key, problem.value
    options = [(at, t.shape, t.stride()) for at, _, t in c.optional_tensors(problem) if t is not None]
    pages = None if problem.block_table is None else problem.block_table.stride()
    signature = (
        query.dtype, query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        out.stride(), lse.stride(), problem.scale, problem.softcap, problem.lower, problem.upper, keys, pages,
        problem.part, torch.get_num_threads(), *options,
    )  # fmt: skip
    plan = _plans.get(signature)
    if plan is None:
        if len(_plans) >= _PLANS:
            _plans.clear()
        plan = _plans[signature] = _plan(problem, out, lse, keys)
    return plan


def _plan(problem: AttentionProblem, out: Tensor, lse: Tensor, keys: int | None) -> Plan:
    """`keys` as _common_keys says."""
    query, value = problem.query, problem.value
    batch, heads, query_length, head_dim = query.shape
    value_dim = value.shape[3]
    call = c.describe(problem)
    c.put(call, c.OUT, c.tensor_fields(out))
    c.put(call, c.LSE, c.tensor_fields(lse, 3))
    call[c.TILE_KEYS] = tile_keys(head_dim, value_dim)
    kind, per_pair = KINDS[query.dtype], 2.0 * heads * (head_dim + value_dim)
    if keys is None:
        return _plan_ragged(kind, call, sequences_of(problem), per_pair)
    call[c.KEY_LENGTH] = keys
    work = per_pair * batch * query_length * keys
    if query_length <= _DECODE_QUERIES:
        kind = _decode_kind(kind)
        tiles, splits = _decode_tiles(kind, call, query_length), _decode_splits(keys)
        call[c.TILES], call[c.SPLITS] = int(tiles), int(splits)
        blocks = call[c.KV_HEADS] * call[c.TILES]
        together = _together(call, *(np.full(batch, x) for x in (blocks, query_length, keys)))
        tasks = batch * -(-blocks // together) * call[c.SPLITS]
        merged = batch * blocks if splits > 1 else 0
        return _plan_decode(kind, call, call, together, tasks, batch * blocks * call[c.SPLITS], merged, work)
    call[c.TILES] = tiles_of(kind, call, query_length)
    tasks = batch * call[c.KV_HEADS] * call[c.TILES]
    return Plan((_forward_step(kind, call, tasks, work),), 0)


def tiles_of(kind: Kind, call: array[int], queries: Any) -> Any:
    """Tiles of rows of one key head; for one number of queries or an array of them."""
    return -(-queries * call[c.GROUP] // (COLUMNS * kind.lanes))


def _decode_kind(kind: Kind) -> Kind:
    return BFLOAT16 if kind.pairs else kind


def _decode_tiles(kind: Kind, call: array[int], queries: Any) -> Any:
    return -(-queries * call[c.GROUP] // kind.lanes)


def _decode_splits(keys: Any) -> Any:
    return np.maximum(1, -(-keys // _DECODE_SPLIT_KEYS))


def _together(call: array[int], blocks: Integers, queries: Integers, keys: Integers) -> int:
    """How many blocks of a sequence a task decodes, so that its work is a fraction of each thread's share."""
    far = max(call[c.KEY + 2], call[c.VALUE + 2]) > _NEAR_BYTES
    if far or call[c.FIRST] or call[c.LAST]:  # how many keys intervals leave only the kernels know
        return 1
    seen = np.clip(call[c.UPPER] - call[c.LOWER] + queries, 0, keys)
    longest = min(_DECODE_SPLIT_KEYS, int(seen.max(initial=1)))
    share = int(np.dot(blocks, seen)) // (4 * torch.get_num_threads() * max(1, longest))
    return max(1, min(int(blocks.max(initial=1)), _TOGETHER, share))


def _forward_step(kind: Kind, call: array[int], tasks: int, work: float) -> Step:
    """Tiles of rows; lays out the scratch memory in `call`."""
    head_dim, value_dim = call[c.HEAD_DIM], call[c.VALUE_DIM]
    width, size = COLUMNS * kind.lanes, kind.compute_size
    tile = call[c.TILE_KEYS] * width * size
    parts = {
        c.AT_ROWS: TABLE_BYTES,
        c.AT_QUERY: row_room(kind, head_dim) * width * size,
        c.AT_SCORES: tile,
        c.AT_OUT: value_dim * width * size,
        c.AT_KEY: call[c.TILE_KEYS] * row_room(kind, head_dim) * size,
        c.AT_VALUE: call[c.TILE_KEYS] * row_room(kind, value_dim) * size,
        c.AT_BIAS: tile,
    }
    if call[c.PAGE_SIZE]:
        parts[c.AT_PAGES] = call[c.TILE_KEYS] * max(head_dim, value_dim) * kind.itemsize
    return Step(entry(forward_kernel, kind), call, tasks, lay_out(call, parts), work)


def _plan_decode(
    kind: Kind,
    call: array[int],
    merge_call: array[int],
    together: int,
    tasks: int,
    states: int,
    merged: int,
    work: float,
) -> Plan:
    """Few queries: a task is one split of keys for `together` vectors of rows, each with a state; `merged`
    vectors have several.
    """
    size, keys = kind.compute_size, call[c.TILE_KEYS]
    key_row, value_row = row_room(kind, call[c.HEAD_DIM]) * size, row_room(kind, call[c.VALUE_DIM]) * size
    own = {c.AT_ROWS: TABLE_BYTES, c.AT_QUERY: kind.lanes * key_row, c.AT_OUT: kind.lanes * value_row}
    shared = {
        c.AT_KEY: keys * key_row,
        c.AT_VALUE: keys * value_row,
        c.AT_ADDRESSES: 2 * 2 * 8 * keys,  # of K and V: a tile, and at most as many rows ahead
        **dict.fromkeys((c.AT_SCORES, c.AT_BIAS), keys * kind.lanes * size),
    }
    for one in (call, merge_call):
        one[c.AT_NEXT], one[c.TOGETHER], one[c.SPLIT_KEYS] = lay_out(one, own), together, _DECODE_SPLIT_KEYS
        scratch = lay_out(one, shared, together * one[c.AT_NEXT])
    step = Step(entry(decode, kind), call, tasks, scratch, work)
    if merged == 0:
        return Plan((step,), 0)
    space = kind.lanes * (2 * size + value_row) * states
    return Plan((step, Step(entry(merge, kind), merge_call, merged, scratch, space / 2)), space)


def _plan_ragged(kind: Kind, call: array[int], sequences: Sequences, per_pair: float) -> Plan:
    """Sequences of few queries are decoded, the others go in tiles, as each would alone."""
    table, queries, keys = sequences
    few, heads = queries <= _DECODE_QUERIES, call[c.KV_HEADS]
    call[c.SEQUENCES] = table.ctypes.data
    work, steps, space, tables = per_pair * sequences.pairs, [], 0, [table]
    if not few.all():
        tiles = np.where(few, 0, tiles_of(kind, call, queries))
        plan = schedule(sequences, heads * tiles, tiles, np.ones_like(tiles), tiles)
        steps.append(_forward_step(kind, _scheduled(call, plan), plan.tasks, work))
        tables.append(plan.table)
    if (few & (queries > 0)).any():
        kind = _decode_kind(kind)
        tiles = np.where(few, _decode_tiles(kind, call, queries), 0)
        splits = _decode_splits(keys)
        blocks = heads * tiles
        states = blocks * splits
        together = _together(call, blocks, queries, keys)
        parts = schedule(sequences, -(-blocks // together) * splits, tiles, splits, states)
        whole = schedule(sequences, np.where(splits > 1, blocks, 0), tiles, splits, states)
        calls = _scheduled(call, parts), _scheduled(call, whole)
        decoding = _plan_decode(kind, *calls, together, parts.tasks, parts.places, whole.tasks, work)
        steps, space = [*steps, *decoding.steps], decoding.space
        tables += [parts.table, whole.table]
    return Plan(tuple(steps), space, tuple(tables))


def _scheduled(call: array[int], plan: Schedule) -> array[int]:
    call = call[:]
    put_schedule(call, plan)
    return call


def put_schedule(call: array[int], plan: Schedule) -> None:
    """The call points to the table of the schedule, which has to outlive it."""
    call[c.SCHEDULE], call[c.SCHEDULE_ROWS] = plan.table.ctypes.data, len(plan.table)
