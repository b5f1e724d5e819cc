"""The rare path: a partly visible tile that holds NaN or infinity, computed number by number.

A product over the whole tile would multiply a hidden key's NaN by the probability 0 and poison every row.
"""

from __future__ import annotations

from numba import njit

from .call import VALUE, VALUE_DIM, field
from .rows import COUNT, tensor_at
from .scores import sees
from .simd import compute_size, is_pairs, peek, peek_int64, poke, read


@njit(inline="always")
def probability(kind, tile, width, key, lane):
    """One entry of a tile of probabilities, which pair kinds hold as pairs of keys."""
    if is_pairs(kind):
        return read(kind, tile + (key // 2 * width + lane) * 4 + 2 * (key % 2))
    return peek(kind, tile + (key * width + lane) * compute_size(kind))


@njit
def accumulate_exactly(kind, call, table, probabilities, out, batch, kv_head, first, keys, width):
    """O^T += V^T P^T over visible entries only."""
    size, step = compute_size(kind), field(call, VALUE + 4)
    for j in range(keys):
        value = tensor_at(call, VALUE, batch, kv_head, first + j)
        for lane in range(peek_int64(table + COUNT)):
            if sees(kind, call, table, lane, first + j):
                p = probability(kind, probabilities, width, j, lane)
                for d in range(field(call, VALUE_DIM)):
                    at = out + (d * width + lane) * size
                    poke(kind, at, peek(kind, at) + p * read(kind, value + d * step))
