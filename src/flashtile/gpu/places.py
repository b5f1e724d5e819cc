"""Where the rows of a sequence lie in memory, and how tiles of them are read. All offsets are int64."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from .operands import Rows, Sequences


@triton.jit
def query_span(sequences: "Sequences", sequence: "tl.tensor"):
    """Batch entry, first row and number of the queries of a sequence."""
    if sequences.query_starts is None:
        entry, first, queries = sequence.to(tl.int64), sequence.to(tl.int64) * 0, sequences.queries
    else:
        start, end = _span(sequences.query_starts, sequence, sequences.queries)
        entry, first, queries = sequence.to(tl.int64) * 0, start, (end - start).to(tl.int32)
    return entry, first, queries


@triton.jit
def key_span(sequences: "Sequences", sequence: "tl.tensor"):
    """Batch entry, first row and number of the keys of a sequence; in pages its entry is its table's row."""
    entry, first, keys = sequence.to(tl.int64), sequence.to(tl.int64) * 0, sequences.keys
    if sequences.key_starts is not None:
        start, end = _span(sequences.key_starts, sequence, sequences.keys)
        entry, first, keys = entry * 0, start, (end - start).to(tl.int32)
    if sequences.key_lengths is not None:
        keys = _clamp(tl.load(sequences.key_lengths + sequence), 0, sequences.keys).to(tl.int32)
    if sequences.batch_index is not None:
        entry = _clamp(tl.load(sequences.batch_index + sequence), 0, sequences.entries - 1)
    return entry, first, keys


@triton.jit
def _span(starts: "tl.tensor", sequence: "tl.tensor", rows: "tl.tensor"):
    """Lengths on a device are not checked by the front door: wrong ones must not reach foreign memory."""
    first = _clamp(tl.load(starts + sequence), 0, rows)
    return first, _clamp(tl.load(starts + sequence + 1), first, rows)


@triton.jit
def _clamp(number: "tl.tensor", low: "tl.tensor", high: "tl.tensor"):
    return tl.minimum(tl.maximum(number, low), high)


@triton.jit
def sequence_of_tile(tile_starts: "tl.tensor", count: "tl.tensor", tile: "tl.tensor"):
    """The sequence that a tile of packed rows belongs to; ``count`` behind the last one.

    tile_starts: int64 (number + 1,), the tiles before each sequence.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        behind = tl.load(tile_starts + middle + 1) <= tile
        low = tl.where(behind, middle + 1, low)
        high = tl.where(behind, high, middle)
    return low


@triton.jit
def key_addresses(
    rows: "Rows",
    sequences: "Sequences",
    entry: "tl.tensor",
    first: "tl.tensor",
    head: "tl.tensor",
    start: "tl.tensor",
    index: "tl.tensor",
    inside: "tl.tensor",
    STEADY: tl.constexpr,
):
    """Where the keys (or values) ``index`` of the tile that begins at ``start`` lie: (KEYS,) pointers.

    STEADY: the steps within a tile stay in registers from one tile to the next. Masked tiles have none to
    spare, and compute them anew.
    """
    at = rows.start + head.to(tl.int64) * rows.head
    if sequences.block_table is None:
        at += entry * rows.batch
        if STEADY:
            addresses = at + (first + start) * rows.row + (index - start).to(tl.int64) * rows.row
        else:
            addresses = at + (first + index) * rows.row
    else:
        place = sequences.block_table + entry * sequences.pages + index // sequences.page_size
        page = _clamp(tl.load(place, mask=inside, other=0), 0, sequences.entries - 1).to(tl.int64)
        addresses = at + page * rows.batch + (index % sequences.page_size).to(tl.int64) * rows.row
    return addresses


@triton.jit
def load_tile(
    addresses: "tl.tensor",
    step: "tl.tensor",
    inside: "tl.tensor",
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """A tile of rows (ROWS, WIDTH): zeros where a row is not ``inside``, and behind the last of COLUMNS."""
    column = tl.arange(0, WIDTH)
    pointers = addresses[:, None] + column[None, :].to(tl.int64) * step
    exists = (column < COLUMNS)[None, :]
    if CHECKED:
        tile = tl.load(
            pointers, mask=(inside[:, None] if COLUMNS == WIDTH else inside[:, None] & exists), other=0.0
        )
    elif COLUMNS == WIDTH:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=exists, other=0.0)
    return tile


@triton.jit
def store_tile(
    addresses: "tl.tensor",
    step: "tl.tensor",
    inside: "tl.tensor",
    tile: "tl.tensor",
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes the rows that are ``inside``, in the dtype of the memory."""
    column = tl.arange(0, WIDTH)
    pointers = addresses[:, None] + column[None, :].to(tl.int64) * step
    mask = inside[:, None] & (column < COLUMNS)[None, :]
    tl.store(pointers, tile.to(addresses.dtype.element_ty), mask=mask)
