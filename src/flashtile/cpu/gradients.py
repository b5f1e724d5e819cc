"""From P and dP to dS, and the gradients of bias and ALiBi slopes that dS carries."""

from __future__ import annotations

import math

from .call import (
    AT_BIAS,
    AT_GRAD_ROUNDED,
    AT_GRAD_SCORES,
    AT_ROUNDED,
    AT_SCORES,
    AT_SLOPE,
    DROPOUT,
    GRAD_BIAS,
    GRAD_SLOPES,
    GROUP,
    SOFTCAP,
    SPLITS,
    field,
)
from .exponential import exp2
from .kinds import Kind, compute_size, is_pairs, lanes, vector_size
from .native import native
from .rows import BATCH_HEAD, COUNT, GRAD_BIAS_ROW, ROW_DELTA, ROW_LSE, ROW_REST
from .scores import LOG2_E, alibi_distance, score_factor
from .simd import fma, load, peek, peek_int32, peek_int64, poke, select, splat, store
from .softmax import dropout_factors
from .tiles import add_block, pack_pairs, store_rounded


@native
def score_gradients(
    kind: Kind, call: int, scratch: int, table: int, first: int, keys: int, width: int
) -> None:
    """Scores become P after dropout, dP becomes dS = P (dP - delta), both in place; hidden entries are
    exactly 0.

    Keys go in groups of 4, the last one padded with -inf. Pair kinds get P rounded, [key][lane], beside it.
    """
    size, unit, nothing = compute_size(kind), splat(kind, score_factor(call)), splat(kind, -math.inf)
    row, scores, rounded = width * size, scratch + field(call, AT_SCORES), scratch + field(call, AT_ROUNDED)
    to_gradients = field(call, AT_GRAD_SCORES) - field(call, AT_SCORES)
    dropout, zero, one = field(call, DROPOUT) != 0, splat(kind, 0.0), splat(kind, 1.0)
    log2_e = splat(kind, LOG2_E)
    for lane in range(0, width, lanes(kind)):
        minus_lse = load(kind, table + ROW_LSE + lane * size)
        rest = load(kind, table + ROW_REST + lane * size)
        delta = load(kind, table + ROW_DELTA + lane * size)
        for j in range(0, keys, 4):
            factors = (one, one, one, one)
            if dropout:
                factors = dropout_factors(kind, call, table, lane, first + j)
            for i in range(4):
                at = scores + (j + i) * row + lane * size
                score = load(kind, at)
                # Hidden entries are 0 even where the row's LSE or delta is NaN.
                p = select(score == nothing, zero, exp2(kind, (fma(score, unit, minus_lse) - rest) * log2_e))
                dp = load(kind, at + to_gradients)
                kept = p
                if dropout:
                    kept, dp = p * factors[i], dp * factors[i]
                store(at + to_gradients, select(score == nothing, zero, p * (dp - delta)))
                store(at, kept)
                if is_pairs(kind):
                    store_rounded(kind, rounded + (j + i) * width * 2 + lane * 2, kept)


@native
def pass_gradients_on(
    kind: Kind, call: int, scratch: int, table: int, split: int, first: int, keys: int, width: int
) -> None:
    """Hands dS to the bias and the slopes, then through the softcap; pair kinds get it rounded in both
    layouts.
    """
    tile, row = scratch + field(call, AT_GRAD_SCORES), width * compute_size(kind)
    if field(call, GRAD_BIAS) != 0:
        _add_to_bias(kind, call, table, tile, first, keys, width)
    if field(call, GRAD_SLOPES) != 0:
        _add_to_slopes(kind, call, table, tile, scratch + field(call, AT_BIAS), split, first, keys, width)
    if field(call, SOFTCAP) != 0:
        slope = field(call, AT_SLOPE) - field(call, AT_GRAD_SCORES)
        for at in range(tile, tile + keys * row, vector_size(kind)):
            store(at, load(kind, at) * load(kind, at + slope))
    if is_pairs(kind):
        rounded = scratch + field(call, AT_GRAD_ROUNDED)
        for lane in range(0, width, lanes(kind)):
            for j in range(0, keys, 2):
                at = tile + j * row + lane * 4
                low, high = load(kind, at), load(kind, at + row)
                store_rounded(kind, rounded + j * width * 2 + lane * 2, low)
                store_rounded(kind, rounded + (j + 1) * width * 2 + lane * 2, high)
                store(tile + j // 2 * row + lane * 4, pack_pairs(kind, low, high))


@native
def _add_to_bias(kind: Kind, call: int, table: int, tile: int, first: int, keys: int, width: int) -> None:
    """dbias += dS. Lanes whose rows of the bias coincide are added one after the other."""
    size, step, rows = compute_size(kind), field(call, GRAD_BIAS + 4), peek_int64(table + COUNT)
    distinct = field(call, GRAD_BIAS + 3) != 0 and (
        field(call, GROUP) == 1 or field(call, GRAD_BIAS + 2) != 0
    )
    n, row = lanes(kind), width * size
    whole = keys // n * n if distinct and step == size else 0
    for lane in range(0, width, n):
        complete = whole if lane + n <= rows else 0
        for j in range(0, complete, n):
            add_block(
                kind, tile + j * row + lane * size, row, table + GRAD_BIAS_ROW + 8 * lane, (first + j) * step
            )
        for one in range(lane, min(lane + n, rows)):
            base = peek_int64(table + GRAD_BIAS_ROW + 8 * one) + first * step
            for j in range(complete, keys):
                gradient = peek(kind, tile + j * row + one * size)
                poke(kind, base + j * step, peek(kind, base + j * step) + gradient)


@native
def _add_to_slopes(
    kind: Kind, call: int, table: int, tile: int, spare: int, split: int, first: int, keys: int, width: int
) -> None:
    """dslope += sum of dS times the distance, per head and split (summed over splits afterwards)."""
    size, splits = compute_size(kind), field(call, SPLITS)
    for lane in range(0, width, lanes(kind)):
        total = splat(kind, 0.0)
        for j in range(keys):
            gradient = load(kind, tile + (j * width + lane) * size)
            total = fma(gradient, alibi_distance(kind, table, lane, first + j), total)
        store(spare, total)
        for one in range(lane, min(lane + lanes(kind), peek_int64(table + COUNT))):
            place = (peek_int32(table + BATCH_HEAD + 4 * one) * splits + split) * size + field(
                call, GRAD_SLOPES
            )
            poke(kind, place, peek(kind, place) + peek(kind, spare + (one - lane) * size))
