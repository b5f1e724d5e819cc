"""The gradient of the bias: dS, summed over whatever the bias is broadcast over.

A program owns a tile of the gradient and computes all of S and dP that it is a sum of, in a fixed order.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .gradients import load_keys, load_queries, place_of, probabilities, score_gradients
from .scores import key_tiles

if TYPE_CHECKING:
    from .gradients import Inputs, Place, RowNumbers
    from .operands import Rows, Sequences, Terms, Visible


@triton.jit
def bias_gradient(
    inputs: "Inputs",
    grad_bias: "Rows",
    bias_heads: "tl.tensor",
    rows: "tl.tensor",
    columns: "tl.tensor",
    numbers: "RowNumbers",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    heads: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    OVER_BATCH: tl.constexpr,
    OVER_HEADS: tl.constexpr,
    OVER_QUERIES: tl.constexpr,
    OVER_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the gradient (batch, bias_heads, rows, columns) of the bias.

    OVER_...: it has one row along this dimension, which is a sum over all.
    """
    row_tiles, column_tiles = tl.cdiv(rows, QUERIES), tl.cdiv(columns, KEYS)
    program = tl.program_id(0)
    column_tile, row_tile = program % column_tiles, program // column_tiles % row_tiles
    head = program // column_tiles // row_tiles % bias_heads
    entry = program // column_tiles // row_tiles // bias_heads

    total = tl.zeros((QUERIES, KEYS), tl.float32)
    for sequence in range(sequences.number if OVER_BATCH else 1):
        for member in range(heads if OVER_HEADS else 1):
            query_head = head + member
            place = place_of(sequences, entry + sequence, query_head, query_head // GROUP, heads)
            begin, end = 0, tl.cdiv(place.queries, QUERIES)
            if not OVER_QUERIES:
                begin, end = row_tile, tl.minimum(row_tile + 1, end)
            for query_tile in range(begin, end):
                total = _add_queries(
                    total, inputs, numbers, sequences, visible, terms, place, query_tile * QUERIES,
                    column_tile, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, QUERIES, KEYS, OVER_KEYS,
                    PRECISION,
                )  # fmt: skip
    if OVER_QUERIES:
        total = tl.sum(total, 0, keep_dims=True)
    if OVER_KEYS:
        total = tl.sum(total, 1, keep_dims=True)
    row = row_tile * QUERIES + tl.arange(0, total.shape[0])
    column = column_tile * KEYS + tl.arange(0, total.shape[1])
    at = grad_bias.start + entry.to(tl.int64) * grad_bias.batch + head.to(tl.int64) * grad_bias.head
    at += row.to(tl.int64)[:, None] * grad_bias.row + column.to(tl.int64)[None, :] * grad_bias.column
    tl.store(at, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _add_queries(
    total: "tl.tensor",
    inputs: "Inputs",
    numbers: "RowNumbers",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    place: "Place",
    start: "tl.tensor",
    column_tile: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    OVER_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds dS of the queries [start, start + QUERIES) and of a tile of keys, or of all of them."""
    rows = load_queries(
        inputs, numbers, visible, terms, place, start, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, QUERIES,
        True, True,
    )  # fmt: skip
    begin, _full_begin, _full_end, end = key_tiles(rows.first, rows.last, rows.inside, place.keys, KEYS, True)
    if not OVER_KEYS:
        begin, end = tl.maximum(begin, column_tile), tl.minimum(end, column_tile + 1)
    for key_tile in range(begin, end):
        columns = load_keys(
            inputs,
            sequences,
            place,
            key_tile * KEYS,
            HEAD_DIM,
            VALUE_DIM,
            HEAD_WIDTH,
            VALUE_WIDTH,
            KEYS,
            True,
        )
        tile = probabilities(rows, columns, visible, terms, place, True, False, PRECISION)
        grad_scores, _products = score_gradients(tile, rows, columns, terms, True, False, PRECISION)
        total += grad_scores
    return total
