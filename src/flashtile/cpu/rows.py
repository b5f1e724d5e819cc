"""The query rows of one tile, one per lane: where they lie and which keys they see.

The query heads of a group are packed beside each other (row = query * group + head within the group), so that
they share every key that is loaded. A table of per-lane arrays, each 512 bytes, describes the rows.
"""

from __future__ import annotations

from .call import (
    BIAS,
    FIRST,
    GRAD_BIAS,
    GROUP,
    HEADS,
    LAST,
    LOWER,
    MASK,
    PART_DIAGONAL,
    PART_HEAD,
    PART_HEADS,
    PART_QUERY,
    SLOPES,
    UPPER,
    field,
)
from .kinds import Kind, compute_size
from .native import native
from .sequences import key_length, plane_at, query_length, query_start
from .simd import peek, peek_int32, peek_int64, poke, poke_int32, poke_int64

# int64 per lane (64 lanes at most)
QUERY_ROW, OUT_ROW, BIAS_ROW, MASK_ROW, GRAD_OUT_ROW, GRAD_QUERY_ROW, GRAD_BIAS_ROW = (
    512 * i for i in range(7)
)
# int32 per lane; DRAW_QUERY and DRAW_HEAD number the row for dropout, in the whole if the call is a part
INDEX, FIRST_KEY, LAST_KEY, BATCH_HEAD, DRAW_QUERY, DRAW_HEAD = (512 * i for i in range(7, 13))
# compute numbers per lane
SLOPE, ROW_MAX, ROW_SUM, FACTOR, ROW_LSE, ROW_REST, ROW_DELTA = (512 * i for i in range(13, 20))
# int64 once: lanes in use; keys seen by some lane [LOW, HIGH), by every lane [FULL_LOW, FULL_HIGH); query i
# stands at key i + DIAGONAL for ALiBi
COUNT, LOW, HIGH, FULL_LOW, FULL_HIGH, DIAGONAL = (512 * 20 + 8 * i for i in range(6))
TABLE_BYTES = 512 * 21


@native
def visible_keys(call: int, batch: int, query: int) -> tuple[int, int]:
    """The interval [first, last) of keys a query may see: band and interval arrays intersected."""
    first = max(0, query + field(call, LOWER))
    last = min(key_length(call, batch), query + field(call, UPPER) + 1)
    row = query_start(call, batch) + query
    at = field(call, FIRST)
    if at != 0:
        first = max(first, peek_int32(at + batch * field(call, FIRST + 1) + row * field(call, FIRST + 2)))
    at = field(call, LAST)
    if at != 0:
        last = min(last, peek_int32(at + batch * field(call, LAST + 1) + row * field(call, LAST + 2)))
    return first, last


@native
def set_rows(
    kind: Kind,
    call: int,
    table: int,
    batch: int,
    kv_head: int,
    start: int,
    width: int,
    pad_sees_nothing: bool,
) -> None:
    """Fills the table for rows [start, start + width) of one key head; lanes past the end repeat the last
    row.
    """
    group, queries, keys = field(call, GROUP), query_length(call, batch), key_length(call, batch)
    count = min(width, group * queries - start)
    low, high, full_low, full_high = keys, 0, 0, keys
    for lane in range(width):
        row = start + min(lane, count - 1)
        query, head = row // group, kv_head * group + row % group
        first, last = visible_keys(call, batch, query)
        if lane >= count and pad_sees_nothing:
            last = first
        if first >= last:
            first, last = keys, 0
        if lane < count or pad_sees_nothing:
            full_low, full_high = max(full_low, first), min(full_high, last)
            low, high = min(low, first), max(high, last)
        poke_int32(table + INDEX + 4 * lane, query)
        poke_int32(table + FIRST_KEY + 4 * lane, first)
        poke_int32(table + LAST_KEY + 4 * lane, last)
        poke_int32(table + BATCH_HEAD + 4 * lane, batch * field(call, HEADS) + head)
        poke_int32(table + DRAW_QUERY + 4 * lane, field(call, PART_QUERY) + query)
        draw_head = batch * field(call, PART_HEADS) + field(call, PART_HEAD) + head
        poke_int32(table + DRAW_HEAD + 4 * lane, draw_head)
        poke_int64(table + BIAS_ROW + 8 * lane, plane_at(call, BIAS, batch, head, query))
        poke_int64(table + MASK_ROW + 8 * lane, plane_at(call, MASK, batch, head, query))
        slopes = field(call, SLOPES)
        if slopes != 0:
            slope = peek(kind, slopes + batch * field(call, SLOPES + 1) + head * field(call, SLOPES + 2))
            poke(kind, table + SLOPE + compute_size(kind) * lane, slope)
    poke_int64(table + COUNT, count)
    poke_int64(table + LOW, low)
    poke_int64(table + HIGH, high)
    poke_int64(table + FULL_LOW, full_low)
    poke_int64(table + FULL_HIGH, full_high)
    poke_int64(table + DIAGONAL, keys - queries + field(call, PART_DIAGONAL))


@native
def locate_rows(
    call: int, table: int, tensor: int, target: int, batch: int, kv_head: int, start: int, width: int
) -> None:
    """Per lane, the address of the row in one tensor that lies as Q does, or in the gradient of the bias."""
    group, first = field(call, GROUP), 0 if tensor == GRAD_BIAS else query_start(call, batch)
    last = start + peek_int64(table + COUNT) - 1
    for lane in range(width):
        row = min(start + lane, last)
        poke_int64(
            table + target + 8 * lane,
            plane_at(call, tensor, batch, kv_head * group + row % group, first + row // group),
        )
