"""Few query rows against many keys: split over the keys, packed over the heads of a group, limited by memory.

One task is one split of keys of one key head; it leaves a partial online-softmax state, and `merge` combines
the states of a head exactly: rescale to the larger maximum, then add.
"""

from __future__ import annotations

import math

from .call import (
    AT_BIAS,
    AT_KEY,
    AT_OUT,
    AT_QUERY,
    AT_ROWS,
    AT_SCORES,
    AT_VALUE,
    HEAD_DIM,
    KEY,
    KV_HEADS,
    OUT,
    QUERY,
    SINKS,
    SPACE,
    SPLIT_KEYS,
    SPLITS,
    TILE_KEYS,
    TILES,
    VALUE,
    VALUE_DIM,
    field,
)
from .dots import score_rows, weigh_rows
from .exact import accumulate_exactly
from .forward import finish_rows, start_rows
from .kinds import (
    Kind,
    compute_kind,
    compute_size,
    dot_kind,
    itemsize,
    lanes,
    native,
    register_bytes,
    vector_size,
)
from .operands import all_finite
from .rows import (
    COUNT,
    FACTOR,
    HIGH,
    LOW,
    OUT_ROW,
    QUERY_ROW,
    ROW_MAX,
    ROW_SUM,
    locate_rows,
    set_rows,
    tensor_at,
)
from .scores import LOG2_E, finish_scores, hides_some, score_factor
from .simd import copy_int16, load, peek, peek_int64, poke, splat, store
from .softmax import online_softmax
from .stage import fill, padded, stage_lanes, stage_natural, unstage_natural


@native
def decode(kind: Kind, call: int, scratch: int, task: int) -> None:
    """One vector of rows of one key head against one split of its keys; splits follow one another."""
    splits = field(call, SPLITS)
    block, split = task // splits, task % splits
    _decode_split(kind, call, scratch, block, split)
    if splits == 1:
        _finish(kind, call, scratch, block)
    else:
        _keep(kind, call, scratch, task)


@native
def _place(kind: Kind, call: int, block: int) -> tuple[int, int, int]:
    """Batch, key head and first row of a block of rows."""
    tiles, heads = field(call, TILES), field(call, KV_HEADS)
    return block // tiles // heads, block // tiles % heads, block % tiles * lanes(kind)


@native
def _out_row(kind: Kind, call: int) -> int:
    return padded(kind, field(call, VALUE_DIM)) * compute_size(kind)


@native
def _decode_split(kind: Kind, call: int, scratch: int, block: int, split: int) -> None:
    """The online softmax of a block of rows over one split of keys."""
    batch, kv_head, start_row = _place(kind, call, block)
    table, width = scratch + field(call, AT_ROWS), lanes(kind)
    set_rows(kind, call, table, batch, kv_head, start_row, width, False)
    locate_rows(call, table, QUERY, QUERY_ROW, batch, kv_head, start_row, width)
    rows, head_dim = peek_int64(table + COUNT), field(call, HEAD_DIM)
    direct = _reads_keys_directly(kind, call)
    query_row = head_dim * itemsize(kind) if direct else padded(kind, head_dim) * compute_size(kind)
    if direct:
        _copy_queries(table, rows, query_row, scratch + field(call, AT_QUERY))
    else:
        step = field(call, QUERY + 4)
        stage_lanes(
            kind, table + QUERY_ROW, step, rows, head_dim, scratch + field(call, AT_QUERY), query_row, width
        )
    fill(
        kind,
        scratch + field(call, AT_OUT),
        _out_row(kind, call),
        rows,
        padded(kind, field(call, VALUE_DIM)),
        0.0,
    )
    fill(kind, scratch + field(call, AT_SCORES), vector_size(kind), field(call, TILE_KEYS), width, 0.0)
    start_rows(kind, call, table, kv_head, start_row, width, field(call, SINKS) if split == 0 else 0)
    start, step = split * field(call, SPLIT_KEYS), field(call, TILE_KEYS)
    low = max(start, peek_int64(table + LOW) // step * step)
    high = min(start + field(call, SPLIT_KEYS), peek_int64(table + HIGH))
    for first in range(low, high, step):
        _decode_keys(
            kind, call, scratch, batch, kv_head, first, min(step, high - first), rows, direct, query_row
        )


@native
def _reads_keys_directly(kind: Kind, call: int) -> bool:
    """Whether rows of K are whole registers of contiguous numbers; else tiles of K are staged."""
    size = itemsize(kind)
    whole = field(call, HEAD_DIM) * size % register_bytes(dot_kind(kind)) == 0
    return whole and field(call, KEY + 4) == size and field(call, QUERY + 4) == size


@native
def _copy_queries(table: int, rows: int, query_row: int, target: int) -> None:
    """Rows of Q as they are stored, one behind the other (16-bit units serve every dtype)."""
    for row in range(rows):
        source = peek_int64(table + QUERY_ROW + 8 * row)
        for at in range(0, query_row, 2):
            copy_int16(source + at, target + row * query_row + at)


@native
def _decode_keys(
    kind: Kind,
    call: int,
    scratch: int,
    batch: int,
    kv_head: int,
    first: int,
    keys: int,
    rows: int,
    direct: bool,
    query_row: int,
) -> None:
    width, row = lanes(kind), vector_size(kind)
    table, scores, query = (
        scratch + field(call, AT_ROWS),
        scratch + field(call, AT_SCORES),
        scratch + field(call, AT_QUERY),
    )
    spare, out, out_row = scratch + field(call, AT_BIAS), scratch + field(call, AT_OUT), _out_row(kind, call)
    key, key_row = tensor_at(call, KEY, batch, kv_head, first), field(call, KEY + 3)
    value, value_row = tensor_at(call, VALUE, batch, kv_head, first), field(call, VALUE + 3)
    value_bytes = field(call, VALUE_DIM) * itemsize(kind)
    if direct:
        score_rows(
            dot_kind(kind), key, key_row, query, query_row, query_row, keys, rows, scores, row,
            spare, value, value_row, value_bytes,
        )  # fmt: skip
    else:
        staged = scratch + field(call, AT_KEY)
        stage_natural(
            kind, key, key_row, field(call, KEY + 4), keys, field(call, HEAD_DIM), staged, query_row
        )
        score_rows(
            compute_kind(kind), staged, query_row, query, query_row, query_row, keys, rows, scores, row,
            spare, value, value_row, value_bytes,
        )  # fmt: skip
    finish_scores(kind, call, table, scores, 0, spare, first, keys, width)
    if online_softmax(kind, call, table, scores, score_factor(call), first, keys, width):
        _rescale_rows(kind, out, out_row, rows, table + FACTOR)
    if hides_some(call, table, first, keys) and not all_finite(
        kind, call, VALUE, batch, kv_head, first, keys, VALUE_DIM
    ):
        size = compute_size(kind)
        accumulate_exactly(kind, call, table, scores, width, out, out_row, size, batch, kv_head, first, keys)
        return
    _weigh_values(kind, call, scratch, batch, kv_head, first, keys, rows)


@native
def _weigh_values(
    kind: Kind, call: int, scratch: int, batch: int, kv_head: int, first: int, keys: int, rows: int
) -> None:
    value, value_row = tensor_at(call, VALUE, batch, kv_head, first), field(call, VALUE + 3)
    scores, out, row, value_dim = (
        scratch + field(call, AT_SCORES),
        scratch + field(call, AT_OUT),
        vector_size(kind),
        field(call, VALUE_DIM),
    )
    out_row, vectors = _out_row(kind, call), padded(kind, value_dim) // lanes(kind)
    key_row, key_bytes = field(call, KEY + 3), field(call, HEAD_DIM) * itemsize(kind)
    next_key = tensor_at(call, KEY, batch, kv_head, first + field(call, TILE_KEYS))
    if value_dim % lanes(kind) == 0 and field(call, VALUE + 4) == itemsize(kind):
        weigh_rows(
            kind,
            scores,
            row,
            value,
            value_row,
            keys,
            rows,
            vectors,
            out,
            out_row,
            next_key,
            key_row,
            key_bytes,
        )
    else:
        staged = scratch + field(call, AT_VALUE)
        stage_natural(kind, value, value_row, field(call, VALUE + 4), keys, value_dim, staged, out_row)
        weigh_rows(
            compute_kind(kind), scores, row, staged, out_row, keys, rows, vectors, out, out_row,
            next_key, key_row, key_bytes,
        )  # fmt: skip


@native
def _rescale_rows(kind: Kind, out: int, out_row: int, rows: int, factors: int) -> None:
    for r in range(rows):
        factor = splat(kind, peek(kind, factors + r * compute_size(kind)))
        for at in range(out + r * out_row, out + (r + 1) * out_row, vector_size(kind)):
            store(at, load(kind, at) * factor)


@native
def _finish(kind: Kind, call: int, scratch: int, block: int) -> None:
    """Normalises the rows of a block and writes them, with their LSE."""
    batch, kv_head, start_row = _place(kind, call, block)
    table, size = scratch + field(call, AT_ROWS), compute_size(kind)
    finish_rows(kind, call, table, batch, kv_head, start_row)
    locate_rows(call, table, OUT, OUT_ROW, batch, kv_head, start_row, lanes(kind))
    out, out_row = scratch + field(call, AT_OUT), _out_row(kind, call)
    for r in range(peek_int64(table + COUNT)):
        factor, target = peek(kind, table + FACTOR + r * size), peek_int64(table + OUT_ROW + 8 * r)
        source = out + r * out_row
        unstage_natural(
            kind, source, out_row, factor, target, 0, field(call, OUT + 4), 1, field(call, VALUE_DIM)
        )


@native
def _state(kind: Kind, call: int, task: int) -> int:
    """Where a task keeps its state: row maxima, row sums, unnormalised rows of O."""
    return field(call, SPACE) + task * (2 * vector_size(kind) + lanes(kind) * _out_row(kind, call))


@native
def _copy(kind: Kind, source: int, target: int, size: int) -> None:
    for at in range(0, size, vector_size(kind)):
        store(target + at, load(kind, source + at))


@native
def _keep(kind: Kind, call: int, scratch: int, task: int) -> None:
    table, state, one = scratch + field(call, AT_ROWS), _state(kind, call, task), vector_size(kind)
    _copy(kind, table + ROW_MAX, state, one)
    _copy(kind, table + ROW_SUM, state + one, one)
    rows = peek_int64(table + COUNT)
    _copy(kind, scratch + field(call, AT_OUT), state + 2 * one, rows * _out_row(kind, call))


@native
def merge(kind: Kind, call: int, scratch: int, block: int) -> None:
    """Combines the states of every split of a block of rows, in order, and finishes the rows."""
    batch, kv_head, start_row = _place(kind, call, block)
    step = score_factor(call) * LOG2_E
    table, size, one = scratch + field(call, AT_ROWS), compute_size(kind), vector_size(kind)
    splits, out_row = field(call, SPLITS), _out_row(kind, call)
    set_rows(kind, call, table, batch, kv_head, start_row, lanes(kind), False)
    rows, out = peek_int64(table + COUNT), scratch + field(call, AT_OUT)
    fill(kind, out, out_row, rows, out_row // size, 0.0)
    for r in range(rows):
        largest, total = -math.inf, 0.0
        for split in range(splits):
            row_max = peek(kind, _state(kind, call, block * splits + split) + r * size)
            if row_max > largest or math.isnan(row_max):
                largest = row_max
        for split in range(splits):
            state = _state(kind, call, block * splits + split)
            row_max, row_sum = peek(kind, state + r * size), peek(kind, state + one + r * size)
            if row_max == -math.inf and not math.isnan(row_sum):  # nothing seen in this split
                continue
            factor = 2.0 ** ((row_max - largest) * step)
            total += row_sum * factor
            source, target = state + 2 * one + r * out_row, out + r * out_row
            weight = splat(kind, factor)
            for at in range(0, out_row, one):
                store(target + at, load(kind, target + at) + weight * load(kind, source + at))
        poke(kind, table + ROW_MAX + r * size, largest)
        poke(kind, table + ROW_SUM + r * size, total)
    _finish(kind, call, scratch, block)
