"""The backward pass (FlashAttention-2, Algorithm 2) in two kernels: dK and dV, then dQ.

Each program owns what it writes and sums in a fixed order: no atomics, the same bits every time. P and dS are
computed twice for it, seven products instead of five.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .exact import exact_product, has_only_finite
from .forward import locate
from .gradients import (
    at_head,
    load_keys,
    load_queries,
    place_of,
    probabilities,
    row_addresses,
    score_gradients,
)
from .places import key_addresses, store_tile
from .scores import alibi_distance, key_tiles, visible_spans

if TYPE_CHECKING:
    from .gradients import Inputs, KeyTile, Place, QueryTile, RowNumbers
    from .operands import Rows, Sequences, Terms, Visible


@triton.jit
def key_gradients(
    inputs: "Inputs",
    grad_key: "Rows",
    grad_value: "Rows",
    broken: "tl.tensor",
    numbers: "RowNumbers",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    tile_starts: "tl.tensor",
    tiles: "tl.tensor",
    kv_heads: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    REPAIR: tl.constexpr,
):
    """dK and dV of one tile of keys, from all queries of all heads that read it.

    The loops need every register there is, so that what is rare has a launch of its own (REPAIR): programs
    that are ``broken``, because a result is not finite or a row has its LSE in two parts, run again there.
    """
    sequence, kv_head, tile, _ = locate(sequences, tile_starts, tiles, kv_heads, 1)
    if sequence >= sequences.number:
        return
    place = place_of(sequences, sequence, kv_head * GROUP, kv_head, kv_heads * GROUP)
    if tile * KEYS >= place.keys:
        return
    if REPAIR and tl.load(broken + tl.program_id(0)) == 0:
        return
    # The first keys are the heaviest under a causal mask.
    start = ((place.keys - 1) // KEYS - tile) * KEYS
    columns = load_keys(
        inputs, sequences, place, start, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, True
    )
    grad_k = tl.zeros((KEYS, HEAD_WIDTH), tl.float32)
    grad_v = tl.zeros((KEYS, VALUE_WIDTH), tl.float32)
    spans: tl.constexpr = visible.first is not None or visible.last is not None
    dense: tl.constexpr = spans or visible.mask is not None or terms.bias is not None or REPAIR
    begin, full_begin, full_end, end = query_tiles(visible, place, start, QUERIES, KEYS, dense)
    if not dense:
        for step in tl.range(full_begin * GROUP, full_end * GROUP, num_stages=STAGES):
            grad_k, grad_v = _add_queries(
                columns, grad_k, grad_v, inputs, numbers, visible, terms, at_head(place, step % GROUP),
                step // GROUP * QUERIES, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, QUERIES, False, False,
                False, False, PRECISION,
            )  # fmt: skip
    before = full_begin - begin
    for step in tl.range(0, (before + end - full_end) * GROUP, num_stages=STAGES):
        tile = step // GROUP
        tile = tl.where(tile < before, begin + tile, full_end + tile - before)
        grad_k, grad_v = _add_queries(
            columns, grad_k, grad_v, inputs, numbers, visible, terms, at_head(place, step % GROUP),
            tile * QUERIES, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, QUERIES, True, spans, REPAIR, False,
            PRECISION,
        )  # fmt: skip
    # Keys that do not exist have scores of 0, whose exponentials may be anything.
    finite = has_only_finite(tl.where(columns.existing[:, None], grad_k, 0.0))
    finite = finite & has_only_finite(tl.where(columns.existing[:, None], grad_v, 0.0))
    if not REPAIR:
        tl.store(broken + tl.program_id(0), ((tl.load(numbers.apart) != 0) | (not finite)).to(tl.int8))
    elif not finite:
        grad_k = tl.zeros((KEYS, HEAD_WIDTH), tl.float32)
        grad_v = tl.zeros((KEYS, VALUE_WIDTH), tl.float32)
        for step in tl.range(begin * GROUP, end * GROUP, num_stages=1):
            grad_k, grad_v = _add_queries(
                columns, grad_k, grad_v, inputs, numbers, visible, terms, at_head(place, step % GROUP),
                step // GROUP * QUERIES, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, QUERIES, True, spans,
                True, True, PRECISION,
            )  # fmt: skip
    at = key_addresses(
        grad_key, sequences, place.key_entry, place.key_first, kv_head, columns.start, columns.index,
        columns.existing, False,
    )  # fmt: skip
    store_tile(at, grad_key.column, columns.existing, grad_k * terms.scale, HEAD_DIM, HEAD_WIDTH)
    at = key_addresses(
        grad_value, sequences, place.key_entry, place.key_first, kv_head, columns.start, columns.index,
        columns.existing, False,
    )  # fmt: skip
    store_tile(at, grad_value.column, columns.existing, grad_v, VALUE_DIM, VALUE_WIDTH)


@triton.jit
def query_tiles(
    visible: "Visible",
    place: "Place",
    start: "tl.tensor",
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DENSE: tl.constexpr,
):
    """The tiles of queries that see the keys [start, start + KEYS), as far as ``lower`` and ``upper`` tell.

    [begin, end) see some of them; in [full_begin, full_end) every query exists and sees them all.
    """
    last_key = tl.minimum(start + KEYS, place.keys) - 1
    some_first, some_end, full_first, full_last = 0, place.queries, 0, place.queries
    if visible.upper is not None:
        some_first = tl.maximum(start - visible.upper, 0)
        full_first = tl.maximum(last_key - visible.upper, 0)
    if visible.lower is not None:
        some_end = tl.maximum(tl.minimum(last_key - visible.lower + 1, place.queries), 0)
        full_last = tl.maximum(tl.minimum(start - visible.lower + 1, place.queries), 0)
    begin = some_first // QUERIES
    end = tl.maximum((some_end + QUERIES - 1) // QUERIES, begin)
    full_begin, full_end = begin, begin
    if not DENSE:
        full_begin = tl.minimum(tl.maximum((full_first + QUERIES - 1) // QUERIES, begin), end)
        full_end = tl.minimum(tl.maximum(full_last // QUERIES, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def _add_queries(
    columns: "KeyTile",
    grad_k: "tl.tensor",
    grad_v: "tl.tensor",
    inputs: "Inputs",
    numbers: "RowNumbers",
    visible: "Visible",
    terms: "Terms",
    place: "Place",
    start: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
    SPANS: tl.constexpr,
    APART: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dV += P^T dO and dK += dS^T Q for the queries [start, start + QUERIES).

    SPANS: rows have bounds of their own, and may not see this tile at all. EXACT: only visible entries are
    multiplied.
    """
    meets = True
    if SPANS:
        position = start + tl.arange(0, QUERIES)
        inside, row = position < place.queries, place.query_first + position
        first, last = visible_spans(visible, terms, place.query_entry, row, position, inside, place.keys)
        meets = (
            tl.max(
                tl.minimum(last, columns.start + columns.index.shape[0]) - tl.maximum(first, columns.start), 0
            )
            > 0
        )
    if meets:
        rows = load_queries(
            inputs, numbers, visible, terms, place, start, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
            QUERIES, MASKED, APART,
        )  # fmt: skip
        tile = probabilities(rows, columns, visible, terms, place, MASKED, True, PRECISION)
        if EXACT:
            grad_v = exact_product(
                tile.dropped, tile.seen, rows.at_grad_out, inputs.grad_out.column, rows.inside, grad_v,
                VALUE_DIM, VALUE_WIDTH,
            )  # fmt: skip
        else:
            p = tile.dropped.to(rows.grad_out.dtype)
            grad_v = tl.dot(p, rows.grad_out, grad_v, input_precision=PRECISION)
        _, ds = score_gradients(tile, rows, columns, terms, False, True, PRECISION)
        if EXACT:
            grad_k = exact_product(
                ds, tile.seen, rows.at_query, inputs.query.column, rows.inside, grad_k, HEAD_DIM, HEAD_WIDTH
            )
        else:
            grad_k = tl.dot(ds.to(rows.q.dtype), rows.q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def query_gradients(
    inputs: "Inputs",
    grad_query: "Rows",
    slope_terms: "tl.tensor",
    numbers: "RowNumbers",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    tile_starts: "tl.tensor",
    tiles: "tl.tensor",
    heads: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ of one tile of queries; and, unless ``slope_terms`` is None, what each adds to its ALiBi slope's."""
    sequence, head, tile, _ = locate(sequences, tile_starts, tiles, heads, 1)
    if sequence >= sequences.number:
        return
    place = place_of(sequences, sequence, head, head // GROUP, heads)
    if tile * QUERIES >= place.queries:
        return
    rows = load_queries(
        inputs, numbers, visible, terms, place, tile * QUERIES, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
        QUERIES, True, True,
    )  # fmt: skip
    grad_q = tl.zeros((QUERIES, HEAD_WIDTH), tl.float32)
    slope_sums = tl.zeros((QUERIES,), tl.float32)
    with_slopes: tl.constexpr = slope_terms is not None
    dense: tl.constexpr = visible.mask is not None or terms.bias is not None
    begin, full_begin, full_end, end = key_tiles(rows.first, rows.last, rows.inside, place.keys, KEYS, dense)
    for tile in tl.range(full_begin, full_end, num_stages=STAGES):
        grad_q, slope_sums = _add_keys(
            rows, grad_q, slope_sums, inputs, sequences, visible, terms, place, tile * KEYS, HEAD_DIM,
            VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, False, with_slopes, False, PRECISION,
        )  # fmt: skip
    for step in tl.range(0, full_begin - begin + end - full_end, num_stages=STAGES):
        tile = tl.where(step < full_begin - begin, begin + step, full_end + step - (full_begin - begin))
        grad_q, slope_sums = _add_keys(
            rows, grad_q, slope_sums, inputs, sequences, visible, terms, place, tile * KEYS, HEAD_DIM,
            VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, True, with_slopes, False, PRECISION,
        )  # fmt: skip
    if not has_only_finite(grad_q):
        grad_q = tl.zeros((QUERIES, HEAD_WIDTH), tl.float32)
        for tile in tl.range(begin, end, num_stages=1):
            grad_q, slope_sums = _add_keys(
                rows, grad_q, slope_sums, inputs, sequences, visible, terms, place, tile * KEYS, HEAD_DIM,
                VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, True, False, True, PRECISION,
            )  # fmt: skip
    row = place.query_first + rows.position
    at = row_addresses(grad_query, place, row)
    store_tile(at, grad_query.column, rows.inside, grad_q * terms.scale, HEAD_DIM, HEAD_WIDTH)
    if with_slopes:
        at = place.query_entry * numbers.batch + head.to(tl.int64) * numbers.head + row
        tl.store(slope_terms + at, slope_sums, mask=rows.inside)


@triton.jit
def _add_keys(
    rows: "QueryTile",
    grad_q: "tl.tensor",
    slope_sums: "tl.tensor",
    inputs: "Inputs",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    place: "Place",
    start: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_SLOPES: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ += dS K for the keys [start, start + KEYS). EXACT: only visible entries are multiplied."""
    columns = load_keys(
        inputs, sequences, place, start, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, KEYS, MASKED
    )
    tile = probabilities(rows, columns, visible, terms, place, MASKED, False, PRECISION)
    grad_scores, ds = score_gradients(tile, rows, columns, terms, MASKED and WITH_SLOPES, False, PRECISION)
    if WITH_SLOPES:
        distance = alibi_distance(
            terms, rows.position[:, None], columns.index[None, :], place.queries, place.keys
        )
        slope_sums -= tl.sum(grad_scores * distance, 1)
    if EXACT:
        grad_q = exact_product(
            ds, tile.seen, columns.at_key, inputs.key.column, columns.existing, grad_q, HEAD_DIM, HEAD_WIDTH
        )
    else:
        grad_q = tl.dot(ds.to(columns.k.dtype), columns.k, grad_q, input_precision=PRECISION)
    return grad_q, slope_sums
