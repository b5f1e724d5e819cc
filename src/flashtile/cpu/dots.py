"""Products for few query rows, where memory is the limit: K and V are read once, in whole vectors along
head_dim.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kinds import (
    I32,
    I64,
    Kind,
    compute_size,
    itemsize,
    lanes,
    native,
    register_bytes,
    vector_size,
)
from .llvm import (
    const,
    dot_pairs_value,
    fma_value,
    offset,
    pointer,
    splat_value,
    widen_value,
)
from .simd import peek, peek_int64, poke, prefetch, store
from .tiles import sum_lanes, tile_operations


def _load_operand(b: ir.IRBuilder, kind: Kind, address: ir.Value) -> ir.Value:
    """One register of stored numbers: widened, or raw pairs for dot products of pairs."""
    if kind.pairs:
        return b.load(pointer(b, address, ir.VectorType(ir.FloatType(), kind.lanes)), align=2)
    return widen_value(b, kind, address, kind.lanes)


def _dot_step(rows: int) -> Any:
    """Accumulators += K * Q for lanes / rows keys and `rows` query rows, one register of each at a time."""

    @intrinsic
    def step(tc: Any, kind: Any, sums: Any, key: Any, key_row: Any, query: Any, query_row: Any) -> Any:
        k = kind.kind

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _, sums_value, key_value, key_row_value, query_value, query_row_value = args
            if k.lanes < rows:  # unreachable in such a kernel, yet it must compile
                return sums_value
            queries = [_load_operand(b, k, offset(b, query_value, r, query_row_value)) for r in range(rows)]
            result = []
            for i in range(k.lanes // rows):
                one = _load_operand(b, k, offset(b, key_value, i, key_row_value))
                for r in range(rows):
                    old = b.extract_value(sums_value, i * rows + r)
                    new = (
                        dot_pairs_value(b, old, one, queries[r])
                        if k.pairs
                        else fma_value(b, kind.vector, one, queries[r], old)
                    )
                    result.append(new)
            return cgutils.pack_array(b, result)

        tile = types.UniTuple(kind.vector, k.lanes)
        return tile(kind, tile, *[types.int64] * 4), gen

    return step


_dot_1, _dot_2, _dot_4 = (_dot_step(rows) for rows in (1, 2, 4))


@intrinsic
def _no_sums(tc: Any, kind: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return cgutils.pack_array(b, [const(kind.vector, 0.0)] * kind.kind.lanes)

    return types.UniTuple(kind.vector, kind.kind.lanes)(kind), gen


@intrinsic
def _sum_each(tc: Any, kind: Any, sums: Any) -> Any:
    """Lane i = the sum over the lanes of vector i; each of log2(lanes) rounds halves the vectors."""
    n = kind.kind.lanes

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vectors, step = [b.extract_value(args[1], i) for i in range(n)], 1
        mask = ir.VectorType(I32, n)
        while step < n:
            # Runs of `step` lanes, alternately from two vectors: first the even runs of each, then the odd
            # ones.
            even = [(lane & ~step) + (n if lane & step else 0) for lane in range(n)]
            odd = [x + step for x in even]
            vectors = [
                b.fadd(
                    b.shuffle_vector(x, y, ir.Constant(mask, even)),
                    b.shuffle_vector(x, y, ir.Constant(mask, odd)),
                )
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            step *= 2
        return vectors[0]

    return kind.vector(kind, types.UniTuple(kind.vector, n)), gen


def _make_dots(rows: int, dot: Any) -> Any:
    @native
    def dots(
        kind: Kind,
        key: int,
        key_row: int,
        query: int,
        query_row: int,
        length: int,
        scores: int,
        score_row: int,
        spare: int,
    ) -> None:
        """Scores of lanes / rows keys and `rows` query rows; length = bytes of one row, whole registers."""
        sums = _no_sums(kind)
        for at in range(0, length, register_bytes(kind)):
            sums = dot(kind, sums, key + at, key_row, query + at, query_row)
        store(spare, _sum_each(kind, sums))
        size = compute_size(kind)
        for i in range(lanes(kind) // rows):
            for r in range(rows):
                poke(kind, scores + i * score_row + r * size, peek(kind, spare + (i * rows + r) * size))

    return dots


_dots_1, _dots_2, _dots_4 = (_make_dots(rows, dot) for rows, dot in ((1, _dot_1), (2, _dot_2), (4, _dot_4)))


@native
def score_rows(
    kind: Kind,
    key: int,
    key_row: int,
    query: int,
    query_row: int,
    length: int,
    keys: int,
    rows: int,
    scores: int,
    score_row: int,
    spare: int,
    ahead: int,
    ahead_bytes: int,
) -> None:
    """scores[key][row] = K Q^T for few rows: blocks of 4, 2 and 1 rows, as many keys as registers allow.

    Meanwhile `ahead_bytes` of each row whose address is in `ahead`, the values of the same keys, are on their
    way from memory.
    """
    row, size = 0, compute_size(kind)
    while row < rows:
        block = 4 if rows - row >= 4 and lanes(kind) >= 4 else 2 if rows - row >= 2 else 1
        per, queries, target = lanes(kind) // block, query + row * query_row, scores + row * size
        first = 0
        while first < keys:
            # The last block overlaps the one before it; where there is none, keys go one by one.
            if keys >= per:
                first = min(first, keys - per)
                source, to = key + first * key_row, target + first * score_row
                if row == 0:
                    for i in range(first, first + per):
                        prefetch(peek_int64(ahead + 8 * i), ahead_bytes)
                if block == 4:
                    _dots_4(kind, source, key_row, queries, query_row, length, to, score_row, spare)
                elif block == 2:
                    _dots_2(kind, source, key_row, queries, query_row, length, to, score_row, spare)
                else:
                    _dots_1(kind, source, key_row, queries, query_row, length, to, score_row, spare)
                first += per
            else:
                for r in range(block):
                    place = target + first * score_row + r * size
                    poke(kind, place, _dot(kind, key + first * key_row, queries + r * query_row, length))
                first += 1
        row += block


@native
def _dot(kind: Kind, key: int, query: int, length: int) -> float:
    sums = _no_sums(kind)
    for at in range(0, length, register_bytes(kind)):
        sums = _dot_1(kind, sums, key + at, 0, query + at, 0)
    return sum_lanes(kind, sums[0])


def _make_weigh(rows: int, columns: int) -> Any:
    """O[rows][columns vectors] += P[key, row] * V[key], V read in its own dtype."""

    @intrinsic
    def step(tc: Any, kind: Any, tile: Any, weights: Any, value: Any) -> Any:
        k, vector = kind.kind, kind.vector

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _, tile_value, weight_value, value_value = args
            scalar = vector.llvm.element
            values = [
                widen_value(b, k, b.add(value_value, ir.Constant(I64, c * k.lanes * k.itemsize)), k.lanes)
                for c in range(columns)
            ]
            result = []
            for r in range(rows):
                place = b.add(weight_value, ir.Constant(I64, r * k.compute_size))
                weight = splat_value(b, b.load(pointer(b, place, scalar), align=4), k.lanes)
                for c in range(columns):
                    result.append(
                        fma_value(b, vector, weight, values[c], b.extract_value(tile_value, r * columns + c))
                    )
            return cgutils.pack_array(b, result)

        t = types.UniTuple(vector, rows * columns)
        return t(kind, t, types.int64, types.int64), gen

    zeros, add_tile, _, _ = tile_operations(rows, columns)

    @native
    def weigh(
        kind: Kind,
        weights: int,
        weight_row: int,
        values: int,
        shift: int,
        keys: int,
        out: int,
        out_row: int,
        ahead: int,
        ahead_bytes: int,
    ) -> None:
        tile = zeros(kind)
        for j in range(keys):
            prefetch(peek_int64(ahead + 8 * j), ahead_bytes)
            tile = step(kind, tile, weights + j * weight_row, peek_int64(values + 8 * j) + shift)
        add_tile(kind, tile, out, out_row)

    return weigh


_weigh_4_4, _weigh_4_1, _weigh_1_4, _weigh_1_1 = (
    _make_weigh(r, c) for r, c in ((4, 4), (4, 1), (1, 4), (1, 1))
)


@native
def weigh_rows(
    kind: Kind,
    weights: int,
    weight_row: int,
    values: int,
    keys: int,
    rows: int,
    vectors: int,
    out: int,
    out_row: int,
    ahead: int,
    ahead_bytes: int,
) -> None:
    """O[row][d] += sum over keys of P[key][row] V[key][d]; V in whole vectors of its own dtype.

    `values` holds the address of every row of V, so that its bits do not depend on where the rows lie.
    Meanwhile `ahead_bytes` of each row whose address is in `ahead`, the next keys, are on their way from
    memory.
    """
    row, size = 0, compute_size(kind)
    while row < rows:
        block = 4 if rows - row >= 4 else 1
        column = 0
        while column < vectors:
            wide = 4 if vectors - column >= 4 else 1
            p, shift = weights + row * size, column * lanes(kind) * itemsize(kind)
            to = out + row * out_row + column * vector_size(kind)
            size_ahead = ahead_bytes if row == 0 and column == 0 else 0
            if block == 4 and wide == 4:
                _weigh_4_4(kind, p, weight_row, values, shift, keys, to, out_row, ahead, size_ahead)
            elif block == 4:
                _weigh_4_1(kind, p, weight_row, values, shift, keys, to, out_row, ahead, size_ahead)
            elif wide == 4:
                _weigh_1_4(kind, p, weight_row, values, shift, keys, to, out_row, ahead, size_ahead)
            else:
                _weigh_1_1(kind, p, weight_row, values, shift, keys, to, out_row, ahead, size_ahead)
            column += wide
        row += block
