"""From Q K^T to attention scores: softcap, bias, ALiBi and the masks, each a pass over the tile that uses it.

A tile of scores is [key][lane], in natural units once any option but a mask applies.
"""

from __future__ import annotations

import math
from typing import Any

from .call import (
    BIAS,
    MASK,
    SCALE,
    SLOPES,
    SOFTCAP,
    field,
    real_field,
)
from .exponential import tanh
from .kinds import Kind, compute_size, lanes, mask_kind, vector_size
from .native import native
from .rows import (
    BIAS_ROW,
    DIAGONAL,
    FIRST_KEY,
    FULL_HIGH,
    FULL_LOW,
    INDEX,
    LAST_KEY,
    MASK_ROW,
    SLOPE,
)
from .simd import (
    absolute,
    fma,
    load,
    load_int,
    peek_int32,
    peek_int64,
    read,
    select,
    splat,
    splat_int,
    store,
    to_float,
)
from .stage import fill, stage_transposed

LOG2_E = 1.4426950408889634


@native
def score_factor(call: int) -> float:
    """What turns a tile's scores into natural units."""
    return 1.0 if _scaled_first(call) else real_field(call, SCALE)


@native
def _scaled_first(call: int) -> bool:
    """Whether the tile itself is scaled: options need natural units; maxima and sinks, a scale above 0."""
    options = field(call, SOFTCAP) != 0 or field(call, BIAS) != 0 or field(call, SLOPES) != 0
    return options or real_field(call, SCALE) < 1e-6


@native
def finish_scores(
    kind: Kind, call: int, table: int, scores: int, slope: int, spare: int, start: int, keys: int, width: int
) -> None:
    """Applies every option to the tile of Q K^T for keys [start, start + keys).

    Rows behind the last key, up to a multiple of 4, become -inf. `slope` (0 = not wanted) receives the
    derivative of the softcap; `spare` is a tile for staged bias and mask.
    """
    scale_scores(kind, call, scores, slope, keys * width * compute_size(kind))
    if field(call, SLOPES) != 0:
        _add_alibi(kind, call, table, scores, start, keys, width)
    if field(call, BIAS) != 0:
        _add_bias(kind, call, table, scores, spare, start, keys, width)
    if field(call, MASK) != 0:
        _apply_mask(kind, call, table, scores, spare, start, keys, width)
    if not is_full(table, start, keys):
        _apply_intervals(kind, table, scores, start, keys, width)
    row = width * compute_size(kind)
    fill(kind, scores + keys * row, row, whole_quads(keys) - keys, width, -math.inf)


@native
def whole_quads(keys: int) -> int:
    """keys rounded up to groups of 4, as dropout and pairs of keys take them."""
    return (keys + 3) // 4 * 4


@native
def hides_some(call: int, table: int, start: int, keys: int) -> bool:
    """Whether some lane may not see some key of the tile."""
    return field(call, MASK) != 0 or field(call, BIAS) != 0 or not is_full(table, start, keys)


@native
def is_full(table: int, start: int, keys: int) -> bool:
    """Whether every lane sees every key of the tile."""
    return start >= peek_int64(table + FULL_LOW) and start + keys <= peek_int64(table + FULL_HIGH)


@native
def scale_scores(kind: Kind, call: int, scores: int, slope: int, size: int) -> None:
    """Softcap, or the scale where the tile itself is scaled, on so many bytes of Q K^T."""
    scale = real_field(call, SCALE)
    if field(call, SOFTCAP) != 0:
        _apply_softcap(kind, scores, slope, size, scale, real_field(call, SOFTCAP))
    elif _scaled_first(call):
        for at in range(scores, scores + size, vector_size(kind)):
            store(at, load(kind, at) * splat(kind, scale))


@native
def _apply_softcap(kind: Kind, scores: int, slope: int, size: int, scale: float, softcap: float) -> None:
    one = splat(kind, 1.0)
    for shift in range(0, size, vector_size(kind)):
        capped = tanh(kind, load(kind, scores + shift) * splat(kind, scale / softcap))
        store(scores + shift, capped * splat(kind, softcap))
        if slope != 0:
            store(slope + shift, one - capped * capped)


@native
def _add_bias(
    kind: Kind, call: int, table: int, scores: int, spare: int, start: int, keys: int, width: int
) -> None:
    step, row = field(call, BIAS + 4), width * compute_size(kind)
    stage_transposed(kind, table + BIAS_ROW, start * step, step, keys, spare, row, width)
    hidden = splat(kind, -math.inf)
    for shift in range(0, keys * row, vector_size(kind)):
        bias = load(kind, spare + shift)
        # -inf hides whatever the score is, NaN too.
        store(scores + shift, select(bias == hidden, hidden, load(kind, scores + shift) + bias))


@native
def alibi_distance(kind: Kind, table: int, lane: int, key: int) -> Any:
    """-|i + Sk - Sq - j| per lane."""
    diagonal = splat_int(kind, key - peek_int64(table + DIAGONAL))
    distance = to_float(kind, load_int(kind, table + INDEX + 4 * lane) - diagonal)
    return splat(kind, 0.0) - absolute(distance)


@native
def _add_alibi(kind: Kind, call: int, table: int, scores: int, start: int, keys: int, width: int) -> None:
    size = compute_size(kind)
    for lane in range(0, width, lanes(kind)):
        slope = load(kind, table + SLOPE + lane * size)
        for j in range(keys):
            at = scores + (j * width + lane) * size
            store(at, fma(slope, alibi_distance(kind, table, lane, start + j), load(kind, at)))


@native
def _apply_mask(
    kind: Kind, call: int, table: int, scores: int, spare: int, start: int, keys: int, width: int
) -> None:
    step, row = field(call, MASK + 4), width * compute_size(kind)
    stage_transposed(mask_kind(kind), table + MASK_ROW, start * step, step, keys, spare, row, width)
    zero, hidden = splat(kind, 0.0), splat(kind, -math.inf)
    for shift in range(0, keys * row, vector_size(kind)):
        attend = load(kind, spare + shift) > zero
        store(scores + shift, select(attend, load(kind, scores + shift), hidden))


@native
def _apply_intervals(kind: Kind, table: int, scores: int, start: int, keys: int, width: int) -> None:
    hidden = splat(kind, -math.inf)
    for lane in range(0, width, lanes(kind)):
        first = load_int(kind, table + FIRST_KEY + 4 * lane)
        last = load_int(kind, table + LAST_KEY + 4 * lane)
        for j in range(keys):
            at = scores + (j * width + lane) * compute_size(kind)
            key = splat_int(kind, start + j)
            store(at, select((key >= first) & (key < last), load(kind, at), hidden))


@native
def sees(kind: Kind, call: int, table: int, lane: int, key: int) -> bool:
    """Whether one row may see one key: the scalar twin of the masks above, for the rare exact path."""
    if key < peek_int32(table + FIRST_KEY + 4 * lane) or key >= peek_int32(table + LAST_KEY + 4 * lane):
        return False
    if field(call, MASK) != 0:
        mask = mask_kind(kind)
        if read(mask, peek_int64(table + MASK_ROW + 8 * lane) + key * field(call, MASK + 4)) == 0.0:
            return False
    if field(call, BIAS) != 0:
        return read(kind, peek_int64(table + BIAS_ROW + 8 * lane) + key * field(call, BIAS + 4)) != -math.inf
    return True
