"""Forward pass: FlashAttention-2, algorithm 1. One task is one tile of query rows and all its keys."""

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
    GROUP,
    HEAD_DIM,
    KEY,
    KV_HEADS,
    LSE,
    LSE_REST,
    OUT,
    QUERY,
    SINKS,
    TILE_KEYS,
    TILES,
    VALUE,
    VALUE_DIM,
    field,
)
from .exact import accumulate_exactly
from .gemm import COLUMNS, Packed, multiply
from .kinds import Kind, compute_size, lanes
from .native import native
from .operands import all_finite, columns_operand, key_operand
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
from .scores import finish_scores, hides_some, score_factor
from .sequences import place_of, query_at, query_length
from .simd import peek, peek_int64, poke, rounded
from .softmax import online_softmax, rescale
from .stage import fill, padded, stage_query, unstage_transposed


@native
def tile_width(kind: Kind) -> int:
    """Query rows of one tile."""
    return COLUMNS * lanes(kind)


@native
def used_width(kind: Kind, call: int, batch: int, start: int) -> int:
    """Rows of the tile that starts there, in whole vectors: the last tile of a short sequence is narrower."""
    return padded(kind, min(tile_width(kind), field(call, GROUP) * query_length(call, batch) - start))


@native
def forward(kind: Kind, call: int, scratch: int, task: int) -> None:
    """O and LSE of one tile of rows of one key head.

    Tiles of a head follow one another, so that its K and V stay in the cache; late rows, the heaviest of a
    causal call, come first.
    """
    place = place_of(call, task, field(call, KV_HEADS) * field(call, TILES))
    batch, kv_head = place.batch, place.local // place.tiles
    start = (place.tiles - 1 - place.local % place.tiles) * tile_width(kind)
    width, size = used_width(kind, call, batch, start), compute_size(kind)
    row, value_dim = width * size, field(call, VALUE_DIM)
    table, out = scratch + field(call, AT_ROWS), scratch + field(call, AT_OUT)
    query = scratch + field(call, AT_QUERY)
    set_rows(kind, call, table, batch, kv_head, start, width, False)
    locate_rows(call, table, QUERY, QUERY_ROW, batch, kv_head, start, width)
    locate_rows(call, table, OUT, OUT_ROW, batch, kv_head, start, width)
    stage_query(kind, table + QUERY_ROW, field(call, QUERY + 4), field(call, HEAD_DIM), query, row, width)
    fill(kind, out, row, value_dim, width, 0.0)
    start_rows(kind, call, table, kv_head, start, width, field(call, SINKS))
    step, high = field(call, TILE_KEYS), peek_int64(table + HIGH)
    for first in range(peek_int64(table + LOW) // step * step, high, step):
        forward_keys(kind, call, scratch, batch, kv_head, first, min(step, high - first), width)
    finish_rows(kind, call, table, batch, kv_head, start)
    unstage_transposed(
        kind,
        out,
        row,
        table + FACTOR,
        table + OUT_ROW,
        field(call, OUT + 4),
        value_dim,
        peek_int64(table + COUNT),
        width,
    )


@native
def forward_keys(
    kind: Kind, call: int, scratch: int, batch: int, kv_head: int, first: int, keys: int, width: int
) -> None:
    """One step of the online softmax: keys [first, first + keys) for the tile's rows."""
    size = compute_size(kind)
    row, vectors, value_dim = width * size, width // lanes(kind), field(call, VALUE_DIM)
    table, scores, out = (
        scratch + field(call, AT_ROWS),
        scratch + field(call, AT_SCORES),
        scratch + field(call, AT_OUT),
    )
    spare = scratch + field(call, AT_BIAS)
    query, tile = Packed(scratch + field(call, AT_QUERY), row), Packed(scores, row)
    space = scratch + field(call, AT_KEY)
    k = key_operand(kind, call, scratch, KEY, batch, kv_head, first, keys, HEAD_DIM, space)
    multiply(kind, k, query, tile, keys, vectors, False)
    finish_scores(kind, call, table, scores, 0, spare, first, keys, width)
    if online_softmax(kind, call, table, scores, score_factor(call), first, keys, width):
        rescale(kind, out, value_dim, width, table + FACTOR)
    if hides_some(call, table, first, keys) and not all_finite(
        kind, call, VALUE, batch, kv_head, first, keys, VALUE_DIM
    ):
        accumulate_exactly(kind, call, table, scores, width, out, size, row, batch, kv_head, first, keys)
        return
    space = scratch + field(call, AT_VALUE)
    vt = columns_operand(kind, call, scratch, VALUE, batch, kv_head, first, keys, VALUE_DIM, space)
    multiply(kind, vt, tile, Packed(out, row), value_dim, vectors, True)


@native
def start_rows(kind: Kind, call: int, table: int, kv_head: int, start: int, width: int, sinks: int) -> None:
    """Row maxima and sums before any key: nothing seen, or the sink (address 0: none)."""
    group = field(call, GROUP)
    for lane in range(width):
        row_max, row_sum = -math.inf, 0.0
        if sinks != 0:
            head = kv_head * group + (start + lane) % group
            row_max, row_sum = peek(kind, sinks + head * field(call, SINKS + 1)) / score_factor(call), 1.0
        poke(kind, table + ROW_MAX + lane * compute_size(kind), row_max)
        poke(kind, table + ROW_SUM + lane * compute_size(kind), row_sum)


@native
def finish_rows(kind: Kind, call: int, table: int, batch: int, kv_head: int, start: int) -> None:
    """LSE of every row, and in FACTOR what normalises its output (0 where no key was seen)."""
    group, unit = field(call, GROUP), rounded(kind, score_factor(call))
    for lane in range(peek_int64(table + COUNT)):
        at, row = lane * compute_size(kind), start + lane
        row_sum = peek(kind, table + ROW_SUM + at)
        row_max, log_sum, factor = -math.inf, 0.0, 0.0
        if row_sum != 0.0:
            row_max, log_sum = peek(kind, table + ROW_MAX + at) * unit, math.log(row_sum)
            factor = 1.0 / row_sum
        poke(kind, table + FACTOR + at, factor)
        head, query = kv_head * group + row % group, row // group
        if field(call, LSE_REST) != 0:
            poke(kind, query_at(call, LSE_REST, batch, head, query), log_sum)
            log_sum = 0.0
        poke(kind, query_at(call, LSE, batch, head, query), row_max + log_sum)
