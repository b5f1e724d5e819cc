"""Before the backward pass: what its kernels need to know of every row. After it: sums over rows."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .forward import add_sink, locate
from .gradients import place_of, row_addresses
from .places import key_addresses, load_tile
from .scores import LOG2_E, key_tiles, tile_scores, visible_entries, visible_spans

if TYPE_CHECKING:
    from .gradients import Inputs, Place, RowNumbers
    from .operands import Rows, Sequences, Terms, Visible

# P recomputed from a larger LSE would be off by more than 5e-4.
_LARGE_LSE = tl.constexpr(2.0**13)


@triton.jit
def row_numbers(
    inputs: "Inputs",
    out: "Rows",
    lse: "Rows",
    grad_lse: "Rows",
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
):
    """delta = rowsum(dO * O) - dLSE, and LSE as a maximum and a rest, in units of log 2.

    The rest is 0 unless LSE is too large to tell many keys from few: a row whose every key has the bias
    -1e10, say, has the LSE -1e10 in float32, however many keys there are. The maximum and the sum of such
    rows are computed anew and kept apart.
    """
    sequence, head, tile, _ = locate(sequences, tile_starts, tiles, heads, 1)
    if sequence >= sequences.number:
        return
    place = place_of(sequences, sequence, head, head // GROUP, heads)
    if tile * QUERIES >= place.queries:
        return
    position = tile * QUERIES + tl.arange(0, QUERIES)
    inside, row = position < place.queries, place.query_first + position

    at = row_addresses(out, place, row)
    o = load_tile(at, out.column, inside, VALUE_DIM, VALUE_WIDTH, True).to(tl.float32)
    at = row_addresses(inputs.grad_out, place, row)
    do = load_tile(at, inputs.grad_out.column, inside, VALUE_DIM, VALUE_WIDTH, True).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if grad_lse is not None:
        delta -= tl.load(row_addresses(grad_lse, place, row), mask=inside, other=0.0)

    natural = tl.load(row_addresses(lse, place, row), mask=inside, other=0.0)
    # The exponentials of a row that sees nothing are 0.
    row_max = tl.where(natural == float("-inf"), float("inf"), natural * LOG2_E)
    row_rest = tl.zeros((QUERIES,), tl.float32)
    large = (tl.abs(natural) > _LARGE_LSE) & (tl.abs(natural) < float("inf"))
    # Nobody knows the maxima of the whole rows that a part belongs to.
    if terms.part is None:  # noqa: SIM102 (decided when the kernel is compiled; the next one on the device)
        if tl.max(large.to(tl.int32), 0) > 0:
            exact_max, exact_sum = _softmax_of_rows(
                inputs, sequences, visible, terms, place, position, inside, row, HEAD_DIM, HEAD_WIDTH, KEYS,
                PRECISION,
            )  # fmt: skip
            row_max = tl.where(large, exact_max, row_max)
            row_rest = tl.where(large, tl.log2(exact_sum), row_rest)
            tl.store(numbers.apart, 1)
    at = place.query_entry * numbers.batch + head.to(tl.int64) * numbers.head + row
    tl.store(numbers.row_max + at, row_max, mask=inside)
    tl.store(numbers.row_rest + at, row_rest, mask=inside)
    tl.store(numbers.delta + at, delta, mask=inside)


@triton.jit
def _softmax_of_rows(
    inputs: "Inputs",
    sequences: "Sequences",
    visible: "Visible",
    terms: "Terms",
    place: "Place",
    position: "tl.tensor",
    inside: "tl.tensor",
    row: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The maximum of the scores of each row and the sum of their exponentials, as in the forward pass."""
    at = row_addresses(inputs.query, place, row)
    q = load_tile(at, inputs.query.column, inside, HEAD_DIM, HEAD_WIDTH, True)
    first, last = visible_spans(visible, terms, place.query_entry, row, position, inside, place.keys)
    row_max = tl.full((position.shape[0],), float("-inf"), tl.float32)
    row_sum = tl.zeros((position.shape[0],), tl.float32)
    # Names are not used twice, not even `_`: Triton carries them through the loop with the type they had.
    begin, _full_begin, _full_end, end = key_tiles(first, last, inside, place.keys, KEYS, True)
    for key_tile in tl.range(begin, end, num_stages=1):
        index = key_tile * KEYS + tl.arange(0, KEYS)
        existing = index < place.keys
        at_key = key_addresses(
            inputs.key, sequences, place.key_entry, place.key_first, place.kv_head, key_tile * KEYS, index,
            existing, False,
        )  # fmt: skip
        k = load_tile(at_key, inputs.key.column, existing, HEAD_DIM, HEAD_WIDTH, True)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        seen, bias = visible_entries(
            visible, terms, place.sequence, place.head, position[:, None], first[:, None], last[:, None],
            index[None, :],
        )  # fmt: skip
        scores, _capped = tile_scores(
            products, terms, place.sequence, place.head, position[:, None], index[None, :], bias,
            place.queries, place.keys,
        )  # fmt: skip
        # The backward pass fuses the last product with the difference from the maximum. Here they have to
        # round alike, so nothing else may use that product: no mask, and no maximum.
        if terms.softcap is None and terms.bias is None and terms.slopes is None:
            sign = tl.where(terms.scale < 0.0, -1.0, 1.0)
            largest = tl.max(tl.where(seen, products * sign, float("-inf")), 1)
            scaled = largest * (terms.scale * sign * LOG2_E)
            new_max = tl.maximum(row_max, tl.where(largest == float("-inf"), largest, scaled))
        else:
            new_max = tl.maximum(row_max, tl.max(tl.where(seen, scores, float("-inf")), 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        exponentials = tl.where(seen, tl.exp2(scores - base[:, None]), 0.0)
        row_sum = row_sum * tl.exp2(row_max - base) + tl.sum(exponentials, 1)
        row_max = new_max
    if terms.sinks is not None:
        sink = tl.load(terms.sinks + place.head).to(tl.float32) * LOG2_E
        row_max, row_sum, _ = add_sink(sink, row_max, row_sum)
    return row_max, row_sum


@triton.jit
def sum_rows(
    terms_of_rows: "tl.tensor",
    batch: "tl.tensor",
    head_step: "tl.tensor",
    sums: "tl.tensor",
    sequences: "Sequences",
    heads: "tl.tensor",
    QUERIES: tl.constexpr,
):
    """The sum of one number per query: (batch, heads, rows), steps as in RowNumbers, to (number, heads)."""
    program = tl.program_id(0)
    place = place_of(sequences, program // heads, program % heads, 0, heads)
    start = (
        terms_of_rows + place.query_entry * batch + place.head.to(tl.int64) * head_step + place.query_first
    )
    total = tl.zeros((QUERIES,), tl.float32)
    for first in range(0, place.queries, QUERIES):
        position = first + tl.arange(0, QUERIES)
        total += tl.load(start + position, mask=position < place.queries, other=0.0)
    tl.store(sums + program, tl.sum(total, 0))
