"""Few query rows against many keys: split over the keys, packed over the heads of a group, limited by memory.

One task is one split of keys of one key head; it leaves a partial online-softmax state, and `merge` combines
the states of a head exactly: rescale to the larger maximum, then add.
"""

from __future__ import annotations

import math

from .call import (
    AT_ADDRESSES,
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
from .dots import score_rows
from .exact import accumulate_exactly
from .forward import finish_rows, start_rows
from .kinds import (
    Kind,
    compute_kind,
    compute_size,
    dot_kind,
    is_pairs,
    itemsize,
    lanes,
    register_bytes,
    vector_size,
)
from .narrow import is_narrow, narrow_softmax, narrow_width
from .native import native
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
)
from .scores import LOG2_E, finish_scores, hides_some, score_factor
from .sequences import list_keys, place_of
from .simd import load, peek, peek_int64, poke, poke_int64, splat, store
from .softmax import online_softmax
from .stage import copy_numbers, fill, padded, stage_lanes, stage_listed, unstage_natural
from .weigh import weigh_rows

# Memory is asked for a row this many bytes before it is read, or this many rows where that is more: with
# twice as much, Zen 3 takes 5% longer, Zen 4 as long.
_AHEAD_BYTES, _AHEAD_ROWS = 2**13, 16


@native
def decode(kind: Kind, call: int, scratch: int, task: int) -> None:
    """One vector of rows of one key head against one split of its keys.

    Tasks that follow one another take the same keys of different heads, which may share pages of memory: a
    cache whose keys take 4 KiB each takes up to twice as long to read head by head (Zen 3).
    """
    place = place_of(call, task, field(call, KV_HEADS) * field(call, TILES) * field(call, SPLITS))
    blocks = field(call, KV_HEADS) * place.tiles
    split, block = place.local // blocks, place.local % blocks
    batch, kv_head, start_row = place.batch, block // place.tiles, block % place.tiles * lanes(kind)
    _decode_split(kind, call, scratch, batch, kv_head, start_row, split)
    if place.splits == 1:
        _finish(kind, call, scratch, batch, kv_head, start_row)
    else:
        _keep(kind, call, scratch, task)


@native
def _out_row(kind: Kind, call: int) -> int:
    return padded(kind, field(call, VALUE_DIM)) * compute_size(kind)


@native
def _decode_split(
    kind: Kind, call: int, scratch: int, batch: int, kv_head: int, start_row: int, split: int
) -> None:
    """The online softmax of one vector of rows over one split of keys."""
    table, width = scratch + field(call, AT_ROWS), lanes(kind)
    set_rows(kind, call, table, batch, kv_head, start_row, width, False)
    locate_rows(call, table, QUERY, QUERY_ROW, batch, kv_head, start_row, width)
    rows, head_dim = peek_int64(table + COUNT), field(call, HEAD_DIM)
    direct, step = _reads_keys_directly(kind, call), field(call, QUERY + 4)
    query, query_row = scratch + field(call, AT_QUERY), padded(kind, head_dim) * compute_size(kind)
    if direct and is_pairs(dot_kind(kind)):
        query_row = head_dim * itemsize(kind)
        for row in range(rows):
            copy_numbers(
                kind, peek_int64(table + QUERY_ROW + 8 * row), step, head_dim, query + row * query_row
            )
    else:
        stage_lanes(kind, table + QUERY_ROW, step, rows, head_dim, query, query_row, width)
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
        keys, later = min(step, high - first), max(0, high - first - step)
        _decode_keys(kind, call, scratch, batch, kv_head, first, keys, later, rows, direct, query_row)


@native
def _list_rows(
    kind: Kind,
    call: int,
    scratch: int,
    tensor: int,
    batch: int,
    kv_head: int,
    first: int,
    keys: int,
    later: int,
) -> int:
    """Lists the rows of K or V of a tile, and behind them those of the `later` keys to ask for meanwhile.

    Where rows are staged, their list then says where, and early requests are for rows that are near already.
    """
    table, ahead = scratch + field(call, AT_ADDRESSES), _rows_ahead(kind, call, tensor)
    listed = table if tensor == KEY else table + 16 * field(call, TILE_KEYS)
    count = keys + min(ahead, later)
    list_keys(call, tensor, batch, kv_head, first, count, listed)
    last = peek_int64(listed + 8 * (count - 1))
    for i in range(count, keys + ahead):
        poke_int64(listed + 8 * i, last)
    return listed


@native
def _rows_ahead(kind: Kind, call: int, tensor: int) -> int:
    size = itemsize(kind) * (field(call, HEAD_DIM) if tensor == KEY else field(call, VALUE_DIM))
    return min(field(call, TILE_KEYS), max(_AHEAD_ROWS, _AHEAD_BYTES // size))


@native
def _reads_keys_directly(kind: Kind, call: int) -> bool:
    """Whether rows of K are whole registers of contiguous numbers; else tiles of K are staged."""
    size = itemsize(kind)
    whole = field(call, HEAD_DIM) * size % register_bytes(dot_kind(kind)) == 0
    return whole and field(call, KEY + 4) == size and field(call, QUERY + 4) == size


@native
def _decode_keys(
    kind: Kind,
    call: int,
    scratch: int,
    batch: int,
    kv_head: int,
    first: int,
    keys: int,
    later: int,
    rows: int,
    direct: bool,
    query_row: int,
) -> None:
    """One tile of keys; `later` keys of the split follow it."""
    table, width = scratch + field(call, AT_ROWS), lanes(kind)
    scores, spare = scratch + field(call, AT_SCORES), scratch + field(call, AT_BIAS)
    out, out_row = scratch + field(call, AT_OUT), _out_row(kind, call)
    narrow = is_narrow(kind, call, table, first, keys, rows)
    if narrow:
        width = narrow_width(kind, rows)
    row = width * compute_size(kind)
    listed = _list_rows(kind, call, scratch, KEY, batch, kv_head, first, keys, later)
    _score_keys(kind, call, scratch, listed, keys, rows, direct, query_row, row)
    if narrow:
        moved = narrow_softmax(kind, call, table, scores, keys, width)
    else:
        finish_scores(kind, call, table, scores, 0, spare, first, keys, width)
        moved = online_softmax(kind, call, table, scores, score_factor(call), first, keys, width)
    if moved:
        _rescale_rows(kind, out, out_row, rows, table + FACTOR)
    if hides_some(call, table, first, keys) and not all_finite(
        kind, call, VALUE, batch, kv_head, first, keys, VALUE_DIM
    ):
        size = compute_size(kind)
        accumulate_exactly(kind, call, table, scores, width, out, out_row, size, batch, kv_head, first, keys)
        return
    listed = _list_rows(kind, call, scratch, VALUE, batch, kv_head, first, keys, later)
    _weigh_values(kind, call, scratch, listed, keys, rows, row)


@native
def _score_keys(
    kind: Kind,
    call: int,
    scratch: int,
    listed: int,
    keys: int,
    rows: int,
    direct: bool,
    query_row: int,
    row: int,
) -> None:
    """Scores of a tile of keys, wherever their rows lie; those of a key take `row` bytes."""
    scores, head_dim = scratch + field(call, AT_SCORES), field(call, HEAD_DIM)
    query, step = scratch + field(call, AT_QUERY), field(call, KEY + 4)
    ahead = listed + 8 * _rows_ahead(kind, call, KEY)
    if direct:
        length = head_dim * itemsize(kind)
        score_rows(dot_kind(kind), listed, ahead, query, query_row, length, keys, rows, scores, row)
        return
    stage_listed(kind, listed, keys, step, head_dim, scratch + field(call, AT_KEY), query_row)
    score_rows(compute_kind(kind), listed, ahead, query, query_row, query_row, keys, rows, scores, row)


@native
def _weigh_values(kind: Kind, call: int, scratch: int, listed: int, keys: int, rows: int, row: int) -> None:
    """O += P V for a tile of keys; the probabilities of a key take `row` bytes."""
    scores = scratch + field(call, AT_SCORES)
    out, out_row, step = scratch + field(call, AT_OUT), _out_row(kind, call), field(call, VALUE + 4)
    value_dim, vectors = field(call, VALUE_DIM), padded(kind, field(call, VALUE_DIM)) // lanes(kind)
    ahead = listed + 8 * _rows_ahead(kind, call, VALUE)
    if value_dim % lanes(kind) == 0 and step == itemsize(kind):
        weigh_rows(kind, scores, row, listed, ahead, keys, rows, vectors, out, out_row)
        return
    stage_listed(kind, listed, keys, step, value_dim, scratch + field(call, AT_VALUE), out_row)
    weigh_rows(compute_kind(kind), scores, row, listed, ahead, keys, rows, vectors, out, out_row)


@native
def _rescale_rows(kind: Kind, out: int, out_row: int, rows: int, factors: int) -> None:
    for r in range(rows):
        factor = splat(kind, peek(kind, factors + r * compute_size(kind)))
        for at in range(out + r * out_row, out + (r + 1) * out_row, vector_size(kind)):
            store(at, load(kind, at) * factor)


@native
def _finish(kind: Kind, call: int, scratch: int, batch: int, kv_head: int, start_row: int) -> None:
    """Normalises one vector of rows and writes them, with their LSE."""
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
def merge(kind: Kind, call: int, scratch: int, task: int) -> None:
    """Combines the states of every split of one vector of rows, in order, and finishes the rows."""
    place = place_of(call, task, field(call, KV_HEADS) * field(call, TILES))
    batch, kv_head = place.batch, place.local // place.tiles
    start_row, first = place.local % place.tiles * lanes(kind), place.start + place.local
    blocks = field(call, KV_HEADS) * place.tiles
    step = score_factor(call) * LOG2_E
    table, size, one = scratch + field(call, AT_ROWS), compute_size(kind), vector_size(kind)
    splits, out_row = place.splits, _out_row(kind, call)
    set_rows(kind, call, table, batch, kv_head, start_row, lanes(kind), False)
    rows, out = peek_int64(table + COUNT), scratch + field(call, AT_OUT)
    fill(kind, out, out_row, rows, out_row // size, 0.0)
    for r in range(rows):
        largest, total = -math.inf, 0.0
        for split in range(splits):
            row_max = peek(kind, _state(kind, call, first + split * blocks) + r * size)
            if row_max > largest or math.isnan(row_max):
                largest = row_max
        for split in range(splits):
            state = _state(kind, call, first + split * blocks)
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
    _finish(kind, call, scratch, batch, kv_head, start_row)
