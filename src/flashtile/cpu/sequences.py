"""Where the sequences of a call lie, for kernels: all alike, or each with lengths and a place of its own.

Sequences with lengths of their own are described by a table (SEQUENCES), and their tasks by another
(SCHEDULE), longest first; a third gives the pages of a cache. `batch` always numbers the sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from .call import (
    BLOCK_TABLE,
    BLOCK_TABLE_ROW,
    KEY_LENGTH,
    KV_HEADS,
    PAGE_SIZE,
    QUERY_LENGTH,
    SCHEDULE,
    SCHEDULE_ROWS,
    SEQUENCES,
    SPLITS,
    TILES,
    field,
)
from .native import native
from .simd import peek_int32, peek_int64, poke_int64

# int64 per sequence: first packed query, queries, first packed key, keys, entry of the batch that holds them
_QUERY_START, _QUERIES, _KEY_START, _KEYS, _ENTRY = (8 * i for i in range(5))
SEQUENCE_FIELDS = 5
# int64 per row of the schedule: first task, sequence, tiles of rows and splits of keys of each of its heads,
# and the first of the places that the tiles (or splits) of all heads have in SPACE
_FIRST_TASK, _SEQUENCE, _TILES, _SPLITS, _PLACE = (8 * i for i in range(5))
SCHEDULE_FIELDS = 5


@native
def _of_sequence(call: int, batch: int, what: int, otherwise: int) -> int:
    table = field(call, SEQUENCES)
    return otherwise if table == 0 else peek_int64(table + 8 * SEQUENCE_FIELDS * batch + what)


@native
def query_start(call: int, batch: int) -> int:
    return _of_sequence(call, batch, _QUERY_START, 0)


@native
def query_length(call: int, batch: int) -> int:
    return _of_sequence(call, batch, _QUERIES, field(call, QUERY_LENGTH))


@native
def key_length(call: int, batch: int) -> int:
    return _of_sequence(call, batch, _KEYS, field(call, KEY_LENGTH))


@native
def plane_at(call: int, tensor: int, batch: int, head: int, row: int) -> int:
    """Address of a row of a tensor that lies as the scores do (bias, mask); 0 where it is absent."""
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
def query_at(call: int, tensor: int, batch: int, head: int, query: int) -> int:
    """Address of the row of one query in a tensor that lies as Q does (O, LSE, ...)."""
    return plane_at(call, tensor, batch, head, query_start(call, batch) + query)


@native
def key_at(call: int, tensor: int, batch: int, head: int, key: int) -> int:
    """Address of the row of one key in a tensor that lies as K does (V, dK, dV)."""
    page_size = field(call, PAGE_SIZE)
    if page_size != 0:
        row = field(call, BLOCK_TABLE) + batch * field(call, BLOCK_TABLE_ROW)
        page = peek_int32(row + 4 * (key // page_size))
        return plane_at(call, tensor, page, head, key % page_size)
    entry = _of_sequence(call, batch, _ENTRY, batch)
    return plane_at(call, tensor, entry, head, _of_sequence(call, batch, _KEY_START, 0) + key)


@native
def run_length(call: int, key: int, keys: int) -> int:
    """How many of the keys [key, key + keys) lie one row behind the other."""
    page_size = field(call, PAGE_SIZE)
    return keys if page_size == 0 else min(keys, page_size - key % page_size)


@native
def list_keys(call: int, tensor: int, batch: int, head: int, first: int, keys: int, addresses: int) -> None:
    """addresses[j] = where key first + j lies; what key_at does for each, without its divisions."""
    row, page_size = field(call, tensor + 3), field(call, PAGE_SIZE)
    if page_size == 0:
        _list_run(key_at(call, tensor, batch, head, first), row, keys, addresses)
        return
    page = field(call, BLOCK_TABLE) + batch * field(call, BLOCK_TABLE_ROW) + 4 * (first // page_size)
    at, done = first % page_size, 0
    while done < keys:
        run = min(keys - done, page_size - at)
        base = plane_at(call, tensor, peek_int32(page), head, at)
        _list_run(base, row, run, addresses + 8 * done)
        page, at, done = page + 4, 0, done + run


@native
def _list_run(base: int, row: int, keys: int, addresses: int) -> None:
    for j in range(keys):
        poke_int64(addresses + 8 * j, base + j * row)


class Place(NamedTuple):
    """Where a task belongs."""

    batch: int
    local: int  # the task's number within its sequence
    tiles: int  # tiles of rows of each key head
    splits: int  # splits of keys of each key head
    start: int  # what the sequences before it take of SPACE: its `places` in the schedule, or states
    before: int  # the same local task of the sequence before it in a schedule, -1 if there is none


@native
def place_of(call: int, task: int, units: int) -> Place:
    """The place of a task; where all sequences are alike, each has `units` tasks."""
    table, tiles, splits = field(call, SCHEDULE), field(call, TILES), field(call, SPLITS)
    if table == 0:
        batch = task // units
        start = batch * field(call, KV_HEADS) * tiles * splits
        return Place(batch, task % units, tiles, splits, start, -1)
    size = 8 * SCHEDULE_FIELDS
    low, high = 0, field(call, SCHEDULE_ROWS)
    while high - low > 1:
        middle = (low + high) // 2
        if peek_int64(table + middle * size + _FIRST_TASK) <= task:
            low = middle
        else:
            high = middle
    row = table + low * size
    local, before = task - peek_int64(row + _FIRST_TASK), -1
    if low > 0:
        before = peek_int64(row - size + _FIRST_TASK) + local
    return Place(
        peek_int64(row + _SEQUENCE),
        local,
        peek_int64(row + _TILES),
        peek_int64(row + _SPLITS),
        peek_int64(row + _PLACE),
        before,
    )
