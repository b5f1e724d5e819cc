"""The scores of a tile, what it may see, its dropout, and one step of the online softmax.

Scores are kept in units of log 2, so that an exponential is one ``exp2`` (FlashAttention-2, section 3.1).
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from .operands import Plane, Terms, Visible


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def visible_spans(
    visible: "Visible",
    terms: "Terms",
    entry: "tl.tensor",
    row: "tl.tensor",
    position: "tl.tensor",
    inside: "tl.tensor",
    keys: "tl.tensor",
):
    """The run of keys [first, last) that each query sees.

    Rows that are not ``inside`` have an empty one, or, where every query sees every key, that of the others:
    then the whole tile has one bound, which takes no registers.
    """
    first, last = tl.zeros_like(position), tl.zeros_like(position) + keys
    if visible.lower is not None:
        first = tl.maximum(first, position + visible.lower)
    if visible.upper is not None:
        last = tl.minimum(last, position + visible.upper + 1)
    if visible.first is not None:
        at = visible.first.start + entry * visible.first.batch + row * visible.first.row
        first = tl.maximum(first, tl.load(at, mask=inside, other=0))
    if visible.last is not None:
        at = visible.last.start + entry * visible.last.batch + row * visible.last.row
        last = tl.minimum(last, tl.load(at, mask=inside, other=0))
    ranges: tl.constexpr = visible.lower is not None or visible.upper is not None
    rows: tl.constexpr = visible.first is not None or visible.last is not None
    if ranges or rows or visible.mask is not None or terms.bias is not None:
        first, last = tl.where(inside, first, 0), tl.where(inside, last, 0)
    return first, last


@triton.jit
def key_tiles(
    first: "tl.tensor",
    last: "tl.tensor",
    inside: "tl.tensor",
    keys: "tl.tensor",
    KEYS: tl.constexpr,
    DENSE: tl.constexpr,
):
    """The tiles of keys: [begin, end) are seen by some query of a tile, [full_begin, full_end) by all."""
    some = first < last
    begin = tl.min(tl.where(some, first, keys), 0) // KEYS
    end = (tl.max(tl.where(some, last, 0), 0) + KEYS - 1) // KEYS
    end = tl.maximum(begin, end)
    full_begin, full_end = begin, begin
    if not DENSE:
        full_begin = (tl.max(tl.where(inside, first, 0), 0) + KEYS - 1) // KEYS
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.min(tl.where(inside, last, keys), 0) // KEYS
        full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def plane_tile(
    plane: "Plane",
    entry: "tl.tensor",
    head: "tl.tensor",
    position: "tl.tensor",
    index: "tl.tensor",
    seen: "tl.tensor",
):
    """What of a tile is ``seen`` on a mask or a bias too, and the numbers there.

    position: (QUERIES, 1), index: (1, KEYS); or the reverse.
    """
    if plane.rows is not None:
        seen = seen & (position < plane.rows)
    if plane.columns is not None:
        seen = seen & (index < plane.columns)
    rows = plane.numbers
    at_query = (
        rows.start + entry * rows.batch + head.to(tl.int64) * rows.head + position.to(tl.int64) * rows.row
    )
    return seen, tl.load(at_query + index.to(tl.int64) * rows.column, mask=seen, other=0)


@triton.jit
def tanh(x: "tl.tensor"):
    """e / (e + 2) with e = exp(2|x|) - 1; a short series where x is small and e would lose digits."""
    magnitude = tl.abs(x)
    e = tl.exp2(tl.minimum(magnitude, 40.0) * (2 * LOG2_E)) - 1
    square = x * x
    series = magnitude * (
        1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    )
    # min() drops a NaN; the comparison does not.
    result = tl.where(magnitude < 0.15, series, tl.where(magnitude > 40.0, 1.0, e / (e + 2)))
    return tl.where(x < 0, -result, tl.where(x == x, result, x))


@triton.jit
def visible_entries(
    visible: "Visible",
    terms: "Terms",
    sequence: "tl.tensor",
    head: "tl.tensor",
    position: "tl.tensor",
    first: "tl.tensor",
    last: "tl.tensor",
    index: "tl.tensor",
):
    """Which entries of a tile are visible: in the spans, allowed by the mask, and without a bias of -inf.

    head, position, first, last: (QUERIES, 1), index: (1, KEYS); or (1, QUERIES) and (KEYS, 1). The bias of
    the visible entries comes along, so that it is read once.
    """
    seen = index < last
    if visible.lower is not None or visible.first is not None:
        seen = seen & (index >= first)
    if visible.mask is not None:
        seen, allowed = plane_tile(visible.mask, sequence, head, position, index, seen)
        seen = seen & (allowed != 0)
    bias = 0.0
    if terms.bias is not None:
        seen, stored = plane_tile(terms.bias, sequence, head, position, index, seen)
        bias = stored.to(tl.float32)
        seen = seen & (bias != float("-inf"))
    return seen, bias


@triton.jit
def tile_scores(
    products: "tl.tensor",
    terms: "Terms",
    sequence: "tl.tensor",
    head: "tl.tensor",
    position: "tl.tensor",
    index: "tl.tensor",
    bias: "tl.tensor",
    queries: "tl.tensor",
    keys: "tl.tensor",
):
    """Scores in units of log 2, and tanh(scale * product / softcap) if there is a softcap.

    products: (QUERIES, KEYS) or (KEYS, QUERIES), and the rest as for ``visible_entries``.
    """
    capped = products
    if terms.softcap is None:
        scores = products * (terms.scale * LOG2_E)
    else:
        capped = tanh(products * (terms.scale / terms.softcap))
        scores = capped * (terms.softcap * LOG2_E)
    if terms.bias is not None:
        # The lowest finite bias is no mask, though in units of log 2 it would be -inf. A NaN stays.
        scaled = bias * LOG2_E
        scores += tl.where(scaled < _LOWEST, _LOWEST, scaled)
    if terms.slopes is not None:
        slope = tl.load(terms.slopes.start + sequence * terms.slopes.batch + head * terms.slopes.head)
        scores -= slope * LOG2_E * alibi_distance(terms, position, index, queries, keys)
    return scores, capped


@triton.jit
def alibi_distance(
    terms: "Terms", position: "tl.tensor", index: "tl.tensor", queries: "tl.tensor", keys: "tl.tensor"
):
    """|i + Sk - Sq - j|: the last query stands at the last key, of the whole if this is a part."""
    diagonal = keys - queries
    if terms.part is not None:
        diagonal = terms.part.diagonal + terms.part.query - terms.part.key
    return tl.abs(position + diagonal - index).to(tl.float32)


@triton.jit
def kept_entries(
    terms: "Terms",
    sequence: "tl.tensor",
    heads: "tl.tensor",
    head: "tl.tensor",
    position: "tl.tensor",
    key_first: "tl.tensor",
    KEYS: tl.constexpr,
):
    """Which entries of a tile dropout keeps (see flashtile.dropout); head: that of every row.

    One Philox call serves four keys, but in a part of a larger problem, where they need not begin at one that
    four divides: there each key has its own.
    """
    seed = tl.load(terms.seed)
    if terms.part is None:
        block = key_first // 4 + tl.arange(0, KEYS // 4)[None, :]
        row, number = position[:, None], (sequence * heads + head)[:, None]
        word0, word1, word2, word3 = tl.philox(seed, block, row, number, tl.zeros_like(block))
        # Two joins make keys 4 n + (0, 1, 2, 3) neighbours.
        words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
        words = tl.reshape(words, (position.shape[0], KEYS))
    else:
        index = terms.part.key + key_first + tl.arange(0, KEYS)[None, :]
        row, turn = (terms.part.query + position)[:, None], index % 4
        number = (sequence * terms.part.heads + terms.part.head + head)[:, None]
        word0, word1, word2, word3 = tl.philox(seed, index // 4, row, number, tl.zeros_like(index))
        words = tl.where(turn == 0, word0, tl.where(turn == 1, word1, tl.where(turn == 2, word2, word3)))
    # Not threshold.to(): Triton makes a constant of an int that is 1.
    return words >= tl.cast(terms.threshold, tl.uint32)


@triton.jit
def online_softmax(
    scores: "tl.tensor",
    row_max: "tl.tensor",
    row_sum: "tl.tensor",
    factor: "tl.tensor",
    FOLDED: tl.constexpr,
):
    """One step of Algorithm 1: exponentials, the factor of what was summed, and the new maximum and sum.

    FOLDED: the scores are still to be multiplied by ``factor``, which is positive.
    """
    tile_max = tl.max(scores, 1)
    new_max = tl.maximum(row_max, tile_max * factor if FOLDED else tile_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf: nothing visible yet
    exponentials = tl.exp2((scores * factor if FOLDED else scores) - base[:, None])
    rescale = tl.exp2(row_max - base)
    return exponentials, rescale, new_max, row_sum * rescale + tl.sum(exponentials, 1)
