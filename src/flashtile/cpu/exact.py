"""The rare path: a partly visible tile that holds NaN or infinity, computed number by number.

A product over the whole tile would multiply a hidden key's NaN by the probability 0 and poison every row.
"""

from __future__ import annotations

from .call import (
    AT_GRAD_KEY,
    AT_GRAD_ROUNDED,
    AT_GRAD_SCORES,
    AT_GRAD_VALUE,
    AT_ROUNDED,
    AT_ROWS,
    AT_SCORES,
    GRAD_OUT,
    HEAD_DIM,
    KEY,
    QUERY,
    VALUE,
    VALUE_DIM,
    field,
)
from .kinds import Kind, compute_size, is_pairs
from .native import native
from .rows import COUNT, GRAD_OUT_ROW, QUERY_ROW
from .scores import sees
from .sequences import key_at
from .simd import peek, peek_int64, poke, read
from .stage import padded


@native
def probability(kind: Kind, tile: int, width: int, key: int, lane: int) -> float:
    """One entry of a tile of probabilities, which pair kinds hold as pairs of keys."""
    if is_pairs(kind):
        return read(kind, tile + (key // 2 * width + lane) * 4 + 2 * (key % 2))
    return peek(kind, tile + (key * width + lane) * compute_size(kind))


@native
def accumulate_exactly(
    kind: Kind,
    call: int,
    table: int,
    probabilities: int,
    width: int,
    out: int,
    lane_step: int,
    out_step: int,
    batch: int,
    kv_head: int,
    first: int,
    keys: int,
) -> None:
    """O += P V over visible entries only; steps in bytes from lane to lane and from number to number of O."""
    step = field(call, VALUE + 4)
    for j in range(keys):
        value = key_at(call, VALUE, batch, kv_head, first + j)
        for lane in range(peek_int64(table + COUNT)):
            if sees(kind, call, table, lane, first + j):
                p = probability(kind, probabilities, width, j, lane)
                for d in range(field(call, VALUE_DIM)):
                    at = out + lane * lane_step + d * out_step
                    poke(kind, at, peek(kind, at) + p * read(kind, value + d * step))


@native
def _rounded(kind: Kind, tile: int, width: int, key: int, lane: int) -> float:
    """One entry of P or dS as the products of the backward pass read it."""
    if is_pairs(kind):
        return read(kind, tile + (key * width + lane) * 2)
    return peek(kind, tile + (key * width + lane) * compute_size(kind))


@native
def backward_exactly(
    kind: Kind,
    call: int,
    scratch: int,
    batch: int,
    kv_head: int,
    first: int,
    inside: int,
    keys: int,
    grad_query: int,
    width: int,
) -> None:
    """dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T over visible entries only."""
    size, table = compute_size(kind), scratch + field(call, AT_ROWS)
    head_dim, value_dim = field(call, HEAD_DIM), field(call, VALUE_DIM)
    p_tile = scratch + field(call, AT_ROUNDED if is_pairs(kind) else AT_SCORES)
    ds_tile = scratch + field(call, AT_GRAD_ROUNDED if is_pairs(kind) else AT_GRAD_SCORES)
    for j in range(keys):
        key = key_at(call, KEY, batch, kv_head, first + j)
        grad_key = scratch + field(call, AT_GRAD_KEY) + (inside + j) * padded(kind, head_dim) * size
        grad_value = scratch + field(call, AT_GRAD_VALUE) + (inside + j) * padded(kind, value_dim) * size
        for lane in range(peek_int64(table + COUNT)):
            if not sees(kind, call, table, lane, first + j):
                continue
            p, ds = _rounded(kind, p_tile, width, j, lane), _rounded(kind, ds_tile, width, j, lane)
            query, grad_out = (
                peek_int64(table + QUERY_ROW + 8 * lane),
                peek_int64(table + GRAD_OUT_ROW + 8 * lane),
            )
            for d in range(value_dim):
                at = grad_value + d * size
                poke(kind, at, peek(kind, at) + p * read(kind, grad_out + d * field(call, GRAD_OUT + 4)))
            for d in range(head_dim):
                at = grad_key + d * size
                poke(kind, at, peek(kind, at) + ds * read(kind, query + d * field(call, QUERY + 4)))
                at = grad_query + (d * width + lane) * size
                poke(kind, at, peek(kind, at) + ds * read(kind, key + d * field(call, KEY + 4)))
