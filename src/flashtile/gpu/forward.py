"""The forward pass (FlashAttention-2, Algorithm 1) and, over parts of the keys, decoding.

A program owns a tile of queries of one head and visits the tiles of keys that these queries see. Its rows may
also be those of all heads that share a key head (``PACKED``), and its keys a part of all (``splits``).
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .exact import exact_product, has_only_finite
from .places import (
    key_addresses,
    key_span,
    load_tile,
    query_span,
    sequence_of_tile,
    store_tile,
)
from .scores import (
    LN_2,
    LOG2_E,
    kept_entries,
    key_tiles,
    online_softmax,
    tile_scores,
    visible_entries,
    visible_spans,
)

if TYPE_CHECKING:
    from .operands import Rows, Sequences, Terms, Visible


@triton.jit
def locate(
    sequences: "Sequences",
    tile_starts: "tl.tensor",
    tiles: "tl.tensor",
    heads: "tl.tensor",
    splits: "tl.tensor",
):
    """Sequence, head, tile and split of this program; the sequence is ``number`` if there is nothing to do.

    Tiles of a head run side by side and share its keys in the cache, the last tile first: under a causal mask
    it is the heaviest.
    """
    program = tl.program_id(0)
    split = program % splits
    tile = tiles - 1 - program // splits % tiles
    head = program // splits // tiles % heads
    sequence = program // splits // tiles // heads
    if tile_starts is not None:
        sequence = sequence_of_tile(tile_starts, sequences.number, tile)
        tile = (tile - tl.load(tile_starts + tl.minimum(sequence, sequences.number - 1))).to(tl.int32)
    return sequence, head, tile, split


@triton.jit
def attention_forward(
    query: "Rows",
    key: "Rows",
    value: "Rows",
    out: "Rows",
    lse: "Rows",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    tile_starts: "tl.tensor",
    tiles: "tl.tensor",
    heads: "tl.tensor",
    splits: "tl.tensor",
    split_keys: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    FOLDED: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """O and LSE of one tile of queries.

    heads: those of the grid, key heads if PACKED. With SPLIT, ``out`` and ``lse`` have a batch entry for
    every (split, sequence), and hold partial results without the sink.
    """
    PACK: tl.constexpr = GROUP if PACKED else 1
    sequence, grid_head, tile, split = locate(sequences, tile_starts, tiles, heads, splits)
    if sequence >= sequences.number:
        return
    query_entry, query_first, queries = query_span(sequences, sequence)
    key_entry, key_first, keys = key_span(sequences, sequence)
    if tile * QUERIES >= queries * PACK:
        return

    packed_row = tile * QUERIES + tl.arange(0, QUERIES)
    position, head = packed_row // PACK, grid_head * PACK + packed_row % PACK
    kv_head = grid_head if PACKED else grid_head // GROUP
    inside, row = position < queries, query_first + position
    at = query.start + query_entry * query.batch + head.to(tl.int64) * query.head + row * query.row
    q = load_tile(at, query.column, inside, HEAD_DIM, HEAD_WIDTH, True)
    first, last = visible_spans(visible, terms, query_entry, row, position, inside, keys)
    if SPLIT:
        first = tl.maximum(first, split * split_keys)
        last = tl.minimum(last, (split + 1) * split_keys)
    last = tl.where(first < last, last, 0)  # says alone that a row sees nothing

    row_max = tl.full((QUERIES,), float("-inf"), tl.float32)
    row_sum = tl.zeros((QUERIES,), tl.float32)
    accumulated = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    dense: tl.constexpr = visible.mask is not None or terms.bias is not None
    begin, full_begin, full_end, end = key_tiles(first, last, inside, keys, KEYS, dense)
    for key_tile in tl.range(full_begin, full_end, num_stages=STAGES):
        row_max, row_sum, accumulated = _forward_tile(
            q, key, value, sequences, visible, terms, sequence, head, kv_head, position, first, last, queries,
            keys, key_entry, key_first, key_tile * KEYS, row_max, row_sum, accumulated, heads * PACK,
            HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, FOLDED, False, False, PRECISION,
        )  # fmt: skip
    for step in tl.range(0, full_begin - begin + end - full_end, num_stages=STAGES):
        key_tile = tl.where(step < full_begin - begin, begin + step, full_end + step - (full_begin - begin))
        row_max, row_sum, accumulated = _forward_tile(
            q, key, value, sequences, visible, terms, sequence, head, kv_head, position, first, last, queries,
            keys, key_entry, key_first, key_tile * KEYS, row_max, row_sum, accumulated, heads * PACK,
            HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, FOLDED, True, False, PRECISION,
        )  # fmt: skip
    if not has_only_finite(accumulated):
        accumulated = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
        final_max, final_sum = row_max, row_sum
        for key_tile in tl.range(begin, end, num_stages=1):
            final_max, final_sum, accumulated = _forward_tile(
                q, key, value, sequences, visible, terms, sequence, head, kv_head, position, first, last,
                queries, keys, key_entry, key_first, key_tile * KEYS, final_max, final_sum, accumulated,
                heads * PACK, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, FOLDED, True, True,
                PRECISION,
            )  # fmt: skip

    if not SPLIT and terms.sinks is not None:
        sink = tl.load(terms.sinks + head).to(tl.float32) * LOG2_E
        row_max, row_sum, rescale = add_sink(sink, row_max, row_sum)
        accumulated *= rescale[:, None]
    inverse = terms.keep_scale / row_sum if terms.seed is not None else 1.0 / row_sum
    # A row that sees nothing, or only scores of -inf, gets 0; what it sees may still hold a NaN.
    result = tl.where((row_sum == 0.0)[:, None], accumulated, accumulated * inverse[:, None])
    natural = (row_max + tl.log2(row_sum)) * LN_2
    entry = split.to(tl.int64) * sequences.number + query_entry if SPLIT else query_entry
    at = out.start + entry * out.batch + head.to(tl.int64) * out.head + row * out.row
    store_tile(at, out.column, inside, result, VALUE_DIM, VALUE_WIDTH)
    at = lse.start + entry * lse.batch + head.to(tl.int64) * lse.head + row * lse.row
    tl.store(at, natural, mask=inside)


@triton.jit
def add_sink(sink: "tl.tensor", row_max: "tl.tensor", row_sum: "tl.tensor"):
    """Row maximum and sum with a key of this score and no value, and the factor of what was summed before."""
    new_max = tl.maximum(row_max, sink)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - base)
    # A sink of infinity takes everything; inf - inf would be NaN.
    weight = tl.where(sink == float("inf"), 1.0, tl.exp2(sink - base))
    return new_max, row_sum * rescale + weight, rescale


@triton.jit
def _forward_tile(
    q: "tl.tensor",
    key: "Rows",
    value: "Rows",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    sequence: "tl.tensor",
    head: "tl.tensor",
    kv_head: "tl.tensor",
    position: "tl.tensor",
    first: "tl.tensor",
    last: "tl.tensor",
    queries: "tl.tensor",
    keys: "tl.tensor",
    key_entry: "tl.tensor",
    key_first: "tl.tensor",
    start: "tl.tensor",
    row_max: "tl.tensor",
    row_sum: "tl.tensor",
    accumulated: "tl.tensor",
    heads: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the keys [start, start + KEYS) to the rows' maximum, sum and output.

    EXACT: maximum and sum are final already, and only visible entries are multiplied with their values.
    """
    index = start + tl.arange(0, KEYS)
    existing = index < keys
    at = key_addresses(key, sequences, key_entry, key_first, kv_head, start, index, existing, not MASKED)
    k = load_tile(at, key.column, existing, HEAD_DIM, HEAD_WIDTH, MASKED)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    seen, bias = existing[None, :], 0.0
    if MASKED:
        seen, bias = visible_entries(
            visible, terms, sequence, head[:, None], position[:, None], first[:, None], last[:, None],
            index[None, :],
        )  # fmt: skip
    if FOLDED:
        scores, factor = products, terms.scale * LOG2_E
    else:
        scores, _ = tile_scores(
            products, terms, sequence, head[:, None], position[:, None], index[None, :], bias, queries, keys
        )
        factor = 1.0
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    if EXACT:
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        exponentials = tl.exp2(scores * factor - base[:, None])
    else:
        exponentials, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum, factor, FOLDED)
        accumulated *= rescale[:, None]
    if terms.seed is not None:
        kept = kept_entries(terms, sequence, heads, head, position, start, KEYS)
        exponentials = tl.where(kept, exponentials, 0.0)
    at = key_addresses(value, sequences, key_entry, key_first, kv_head, start, index, existing, not MASKED)
    if EXACT:
        accumulated = exact_product(
            exponentials, seen, at, value.column, existing, accumulated, VALUE_DIM, VALUE_WIDTH
        )
    else:
        v = load_tile(at, value.column, existing, VALUE_DIM, VALUE_WIDTH, MASKED)
        accumulated = tl.dot(exponentials.to(v.dtype), v, accumulated, input_precision=PRECISION)
    return row_max, row_sum, accumulated
