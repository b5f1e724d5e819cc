"""The merge of partial results over disjoint keys: what split decoding ends with (see flashtile.merge)."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .forward import add_sink
from .places import store_tile
from .scores import LN_2, LOG2_E

if TYPE_CHECKING:
    from .operands import Rows, Sequences, Terms


@triton.jit
def merge_splits(
    parts: "Rows",
    part_lses: "Rows",
    out: "Rows",
    lse: "Rows",
    terms: "Terms",
    sequences: "Sequences",
    heads: "tl.tensor",
    queries: "tl.tensor",
    splits: "tl.tensor",
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """One row of O and its LSE from the partial results of all splits."""
    program = tl.program_id(0)
    row, head, entry = program % queries, program // queries % heads, program // queries // heads
    at_lse = (
        part_lses.start + entry.to(tl.int64) * part_lses.batch + head * part_lses.head + row * part_lses.row
    )
    at_part = parts.start + entry.to(tl.int64) * parts.batch + head * parts.head + row * parts.row
    column = tl.arange(0, VALUE_WIDTH)
    row_max, row_sum = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    accumulated, unweighted = tl.zeros((VALUE_WIDTH,), tl.float32), tl.zeros((VALUE_WIDTH,), tl.float32)
    for split in range(splits):
        step = (tl.zeros((1,), tl.int64) + split) * sequences.number
        score = tl.load(at_lse + step * part_lses.batch) * LOG2_E
        pointers = at_part + step * parts.batch + column * parts.column
        part = tl.load(pointers, mask=column < VALUE_DIM, other=0.0)
        row_max, row_sum, rescale = add_sink(score, row_max, row_sum)
        weight = tl.exp2(score - tl.where(row_max == float("-inf"), 0.0, row_max))
        # A part that counts nothing has no say, unless nothing else does.
        accumulated = accumulated * rescale + tl.where(weight == 0.0, 0.0, weight * part)
        unweighted += part
    nothing = row_sum == 0.0
    if terms.sinks is not None:
        sink = tl.load(terms.sinks + head + tl.zeros((1,), tl.int32)).to(tl.float32) * LOG2_E
        row_max, row_sum, rescale = add_sink(sink, row_max, row_sum)
        accumulated *= rescale
    result = tl.where(nothing, unweighted, accumulated / row_sum)
    here = tl.zeros((1,), tl.int32)
    at = out.start + entry.to(tl.int64) * out.batch + head * out.head + row * out.row + here
    store_tile(at, out.column, here == 0, result[None, :], VALUE_DIM, VALUE_WIDTH)
    at = lse.start + entry.to(tl.int64) * lse.batch + head * lse.head + row * lse.row + here
    tl.store(at, (row_max + tl.log2(row_sum)) * LN_2)
