"""What the kernels of the backward pass share: P and dS of a tile, recomputed from Q, K, V and dO."""

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from .places import key_addresses, key_span, load_tile, query_span
from .scores import kept_entries, tile_scores, visible_entries, visible_spans

if TYPE_CHECKING:
    from .operands import Rows, Sequences, Terms, Visible


class Inputs(NamedTuple):
    """What the forward pass read, and the gradient of what it wrote."""

    query: "Rows"
    key: "Rows"
    value: "Rows"
    grad_out: "Rows"
    nothing: None = None  # see operands.py


class RowNumbers(NamedTuple):
    """One number per query, from which a tile of P and dS follows; (batch, heads, rows), rows side by side.

    P = exp2((scores - row_max) - row_rest) and dS = P * (dP - delta). The rest is 0 in most calls: the number
    in ``apart`` is 1 if any is not.
    """

    row_max: "tl.tensor"
    row_rest: "tl.tensor"
    delta: "tl.tensor"
    apart: "tl.tensor"
    batch: "tl.tensor"
    head: "tl.tensor"


class Place(NamedTuple):
    """One head of one sequence: where its rows are, and how many."""

    sequence: "tl.tensor"
    head: "tl.tensor"
    kv_head: "tl.tensor"
    heads: "tl.tensor"
    query_entry: "tl.tensor"
    query_first: "tl.tensor"
    queries: "tl.tensor"
    key_entry: "tl.tensor"
    key_first: "tl.tensor"
    keys: "tl.tensor"


class QueryTile(NamedTuple):
    """A tile of queries: vectors of a number per row, and the pointers to what was loaded of each."""

    q: "tl.tensor"
    grad_out: "tl.tensor"
    position: "tl.tensor"
    inside: "tl.tensor"
    at_query: "tl.tensor"
    at_grad_out: "tl.tensor"
    first: "tl.tensor"
    last: "tl.tensor"
    row_max: "tl.tensor"
    row_rest: "tl.tensor"
    delta: "tl.tensor"


class KeyTile(NamedTuple):
    """A tile of keys, and the pointers to the keys themselves."""

    k: "tl.tensor"
    v: "tl.tensor"
    start: "tl.tensor"
    index: "tl.tensor"
    existing: "tl.tensor"
    at_key: "tl.tensor"


class Probabilities(NamedTuple):
    """P of a tile before and after dropout, and what dS needs of the way there."""

    p: "tl.tensor"
    dropped: "tl.tensor"
    kept: "tl.tensor"
    capped: "tl.tensor"
    seen: "tl.tensor"


@triton.jit
def place_of(
    sequences: "Sequences",
    sequence: "tl.tensor",
    head: "tl.tensor",
    kv_head: "tl.tensor",
    heads: "tl.tensor",
):
    """The place of a head in a sequence."""
    query_entry, query_first, queries = query_span(sequences, sequence)
    key_entry, key_first, keys = key_span(sequences, sequence)
    return Place(
        sequence, head, kv_head, heads, query_entry, query_first, queries, key_entry, key_first, keys
    )


@triton.jit
def at_head(place: "Place", member: "tl.tensor"):
    """The same sequence at one of the heads that share the key head; ``place`` is at the first."""
    return Place(
        place.sequence, place.head + member, place.kv_head, place.heads, place.query_entry, place.query_first,
        place.queries, place.key_entry, place.key_first, place.keys,
    )  # fmt: skip


@triton.jit
def row_addresses(rows: "Rows", place: "Place", row: "tl.tensor"):
    """Where rows of the queries, or of anything shaped like them, begin."""
    return rows.start + place.query_entry * rows.batch + place.head.to(tl.int64) * rows.head + row * rows.row


@triton.jit
def load_queries(
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
    CHECKED: tl.constexpr,
    APART: tl.constexpr,
):
    """The queries [start, start + QUERIES), with a ``row_rest`` of 0 unless APART.

    P and dS of rows that do not exist are 0.
    """
    position = start + tl.arange(0, QUERIES)
    inside, row = position < place.queries, place.query_first + position
    at_query = row_addresses(inputs.query, place, row)
    at_grad_out = row_addresses(inputs.grad_out, place, row)
    first, last = visible_spans(visible, terms, place.query_entry, row, position, inside, place.keys)
    at = place.query_entry * numbers.batch + place.head.to(tl.int64) * numbers.head + row
    row_rest = tl.zeros((QUERIES,), tl.float32)
    if APART:
        row_rest = tl.load(numbers.row_rest + at, mask=inside, other=0.0)
    if CHECKED:
        row_max = tl.load(numbers.row_max + at, mask=inside, other=float("inf"))
        delta = tl.load(numbers.delta + at, mask=inside, other=0.0)
    else:
        row_max, delta = tl.load(numbers.row_max + at), tl.load(numbers.delta + at)
    return QueryTile(
        load_tile(at_query, inputs.query.column, inside, HEAD_DIM, HEAD_WIDTH, CHECKED),
        load_tile(at_grad_out, inputs.grad_out.column, inside, VALUE_DIM, VALUE_WIDTH, CHECKED),
        position, inside, at_query, at_grad_out, first, last, row_max, row_rest, delta,
    )  # fmt: skip


@triton.jit
def load_keys(
    inputs: "Inputs",
    sequences: "Sequences",
    place: "Place",
    start: "tl.tensor",
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """The keys [start, start + KEYS) and their values."""
    index = start + tl.arange(0, KEYS)
    existing = index < place.keys
    at_key = key_addresses(
        inputs.key, sequences, place.key_entry, place.key_first, place.kv_head, start, index, existing,
        not CHECKED,
    )  # fmt: skip
    at_value = key_addresses(
        inputs.value, sequences, place.key_entry, place.key_first, place.kv_head, start, index, existing,
        not CHECKED,
    )  # fmt: skip
    return KeyTile(
        load_tile(at_key, inputs.key.column, existing, HEAD_DIM, HEAD_WIDTH, CHECKED),
        load_tile(at_value, inputs.value.column, existing, VALUE_DIM, VALUE_WIDTH, CHECKED),
        start, index, existing, at_key,
    )  # fmt: skip


@triton.jit
def probabilities(
    rows: "QueryTile",
    columns: "KeyTile",
    visible: "Visible",
    terms: "Terms",
    place: "Place",
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P of a tile: (QUERIES, KEYS), or (KEYS, QUERIES) if TRANSPOSED. Without MASKED every entry is visible.

    It is the left side of the products it goes into, and so is dS (FlashAttention-2, Algorithm 2): neither
    is ever transposed.
    """
    across: tl.constexpr = 0 if TRANSPOSED else 1
    position, index = tl.expand_dims(rows.position, across), tl.expand_dims(columns.index, 1 - across)
    products = _product(rows.q, columns.k, TRANSPOSED, PRECISION)
    seen, bias = tl.expand_dims(columns.existing, 1 - across), 0.0
    if MASKED:
        first, last = tl.expand_dims(rows.first, across), tl.expand_dims(rows.last, across)
        seen, bias = visible_entries(visible, terms, place.sequence, place.head, position, first, last, index)
    scores, capped = tile_scores(
        products, terms, place.sequence, place.head, position, index, bias, place.queries, place.keys
    )
    scores = scores - tl.expand_dims(rows.row_max, across) - tl.expand_dims(rows.row_rest, across)
    p, kept = tl.exp2(scores), seen
    if MASKED:  # 0 even where a NaN went into it
        p = tl.where(seen, p, 0.0)
    dropped = p
    if terms.seed is not None:
        head = tl.zeros_like(rows.position) + place.head
        kept = kept_entries(
            terms, place.sequence, place.heads, head, rows.position, columns.start, columns.index.shape[0]
        )
        if TRANSPOSED:
            kept = tl.trans(kept)
        dropped = p * tl.where(kept, terms.keep_scale, 0.0)  # a NaN stays one
    return Probabilities(p, dropped, kept, capped, seen)


@triton.jit
def score_gradients(
    tile: "Probabilities",
    rows: "QueryTile",
    columns: "KeyTile",
    terms: "Terms",
    CLEAN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dS = P * (dP - delta), shaped like P: by the scores, and by the scaled products of query and key.

    CLEAN: hidden entries are 0 even where V or dO holds a NaN. Products of tiles do without: one that comes
    out NaN is computed again.
    """
    grad_p = _product(rows.grad_out, columns.v, TRANSPOSED, PRECISION)
    if terms.seed is not None:
        grad_p *= tl.where(tile.kept, terms.keep_scale, 0.0)
    grad_scores = tile.p * (grad_p - tl.expand_dims(rows.delta, 0 if TRANSPOSED else 1))
    grad_products = grad_scores
    if terms.softcap is not None:
        grad_products = grad_scores * (1.0 - tile.capped * tile.capped)
    if CLEAN:
        grad_scores = tl.where(tile.seen, grad_scores, 0.0)
        grad_products = tl.where(tile.seen, grad_products, 0.0)
    return grad_scores, grad_products


@triton.jit
def _product(rows: "tl.tensor", columns: "tl.tensor", TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    if TRANSPOSED:
        product = tl.dot(columns, tl.trans(rows), input_precision=PRECISION)
    else:
        product = tl.dot(rows, tl.trans(columns), input_precision=PRECISION)
    return product
