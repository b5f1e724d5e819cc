"""Few query rows against many keys: split over the keys, packed over the heads of a group, limited by memory.

One task is one split of keys of some key heads; of each it leaves a partial online-softmax state, and `merge`
combines the states of a head exactly: rescale to the larger maximum, then add.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .call import (
    AT_ADDRESSES,
    AT_BIAS,
    AT_KEY,
    AT_NEXT,
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
    TOGETHER,
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


class Tile(NamedTuple):
    """Keys [first, first + keys) of one key head."""

    batch: int
    kv_head: int
    first: int
    keys: int


@native
def decode(kind: Kind, call: int, scratch: int, task: int) -> None:
    """One split of keys, for some blocks: vectors of rows of key heads.

    Each block in turn takes a tile of the same keys. Head by head, a cache in which the heads of a key take
    4 KiB together took twice as long (Zen 3): every head went through all pages of the processor's memory.
    """
    together, tiles = field(call, TOGETHER), field(call, TILES)
    units = _groups(field(call, KV_HEADS) * tiles, together) * field(call, SPLITS)
    place = place_of(call, task, units)
    blocks = field(call, KV_HEADS) * place.tiles
    groups = _groups(blocks, together)
    split, first_block = place.local // groups, place.local % groups * together
    count = min(together, blocks - first_block)
    scores, row = scratch + field(call, AT_SCORES), vector_size(kind)
    fill(kind, scores, row, field(call, TILE_KEYS), lanes(kind), 0.0)
    for i in range(count):
        kv_head, start_row = _rows_of_block(kind, first_block + i, place.tiles)
        _stage_block(kind, call, _own(call, scratch, i), place.batch, kv_head, start_row, split)
    _decode_split(kind, call, scratch, place.batch, first_block, count, place.tiles, split)
    for i in range(count):
        if place.splits == 1:
            kv_head, start_row = _rows_of_block(kind, first_block + i, place.tiles)
            _finish(kind, call, _own(call, scratch, i), place.batch, kv_head, start_row)
        else:
            _keep(kind, call, _own(call, scratch, i), place.start + split * blocks + first_block + i)


@native
def _groups(blocks: int, together: int) -> int:
    return (blocks + together - 1) // together


@native
def _rows_of_block(kind: Kind, block: int, tiles: int) -> tuple[int, int]:
    """The key head of a block, and its first row there."""
    return block // tiles, block % tiles * lanes(kind)


@native
def _own(call: int, scratch: int, i: int) -> int:
    """The parts of scratch memory that the i-th block of a task has to itself: rows, queries, O."""
    return scratch + i * field(call, AT_NEXT)


@native
def _out_row(kind: Kind, call: int) -> int:
    return padded(kind, field(call, VALUE_DIM)) * compute_size(kind)


@native
def _query_row(kind: Kind, call: int) -> int:
    if _reads_keys_directly(kind, call) and is_pairs(dot_kind(kind)):
        return field(call, HEAD_DIM) * itemsize(kind)
    return padded(kind, field(call, HEAD_DIM)) * compute_size(kind)


@native
def _stage_block(
    kind: Kind, call: int, own: int, batch: int, kv_head: int, start_row: int, split: int
) -> None:
    """Stages the queries of a block, which has seen no key yet."""
    table, width = own + field(call, AT_ROWS), lanes(kind)
    set_rows(kind, call, table, batch, kv_head, start_row, width, False)
    locate_rows(call, table, QUERY, QUERY_ROW, batch, kv_head, start_row, width)
    rows, head_dim, step = peek_int64(table + COUNT), field(call, HEAD_DIM), field(call, QUERY + 4)
    query, query_row = own + field(call, AT_QUERY), _query_row(kind, call)
    if _reads_keys_directly(kind, call) and is_pairs(dot_kind(kind)):
        for row in range(rows):
            source = peek_int64(table + QUERY_ROW + 8 * row)
            copy_numbers(kind, source, step, head_dim, query + row * query_row)
    else:
        stage_lanes(kind, table + QUERY_ROW, step, rows, head_dim, query, query_row, width)
    out, out_row = own + field(call, AT_OUT), _out_row(kind, call)
    fill(kind, out, out_row, rows, padded(kind, field(call, VALUE_DIM)), 0.0)
    start_rows(kind, call, table, kv_head, start_row, width, field(call, SINKS) if split == 0 else 0)


@native
def _decode_split(
    kind: Kind, call: int, scratch: int, batch: int, first_block: int, count: int, tiles: int, split: int
) -> None:
    """The online softmax of `count` blocks over one split of keys, tile by tile."""
    begin, step = split * field(call, SPLIT_KEYS), field(call, TILE_KEYS)
    end = begin + field(call, SPLIT_KEYS)
    low, high = end, begin
    for i in range(count):
        table = _own(call, scratch, i) + field(call, AT_ROWS)
        low, high = min(low, peek_int64(table + LOW)), max(high, peek_int64(table + HIGH))
    low, high = max(begin, low // step * step), min(end, high)
    for first in range(low, high, step):
        for i in range(count):
            own = _own(call, scratch, i)
            table = own + field(call, AT_ROWS)
            keys = min(step, min(high, peek_int64(table + HIGH)) - first)
            if keys > 0 and peek_int64(table + LOW) < first + step:
                tile = Tile(batch, (first_block + i) // tiles, first, keys)
                after, at = (i + 1, first) if i + 1 < count else (0, first + step)
                later = Tile(batch, (first_block + after) // tiles, at, max(0, min(step, high - at)))
                _decode_keys(kind, call, scratch, own, tile, later)


@native
def _list_rows(kind: Kind, call: int, scratch: int, tensor: int, tile: Tile, later: Tile) -> int:
    """Lists the rows of K or V of a tile, and behind them those of `later` to ask for meanwhile.

    Where rows are staged, their list then says where, and early requests are for rows that are near already.
    """
    table, ahead = scratch + field(call, AT_ADDRESSES), _rows_ahead(kind, call, tensor)
    listed = table if tensor == KEY else table + 16 * field(call, TILE_KEYS)
    list_keys(call, tensor, tile.batch, tile.kv_head, tile.first, tile.keys, listed)
    behind, count = listed + 8 * tile.keys, min(ahead, later.keys)
    list_keys(call, tensor, later.batch, later.kv_head, later.first, count, behind)
    last = peek_int64(behind + 8 * (count - 1))
    for i in range(count, ahead):
        poke_int64(behind + 8 * i, last)
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
def _decode_keys(kind: Kind, call: int, scratch: int, own: int, tile: Tile, later: Tile) -> None:
    """One tile of keys for one block; `later` is what most likely will be read next."""
    table, width = own + field(call, AT_ROWS), lanes(kind)
    scores, spare = scratch + field(call, AT_SCORES), scratch + field(call, AT_BIAS)
    out, out_row = own + field(call, AT_OUT), _out_row(kind, call)
    rows, first, keys = peek_int64(table + COUNT), tile.first, tile.keys
    narrow = is_narrow(kind, call, table, first, keys, rows)
    if narrow:
        width = narrow_width(kind, rows)
    row = width * compute_size(kind)
    listed = _list_rows(kind, call, scratch, KEY, tile, later)
    _score_keys(kind, call, scratch, own, listed, keys, rows, row)
    if narrow:
        moved = narrow_softmax(kind, call, table, scores, keys, width)
    else:
        finish_scores(kind, call, table, scores, 0, spare, first, keys, width)
        moved = online_softmax(kind, call, table, scores, score_factor(call), first, keys, width)
    if moved:
        _rescale_rows(kind, out, out_row, rows, table + FACTOR)
    if hides_some(call, table, first, keys) and not all_finite(
        kind, call, VALUE, tile.batch, tile.kv_head, first, keys, VALUE_DIM
    ):
        size, batch, kv_head = compute_size(kind), tile.batch, tile.kv_head
        accumulate_exactly(kind, call, table, scores, width, out, out_row, size, batch, kv_head, first, keys)
        return
    listed = _list_rows(kind, call, scratch, VALUE, tile, later)
    _weigh_values(kind, call, scratch, own, listed, keys, rows, row)


@native
def _score_keys(
    kind: Kind, call: int, scratch: int, own: int, listed: int, keys: int, rows: int, row: int
) -> None:
    """Scores of a tile of keys, wherever their rows lie; those of a key take `row` bytes."""
    scores, head_dim = scratch + field(call, AT_SCORES), field(call, HEAD_DIM)
    query, query_row, step = own + field(call, AT_QUERY), _query_row(kind, call), field(call, KEY + 4)
    ahead = listed + 8 * _rows_ahead(kind, call, KEY)
    if _reads_keys_directly(kind, call):
        length = head_dim * itemsize(kind)
        score_rows(dot_kind(kind), listed, ahead, query, query_row, length, keys, rows, scores, row)
        return
    stage_listed(kind, listed, keys, step, head_dim, scratch + field(call, AT_KEY), query_row)
    score_rows(compute_kind(kind), listed, ahead, query, query_row, query_row, keys, rows, scores, row)


@native
def _weigh_values(
    kind: Kind, call: int, scratch: int, own: int, listed: int, keys: int, rows: int, row: int
) -> None:
    """O += P V for a tile of keys; the probabilities of a key take `row` bytes."""
    scores = scratch + field(call, AT_SCORES)
    out, out_row, step = own + field(call, AT_OUT), _out_row(kind, call), field(call, VALUE + 4)
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
def _state(kind: Kind, call: int, number: int) -> int:
    """Where the state of a block after a split is kept: row maxima, row sums, unnormalised rows of O."""
    return field(call, SPACE) + number * (2 * vector_size(kind) + lanes(kind) * _out_row(kind, call))


@native
def _copy(kind: Kind, source: int, target: int, size: int) -> None:
    for at in range(0, size, vector_size(kind)):
        store(target + at, load(kind, source + at))


@native
def _keep(kind: Kind, call: int, scratch: int, number: int) -> None:
    table, state, one = scratch + field(call, AT_ROWS), _state(kind, call, number), vector_size(kind)
    _copy(kind, table + ROW_MAX, state, one)
    _copy(kind, table + ROW_SUM, state + one, one)
    rows = peek_int64(table + COUNT)
    _copy(kind, scratch + field(call, AT_OUT), state + 2 * one, rows * _out_row(kind, call))


@native
def merge(kind: Kind, call: int, scratch: int, task: int) -> None:
    """Combines the states of every split of one vector of rows, in order, and finishes the rows."""
    place = place_of(call, task, field(call, KV_HEADS) * field(call, TILES))
    batch, first = place.batch, place.start + place.local
    kv_head, start_row = _rows_of_block(kind, place.local, place.tiles)
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
            # Both may be infinite, by a sink that takes everything.
            factor = 1.0 if row_max == largest else 2.0 ** ((row_max - largest) * step)
            total += row_sum * factor
            source, target = state + 2 * one + r * out_row, out + r * out_row
            weight = splat(kind, factor)
            for at in range(0, out_row, one):
                store(target + at, load(kind, target + at) + weight * load(kind, source + at))
        poke(kind, table + ROW_MAX + r * size, largest)
        poke(kind, table + ROW_SUM + r * size, total)
    _finish(kind, call, scratch, batch, kv_head, start_row)
