"""The online softmax of few rows: a vector of scores holds two or four keys, so that fewer lanes idle.

Lane i belongs to row i modulo `width`, a half or a quarter of the lanes. Only for tiles that every row sees
in full, and whose scores need nothing of a key or a row: no mask, bias, slopes or dropout. A row gets the
bits it gets where it has a lane to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from .call import DROPOUT, SLOPES, field
from .exponential import exp2
from .kinds import I32, Kind, compute_size, lanes, vector_size
from .native import native
from .rows import FACTOR, ROW_MAX, ROW_SUM
from .scores import LOG2_E, hides_some, scale_scores, score_factor, whole_quads
from .simd import any_lane, load, maximum, poke, select, splat, store


@native
def narrow_width(kind: Kind, rows: int) -> int:
    """Lanes that a key takes: a quarter or a half of them, or all."""
    if 4 * rows <= lanes(kind):
        return lanes(kind) // 4
    return lanes(kind) // 2 if 2 * rows <= lanes(kind) else lanes(kind)


@native
def is_narrow(kind: Kind, call: int, table: int, start: int, keys: int, rows: int) -> bool:
    """Whether the keys [start, start + keys) may share vectors."""
    plain = field(call, SLOPES) == 0 and field(call, DROPOUT) == 0
    return narrow_width(kind, rows) < lanes(kind) and plain and not hides_some(call, table, start, keys)


@native
def narrow_softmax(kind: Kind, call: int, table: int, scores: int, keys: int, width: int) -> bool:
    """What `finish_scores` and `online_softmax` do, on a tile [key][width] of Q K^T."""
    row = width * compute_size(kind)
    end, quads = scores + keys * row, scores + whole_quads(keys) * row
    scale_scores(kind, call, scores, 0, keys * row)
    for at in range(end, quads, compute_size(kind)):
        poke(kind, at, -math.inf)
    largest = nothing = splat(kind, -math.inf)
    for at in range(scores, quads, vector_size(kind)):
        largest = maximum(load(kind, at), largest)
    old = _spread(kind, load(kind, table + ROW_MAX), width)
    new = maximum(old, _largest_of_rows(kind, largest, width))
    # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
    base, step = select(new == nothing, splat(kind, 0.0), new), splat(kind, score_factor(call) * LOG2_E)
    correction = select(new == old, splat(kind, 1.0), exp2(kind, (old - base) * step))
    total = splat(kind, 0.0)
    for at in range(scores, quads, 4 * row):
        total = total + _exponentials_of_quad(kind, at, base, step, width)
    before = _spread(kind, load(kind, table + ROW_SUM), width) * correction
    store(table + ROW_SUM, before + total)
    store(table + ROW_MAX, new)
    store(table + FACTOR, correction)
    return any_lane(new > old)


@native
def _exponentials_of_quad(kind: Kind, at: int, base: Any, step: Any, width: int) -> Any:
    """p = 2**((s - base) * step) for 4 keys; their sums, added in the order of `online_softmax`."""
    p = exp2(kind, (load(kind, at) - base) * step)
    store(at, p)
    if 4 * width == lanes(kind):
        pairs = p + _swap_quarters(kind, p)
        return pairs + _swap_halves(kind, pairs)
    after = at + vector_size(kind)
    q = exp2(kind, (load(kind, after) - base) * step)
    store(after, q)
    return (p + _swap_halves(kind, p)) + (q + _swap_halves(kind, q))


@native
def _largest_of_rows(kind: Kind, x: Any, width: int) -> Any:
    x = maximum(x, _swap_halves(kind, x))
    return maximum(x, _swap_quarters(kind, x)) if 4 * width == lanes(kind) else x


@native
def _spread(kind: Kind, x: Any, width: int) -> Any:
    """The first `width` lanes, again and again."""
    return _repeat_quarter(kind, x) if 4 * width == lanes(kind) else _repeat_half(kind, x)


def _shuffle(source: Callable[[int, int], int]) -> Any:
    """A vector whose lane i is lane source(i, lanes) of another."""

    @intrinsic
    def shuffled(tc: Any, kind: Any, x: Any) -> Any:
        n = kind.kind.lanes
        picked = ir.Constant(ir.VectorType(I32, n), [source(i, n) for i in range(n)])
        return x(kind, x), lambda ctx, b, sig, args: b.shuffle_vector(args[1], args[1], picked)

    return shuffled


_swap_halves, _swap_quarters = _shuffle(lambda i, n: i ^ n // 2), _shuffle(lambda i, n: i ^ n // 4)
_repeat_half, _repeat_quarter = _shuffle(lambda i, n: i % (n // 2)), _shuffle(lambda i, n: i % max(1, n // 4))
