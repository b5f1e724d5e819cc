"""Online softmax over one tile of scores: maximum, exponentials, sums, all vertical (one row per lane).

FlashAttention-2, section 3.1: the output stays unnormalised and is rescaled only when a maximum moves.
"""

from __future__ import annotations

import math
from typing import Any

from .call import (
    DROPOUT,
    DROPOUT_THRESHOLD,
    KEEP_SCALE,
    PART_KEY,
    SEED_HIGH,
    SEED_LOW,
    field,
    real_field,
)
from .exponential import exp2
from .kinds import Kind, compute_size, is_pairs, lanes, vector_size
from .native import native
from .philox import keep_factors
from .rows import DRAW_HEAD, DRAW_QUERY, FACTOR, ROW_MAX, ROW_SUM
from .scores import LOG2_E
from .simd import any_lane, load, load_int, maximum, select, splat, store
from .tiles import pack_pairs


@native
def dropout_factors(kind: Kind, call: int, table: int, lane: int, key: int) -> Any:
    """The keep factors of keys key .. key + 3 for one vector of rows."""
    position = field(call, PART_KEY) + key
    quad, shift = position // 4, position % 4
    a, b, c, d = _factors_of_quad(kind, call, table, lane, quad)
    if shift == 0:
        return a, b, c, d
    e, f, g, _ = _factors_of_quad(kind, call, table, lane, quad + 1)
    if shift == 1:
        return b, c, d, e
    if shift == 2:
        return c, d, e, f
    return d, e, f, g


@native
def _factors_of_quad(kind: Kind, call: int, table: int, lane: int, quad: int) -> Any:
    return keep_factors(
        kind,
        field(call, SEED_LOW),
        field(call, SEED_HIGH),
        load_int(kind, table + DRAW_QUERY + 4 * lane),
        load_int(kind, table + DRAW_HEAD + 4 * lane),
        quad,
        field(call, DROPOUT_THRESHOLD),
        real_field(call, KEEP_SCALE),
    )


@native
def online_softmax(
    kind: Kind, call: int, table: int, scores: int, factor: float, start: int, keys: int, width: int
) -> bool:
    """Scores become unnormalised probabilities, in place (pairs of keys for pair kinds), after dropout.

    Keys go in groups of 4, the last one padded with -inf. Row maxima (in units of the tile) and sums
    follow; FACTOR receives what the output must be multiplied by. Returns whether any maximum moved.
    """
    size, moved, step = compute_size(kind), False, splat(kind, factor * LOG2_E)
    row, zero, nothing = width * size, splat(kind, 0.0), splat(kind, -math.inf)
    for lane in range(0, width, lanes(kind)):
        at = scores + lane * size
        largest = nothing
        for j in range(0, keys, 4):
            here = at + j * row
            low = maximum(load(kind, here), load(kind, here + row))
            high = maximum(load(kind, here + 2 * row), load(kind, here + 3 * row))
            largest = maximum(largest, maximum(low, high))
        old = load(kind, table + ROW_MAX + lane * size)
        new = maximum(old, largest)
        # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
        base = select(new == nothing, zero, new)
        correction = select(new == old, splat(kind, 1.0), exp2(kind, (old - base) * step))
        total = load(kind, table + ROW_SUM + lane * size) * correction
        total = total + _exponentials(kind, call, table, at, row, base, step, lane, start, keys)
        store(table + ROW_MAX + lane * size, new)
        store(table + ROW_SUM + lane * size, total)
        store(table + FACTOR + lane * size, correction)
        moved = moved or any_lane(new > old)
    return moved


@native
def _exponentials(
    kind: Kind,
    call: int,
    table: int,
    at: int,
    row: int,
    base: Any,
    step: Any,
    lane: int,
    start: int,
    keys: int,
) -> Any:
    """p = 2**((s - base) * step) for one column of vectors; the sum before dropout is returned."""
    dropout, total = field(call, DROPOUT) != 0, splat(kind, 0.0)
    for j in range(0, keys, 4):
        here = at + j * row
        p0 = exp2(kind, (load(kind, here) - base) * step)
        p1 = exp2(kind, (load(kind, here + row) - base) * step)
        p2 = exp2(kind, (load(kind, here + 2 * row) - base) * step)
        p3 = exp2(kind, (load(kind, here + 3 * row) - base) * step)
        total = total + ((p0 + p1) + (p2 + p3))
        if dropout:
            z0, z1, z2, z3 = dropout_factors(kind, call, table, lane, start + j)
            p0, p1, p2, p3 = p0 * z0, p1 * z1, p2 * z2, p3 * z3
        if is_pairs(kind):
            store(at + j // 2 * row, pack_pairs(kind, p0, p1))
            store(at + (j // 2 + 1) * row, pack_pairs(kind, p2, p3))
        else:
            store(here, p0)
            store(here + row, p1)
            store(here + 2 * row, p2)
            store(here + 3 * row, p3)
    return total


@native
def rescale(kind: Kind, tile: int, rows: int, width: int, factors: int) -> None:
    """tile[row][lane] *= factors[lane]."""
    row = width * compute_size(kind)
    for lane in range(0, row, vector_size(kind)):
        factor = load(kind, factors + lane)
        for at in range(tile + lane, tile + lane + rows * row, row):
            store(at, load(kind, at) * factor)
