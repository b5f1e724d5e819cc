"""The query rows of one tile, one per lane: where they lie and which keys they see.

The query heads of a group are packed beside each other (row = query * group + head within the group), so that
they share every key that is loaded. A table of per-lane arrays, each 512 bytes, describes the rows.
"""

from __future__ import annotations

from .call import (
    BIAS,
    FIRST,
    GROUP,
    HEADS,
    KEY_LENGTH,
    LAST,
    LOWER,
    MASK,
    QUERY_LENGTH,
    SLOPES,
    UPPER,
    field,
)
from .kinds import Kind, compute_size, native
from .simd import peek, peek_int32, peek_int64, poke, poke_int32, poke_int64

# int64 per lane (64 lanes at most)
QUERY_ROW, OUT_ROW, BIAS_ROW, MASK_ROW, GRAD_OUT_ROW, GRAD_QUERY_ROW, GRAD_BIAS_ROW = (
    512 * i for i in range(7)
)
# int32 per lane
INDEX, FIRST_KEY, LAST_KEY, BATCH_HEAD = (512 * i for i in range(7, 11))
# compute numbers per lane
SLOPE, ROW_MAX, ROW_SUM, FACTOR, ROW_LSE, ROW_REST, ROW_DELTA = (512 * i for i in range(11, 18))
# int64 once: lanes in use; keys seen by some lane [LOW, HIGH) and by every lane [FULL_LOW, FULL_HIGH)
COUNT, LOW, HIGH, FULL_LOW, FULL_HIGH = (512 * 18 + 8 * i for i in range(5))
TABLE_BYTES = 512 * 19


@native
def tensor_at(call: int, tensor: int, batch: int, head: int, row: int) -> int:
    """Address of the first element of a tensor's row; 0 where the tensor is absent."""
    base = field(call, tensor)
    if base == 0:
        return 0
    return (
        base
        + batch * field(call, tensor + 1)
        + head * field(call, tensor + 2)
        + row * field(call, tensor + 3)
    )


@native
def visible_keys(call: int, batch: int, query: int) -> tuple[int, int]:
    """The interval [first, last) of keys a query may see: band and interval arrays intersected."""
    first = max(0, query + field(call, LOWER))
    last = min(field(call, KEY_LENGTH), query + field(call, UPPER) + 1)
    at = field(call, FIRST)
    if at != 0:
        first = max(first, peek_int32(at + batch * field(call, FIRST + 1) + query * field(call, FIRST + 2)))
    at = field(call, LAST)
    if at != 0:
        last = min(last, peek_int32(at + batch * field(call, LAST + 1) + query * field(call, LAST + 2)))
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
    group, key_length = field(call, GROUP), field(call, KEY_LENGTH)
    count = min(width, group * field(call, QUERY_LENGTH) - start)
    low, high, full_low, full_high = key_length, 0, 0, key_length
    for lane in range(width):
        row = start + min(lane, count - 1)
        query, head = row // group, kv_head * group + row % group
        first, last = visible_keys(call, batch, query)
        if lane >= count and pad_sees_nothing:
            last = first
        if first >= last:
            first, last = key_length, 0
        if lane < count or pad_sees_nothing:
            full_low, full_high = max(full_low, first), min(full_high, last)
            low, high = min(low, first), max(high, last)
        poke_int32(table + INDEX + 4 * lane, query)
        poke_int32(table + FIRST_KEY + 4 * lane, first)
        poke_int32(table + LAST_KEY + 4 * lane, last)
        poke_int32(table + BATCH_HEAD + 4 * lane, batch * field(call, HEADS) + head)
        poke_int64(table + BIAS_ROW + 8 * lane, tensor_at(call, BIAS, batch, head, query))
        poke_int64(table + MASK_ROW + 8 * lane, tensor_at(call, MASK, batch, head, query))
        slopes = field(call, SLOPES)
        if slopes != 0:
            slope = peek(kind, slopes + batch * field(call, SLOPES + 1) + head * field(call, SLOPES + 2))
            poke(kind, table + SLOPE + compute_size(kind) * lane, slope)
    poke_int64(table + COUNT, count)
    poke_int64(table + LOW, low)
    poke_int64(table + HIGH, high)
    poke_int64(table + FULL_LOW, full_low)
    poke_int64(table + FULL_HIGH, full_high)


@native
def locate_rows(
    call: int, table: int, tensor: int, target: int, batch: int, kv_head: int, start: int, width: int
) -> None:
    """Per lane, the address of the row in one tensor."""
    group = field(call, GROUP)
    last = start + peek_int64(table + COUNT) - 1
    for lane in range(width):
        row = min(start + lane, last)
        poke_int64(
            table + target + 8 * lane,
            tensor_at(call, tensor, batch, kv_head * group + row % group, row // group),
        )
