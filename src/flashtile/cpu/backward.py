"""Backward pass: FlashAttention-2, algorithm 2. P is recomputed from LSE; five products of one shape per
tile.

One task owns the dK and dV of one split of the keys and runs over all tiles of query rows. dQ of a row tile
collects from every split in order: a split waits until the one before it has passed the tile, so the bits do
not depend on the threads, and no atomics on floats are needed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .atomics import publish, wait_above
from .call import (
    AT_BIAS,
    AT_GRAD_KEY,
    AT_GRAD_OUT,
    AT_GRAD_OUT_ROWS,
    AT_GRAD_ROUNDED,
    AT_GRAD_SCORES,
    AT_GRAD_VALUE,
    AT_KEY,
    AT_KEY_COLUMNS,
    AT_QUERY,
    AT_QUERY_ROWS,
    AT_ROUNDED,
    AT_ROWS,
    AT_SCORES,
    AT_SLOPE,
    AT_VALUE,
    DELTA,
    GRAD_BIAS,
    GRAD_KEY,
    GRAD_OUT,
    GRAD_QUERY,
    GRAD_VALUE,
    GROUP,
    HEAD_DIM,
    KEY,
    KV_HEADS,
    LSE,
    LSE_REST,
    OUT,
    PROGRESS,
    QUERY,
    QUERY_LENGTH,
    SCALE,
    SCHEDULE,
    SPACE,
    SPLIT_KEYS,
    SPLITS,
    TASKS,
    TILE_KEYS,
    TILES,
    VALUE,
    VALUE_DIM,
    field,
    real_field,
)
from .exact import backward_exactly
from .gemm import COLUMNS, Operand, Packed, multiply
from .gradients import pass_gradients_on, score_gradients
from .kinds import Kind, compute_size, is_pairs, itemsize, lanes, vector_size
from .native import native
from .operands import all_finite, columns_operand, key_operand, lanes_finite
from .rows import (
    COUNT,
    FACTOR,
    GRAD_BIAS_ROW,
    GRAD_OUT_ROW,
    GRAD_QUERY_ROW,
    HIGH,
    LOW,
    QUERY_ROW,
    ROW_DELTA,
    ROW_LSE,
    ROW_REST,
    locate_rows,
    set_rows,
)
from .scores import finish_scores, hides_some, whole_quads
from .sequences import key_at, key_length, place_of, plane_at, query_at
from .simd import fma, load_stored, peek, peek_int64, poke, read, splat
from .stage import (
    fill,
    padded,
    stage_lanes,
    stage_query,
    unstage_natural,
    unstage_transposed,
)
from .tiles import sum_lanes


@native
def row_deltas(kind: Kind, call: int, scratch: int, task: int) -> None:
    """delta = rowsum(dO * O) of one head, packed sequences and all; the caller has put -dLSE there."""
    heads = field(call, KV_HEADS) * field(call, GROUP)
    batch, head = task // heads, task % heads
    for row in range(field(call, QUERY_LENGTH)):
        out, grad = plane_at(call, OUT, batch, head, row), plane_at(call, GRAD_OUT, batch, head, row)
        place = plane_at(call, DELTA, batch, head, row)
        poke(kind, place, peek(kind, place) + _dot(kind, call, out, grad))


@native
def _dot(kind: Kind, call: int, out: int, grad: int) -> float:
    count, out_step, grad_step = field(call, VALUE_DIM), field(call, OUT + 4), field(call, GRAD_OUT + 4)
    size, total = itemsize(kind), splat(kind, 0.0)
    whole = count // lanes(kind) * lanes(kind) if out_step == size and grad_step == size else 0
    for d in range(0, whole, lanes(kind)):
        total = fma(load_stored(kind, out + d * size), load_stored(kind, grad + d * size), total)
    result = sum_lanes(kind, total)
    for d in range(whole, count):
        result += read(kind, out + d * out_step) * read(kind, grad + d * grad_step)
    return result


@native
def backward(kind: Kind, call: int, scratch: int, task: int) -> None:
    """dK and dV of one split of keys, and its share of every dQ."""
    place = _place_of_split(call, task)
    batch, kv_head, split = place.batch, place.kv_head, place.split
    first = split * field(call, SPLIT_KEYS)
    keys = min(field(call, SPLIT_KEYS), key_length(call, batch) - first)
    key_row = padded(kind, field(call, HEAD_DIM)) * compute_size(kind)
    value_row = padded(kind, field(call, VALUE_DIM)) * compute_size(kind)
    grad_key, grad_value = scratch + field(call, AT_GRAD_KEY), scratch + field(call, AT_GRAD_VALUE)
    fill(kind, grad_key, key_row, keys, padded(kind, field(call, HEAD_DIM)), 0.0)
    fill(kind, grad_value, value_row, keys, padded(kind, field(call, VALUE_DIM)), 0.0)
    finite = all_finite(kind, call, KEY, batch, kv_head, first, keys, HEAD_DIM)
    finite = finite and all_finite(kind, call, VALUE, batch, kv_head, first, keys, VALUE_DIM)
    # Each operand form of K and V is staged once and serves every tile of rows.
    space = scratch + field(call, AT_KEY)
    k = key_operand(kind, call, scratch, KEY, batch, kv_head, first, keys, HEAD_DIM, space)
    space = scratch + field(call, AT_VALUE)
    v = key_operand(kind, call, scratch, VALUE, batch, kv_head, first, keys, VALUE_DIM, space)
    kt = Operand(k.address, k.step, k.row, keys)
    if is_pairs(kind):
        space = scratch + field(call, AT_KEY_COLUMNS)
        kt = columns_operand(kind, call, scratch, KEY, batch, kv_head, first, keys, HEAD_DIM, space)
    # Where sequences share a bias, shorter ones hand the turn on to those behind them for longer ones.
    turns = field(call, TILES) if _shares_bias(call) else place.tiles
    for tile in range(turns):
        _await_turn(kind, call, task, place, tile, turns)
        if tile < place.tiles:
            _tile_backward(kind, call, scratch, place, first, keys, tile, k, v, kt, finite)
        publish(field(call, PROGRESS) + 8 * task, tile + 1)
    target = key_at(call, GRAD_KEY, batch, kv_head, first)
    steps, scale = (field(call, GRAD_KEY + 3), field(call, GRAD_KEY + 4)), real_field(call, SCALE)
    unstage_natural(kind, grad_key, key_row, scale, target, steps[0], steps[1], keys, field(call, HEAD_DIM))
    target = key_at(call, GRAD_VALUE, batch, kv_head, first)
    steps = field(call, GRAD_VALUE + 3), field(call, GRAD_VALUE + 4)
    unstage_natural(
        kind, grad_value, value_row, 1.0, target, steps[0], steps[1], keys, field(call, VALUE_DIM)
    )


class _Place(NamedTuple):
    """The split of keys that a task owns."""

    batch: int
    kv_head: int
    split: int
    splits: int
    tiles: int
    first_tile: int  # of the head, among all tiles of dQ in SPACE
    same_head: int  # the task of the split before this one, -1 if there is none
    same_split: int  # the task of this head and split in the sequence before, -1 if there is none


@native
def _place_of_split(call: int, task: int) -> _Place:
    """Early splits, heaviest if causal, come first; with a schedule, those of each sequence."""
    heads, splits = field(call, KV_HEADS), field(call, SPLITS)
    if field(call, SCHEDULE) != 0:
        place = place_of(call, task, 0)
        split, kv_head = place.local // heads, place.local % heads
        first_tile = place.start + kv_head * place.tiles
        before = -1 if split == 0 else task - heads
        return _Place(
            place.batch, kv_head, split, place.splits, place.tiles, first_tile, before, place.before
        )
    parallel, tiles = field(call, TASKS) // splits, field(call, TILES)
    head, split = task % parallel, task // parallel
    before, other = -1 if split == 0 else task - parallel, -1 if head < heads else task - heads
    return _Place(head // heads, head % heads, split, splits, tiles, head * tiles, before, other)


@native
def _shares_bias(call: int) -> bool:
    """Whether the sequences of the batch add to the same gradient of the bias."""
    return field(call, GRAD_BIAS) != 0 and field(call, GRAD_BIAS + 1) == 0


@native
def _await_turn(kind: Kind, call: int, task: int, place: _Place, tile: int, turns: int) -> None:
    """Waits for whoever adds to the same dQ tile, or to the same rows of a shared bias, before this task."""
    progress = field(call, PROGRESS)
    if place.same_head >= 0:
        wait_above(progress + 8 * place.same_head, tile)
    if field(call, GRAD_BIAS) == 0:
        return
    before, last, over_heads = -1, tile, field(call, GRAD_BIAS + 2) == 0
    if over_heads and place.kv_head > 0:
        before = task - 1
    elif _shares_bias(call):
        before = place.same_split
        if before >= 0 and over_heads:
            before += field(call, KV_HEADS) - 1
    if over_heads:
        # The heads of a group share a row, and a tile may end between them: who was before must have left all
        # the tiles that hold this tile's last query.
        group, width = field(call, GROUP), COLUMNS * lanes(kind)
        last_query = ((tile + 1) * width - 1) // group
        last = min(turns - 1, ((last_query + 1) * group - 1) // width)
    if before >= 0:
        wait_above(progress + 8 * before, last)


@native
def _tile_backward(
    kind: Kind,
    call: int,
    scratch: int,
    place: _Place,
    first: int,
    keys: int,
    tile: int,
    k: Operand,
    v: Operand,
    kt: Operand,
    finite: bool,
) -> None:
    """One tile of rows against one split of keys."""
    width, size = COLUMNS * lanes(kind), compute_size(kind)
    start, row, head_dim = tile * width, width * size, field(call, HEAD_DIM)
    table, batch, kv_head, split = scratch + field(call, AT_ROWS), place.batch, place.kv_head, place.split
    set_rows(kind, call, table, batch, kv_head, start, width, True)
    grad_query = field(call, SPACE) + (place.first_tile + tile) * head_dim * row
    if split == 0:
        fill(kind, grad_query, row, head_dim, width, 0.0)
    # Whole groups of 4 keys: a pair is never half inside the range.
    low, high = (
        max(first, peek_int64(table + LOW)),
        min(first + keys, (peek_int64(table + HIGH) + 3) // 4 * 4),
    )
    if low < high:
        _load_rows(kind, call, scratch, table, batch, kv_head, start, width)
        step = field(call, TILE_KEYS)
        for at in range(first + (low - first) // step * step, high, step):
            _keys_backward(
                kind,
                call,
                scratch,
                batch,
                kv_head,
                split,
                at,
                at - first,
                min(step, high - at),
                grad_query,
                k,
                v,
                kt,
                finite,
            )
    if split == place.splits - 1:
        _store_grad_query(kind, call, table, grad_query, batch, kv_head, start, width)


@native
def _store_grad_query(
    kind: Kind, call: int, table: int, grad_query: int, batch: int, kv_head: int, start: int, width: int
) -> None:
    """dQ of the tile, complete once the last split has added its share."""
    row, step, head_dim = width * compute_size(kind), field(call, GRAD_QUERY + 4), field(call, HEAD_DIM)
    locate_rows(call, table, GRAD_QUERY, GRAD_QUERY_ROW, batch, kv_head, start, width)
    fill(kind, table + FACTOR, row, 1, width, real_field(call, SCALE))
    factors, targets, rows = table + FACTOR, table + GRAD_QUERY_ROW, peek_int64(table + COUNT)
    unstage_transposed(kind, grad_query, row, factors, targets, step, head_dim, rows, width)


@native
def _load_rows(
    kind: Kind, call: int, scratch: int, table: int, batch: int, kv_head: int, start: int, width: int
) -> None:
    """Q and dO of the tile, transposed and as rows; LSE and delta per lane."""
    size, count, group = compute_size(kind), peek_int64(table + COUNT), field(call, GROUP)
    row, head_dim, value_dim = width * size, field(call, HEAD_DIM), field(call, VALUE_DIM)
    locate_rows(call, table, QUERY, QUERY_ROW, batch, kv_head, start, width)
    locate_rows(call, table, GRAD_OUT, GRAD_OUT_ROW, batch, kv_head, start, width)
    locate_rows(call, table, GRAD_BIAS, GRAD_BIAS_ROW, batch, kv_head, start, width)
    query, grad_out = table + QUERY_ROW, table + GRAD_OUT_ROW
    query_step, grad_step = field(call, QUERY + 4), field(call, GRAD_OUT + 4)
    stage_query(kind, query, query_step, head_dim, scratch + field(call, AT_QUERY), row, width)
    stage_query(kind, grad_out, grad_step, value_dim, scratch + field(call, AT_GRAD_OUT), row, width)
    target, target_row = scratch + field(call, AT_QUERY_ROWS), padded(kind, head_dim) * size
    stage_lanes(kind, query, query_step, count, head_dim, target, target_row, width)
    target, target_row = scratch + field(call, AT_GRAD_OUT_ROWS), padded(kind, value_dim) * size
    stage_lanes(kind, grad_out, grad_step, count, value_dim, target, target_row, width)
    for lane in range(width):
        lse, rest, delta = -math.inf, 0.0, 0.0
        if lane < count:
            head, query_index = kv_head * group + (start + lane) % group, (start + lane) // group
            lse = peek(kind, query_at(call, LSE, batch, head, query_index))
            delta = peek(kind, query_at(call, DELTA, batch, head, query_index))
            if field(call, LSE_REST) != 0:
                rest = peek(kind, query_at(call, LSE_REST, batch, head, query_index))
        # A row that sees nothing has only -inf scores; 0 in place of its LSE keeps their exponentials at 0.
        poke(kind, table + ROW_LSE + lane * size, 0.0 if lse == -math.inf else -lse)
        poke(kind, table + ROW_REST + lane * size, rest)
        poke(kind, table + ROW_DELTA + lane * size, delta)


@native
def _keys_backward(
    kind: Kind,
    call: int,
    scratch: int,
    batch: int,
    kv_head: int,
    split: int,
    first: int,
    inside: int,
    keys: int,
    grad_query: int,
    k: Operand,
    v: Operand,
    kt: Operand,
    finite: bool,
) -> None:
    """The five products for keys [first, first + keys), which start `inside` the split."""
    width, size = COLUMNS * lanes(kind), compute_size(kind)
    row, table = width * size, scratch + field(call, AT_ROWS)
    k_here = Operand(k.address + inside * k.row, k.row, k.step, k.depth)
    v_here = Operand(v.address + inside * v.row, v.row, v.step, v.depth)
    scores, grad_scores = scratch + field(call, AT_SCORES), scratch + field(call, AT_GRAD_SCORES)
    query, grad_out = scratch + field(call, AT_QUERY), scratch + field(call, AT_GRAD_OUT)
    multiply(kind, k_here, Packed(query, row), Packed(scores, row), keys, COLUMNS, False)
    multiply(kind, v_here, Packed(grad_out, row), Packed(grad_scores, row), keys, COLUMNS, False)
    slope, spare = scratch + field(call, AT_SLOPE), scratch + field(call, AT_BIAS)
    finish_scores(kind, call, table, scores, slope, spare, first, keys, width)
    fill(kind, grad_scores + keys * row, row, whole_quads(keys) - keys, width, 0.0)
    score_gradients(kind, call, scratch, table, first, keys, width)
    pass_gradients_on(kind, call, scratch, table, split, first, keys, width)
    if hides_some(call, table, first, keys) and not (finite and lanes_finite(kind, call, table)):
        backward_exactly(kind, call, scratch, batch, kv_head, first, inside, keys, grad_query, width)
        return
    _multiply_gradients(kind, call, scratch, inside, keys, grad_query, kt, width)


@native
def _multiply_gradients(
    kind: Kind, call: int, scratch: int, inside: int, keys: int, grad_query: int, kt: Operand, width: int
) -> None:
    """dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T."""
    size, head_dim, value_dim = compute_size(kind), field(call, HEAD_DIM), field(call, VALUE_DIM)
    row, key_row, value_row = width * size, padded(kind, head_dim) * size, padded(kind, value_dim) * size
    ds_columns = Packed(scratch + field(call, AT_GRAD_SCORES), row)
    p = Operand(scratch + field(call, AT_SCORES), row, size, width)
    ds = Operand(scratch + field(call, AT_GRAD_SCORES), row, size, width)
    kt_here = Operand(kt.address + inside * kt.step, kt.row, kt.step, keys)
    if is_pairs(kind):
        p = Operand(scratch + field(call, AT_ROUNDED), 2 * width, 4, width // 2)
        ds = Operand(scratch + field(call, AT_GRAD_ROUNDED), 2 * width, 4, width // 2)
        kt_here = Operand(kt.address + inside // 2 * kt.step, kt.row, kt.step, (keys + 1) // 2)
    rows = Packed(scratch + field(call, AT_GRAD_OUT_ROWS), value_row)
    target = Packed(scratch + field(call, AT_GRAD_VALUE) + inside * value_row, value_row)
    multiply(kind, p, rows, target, keys, value_row // vector_size(kind), True)
    rows = Packed(scratch + field(call, AT_QUERY_ROWS), key_row)
    target = Packed(scratch + field(call, AT_GRAD_KEY) + inside * key_row, key_row)
    multiply(kind, ds, rows, target, keys, key_row // vector_size(kind), True)
    multiply(kind, kt_here, ds_columns, Packed(grad_query, row), head_dim, COLUMNS, True)
