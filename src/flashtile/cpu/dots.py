"""Products for few query rows, where memory is the limit: K and V are read once, in whole vectors along
head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kinds import (
    I32,
    I64,
    TARGET,
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
from .simd import peek, peek_int64, poke, poke_int64, store
from .tiles import sum_lanes, tile_operations

STREAMS = 4  # runs of keys that are read side by side


def _load_operand(b: ir.IRBuilder, kind: Kind, address: ir.Value) -> ir.Value:
    """One register of stored numbers: widened, or raw pairs for dot products of pairs."""
    if kind.pairs:
        return b.load(pointer(b, address, ir.VectorType(ir.FloatType(), kind.lanes)), align=2)
    return widen_value(b, kind, address, kind.lanes)


def _load_query(b: ir.IRBuilder, kind: Any, address: ir.Value) -> ir.Value:
    """One register of a query: raw pairs, or numbers that were widened once for all keys."""
    if kind.kind.pairs:
        return _load_operand(b, kind.kind, address)
    return b.load(pointer(b, address, kind.vector.llvm), align=4)


def _per_block(kind: Kind, rows: int) -> int:
    """Keys beside `rows` query rows: their sums are as many vectors as a vector has lanes."""
    return max(1, kind.lanes // rows)


def _dot_operations(rows: int) -> tuple[Any, Any]:
    """Addresses of a block of keys; accumulators += K * Q for it and `rows` query rows, one register of
    each at a time.
    """

    @intrinsic
    def block(tc: Any, kind: Any, listed: Any, order: Any) -> Any:
        per = _per_block(kind.kind, rows)

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            addresses = []
            for i in range(per):
                index = b.load(pointer(b, b.add(args[2], ir.Constant(I64, 8 * i)), I64), align=8)
                addresses.append(b.load(pointer(b, offset(b, args[1], index, 8), I64), align=8))
            return cgutils.pack_array(b, addresses)

        return types.UniTuple(types.int64, per)(kind, types.int64, types.int64), gen

    @intrinsic
    def step(tc: Any, kind: Any, sums: Any, keys: Any, shift: Any, query: Any, query_row: Any) -> Any:
        k = kind.kind

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _, sums_value, keys_value, shift_value, query_value, query_row_value = args
            if k.lanes < rows:  # unreachable in such a kernel, yet it must compile
                return sums_value
            queries = [_load_query(b, kind, offset(b, query_value, r, query_row_value)) for r in range(rows)]
            result = []
            for i in range(k.lanes // rows):
                one = _load_operand(b, k, b.add(b.extract_value(keys_value, i), shift_value))
                for r in range(rows):
                    old = b.extract_value(sums_value, i * rows + r)
                    new = (
                        dot_pairs_value(b, old, one, queries[r])
                        if k.pairs
                        else fma_value(b, kind.vector, one, queries[r], old)
                    )
                    result.append(new)
            return cgutils.pack_array(b, result)

        tile, addresses = (
            types.UniTuple(kind.vector, k.lanes),
            types.UniTuple(types.int64, _per_block(k, rows)),
        )
        return tile(kind, tile, addresses, *[types.int64] * 3), gen

    return block, step


_DOTS = {rows: _dot_operations(rows) for rows in (1, 2, 4)}


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


def _make_dots(rows: int) -> Any:
    block, step = _DOTS[rows]

    @native
    def dots(
        kind: Kind,
        listed: int,
        order: int,
        query: int,
        query_row: int,
        length: int,
        scores: int,
        score_row: int,
        spare: int,
    ) -> None:
        """Scores of lanes / rows keys and `rows` query rows; length = bytes of one key, whole registers."""
        sums, keys = _no_sums(kind), block(kind, listed, order)
        for i in range(length // register_bytes(kind)):
            sums = step(kind, sums, keys, i * register_bytes(kind), query + i * vector_size(kind), query_row)
        store(spare, _sum_each(kind, sums))
        size = compute_size(kind)
        for i in range(lanes(kind) // rows):
            to = scores + peek_int64(order + 8 * i) * score_row
            for r in range(rows):
                poke(kind, to + r * size, peek(kind, spare + (i * rows + r) * size))

    return dots


_dots_1, _dots_2, _dots_4 = (_make_dots(rows) for rows in (1, 2, 4))


@native
def stream_order(order: int, keys: int) -> None:
    """order[i] = the key to take as number i: one each from STREAMS parts of the tile in turn.

    Memory delivers several streams faster than one.
    """
    part = keys // STREAMS
    for i in range(STREAMS * part):
        poke_int64(order + 8 * i, i % STREAMS * part + i // STREAMS)
    for i in range(STREAMS * part, keys):
        poke_int64(order + 8 * i, i)


@native
def score_rows(
    kind: Kind,
    listed: int,
    order: int,
    query: int,
    query_row: int,
    length: int,
    keys: int,
    rows: int,
    scores: int,
    score_row: int,
    spare: int,
) -> None:
    """scores[key][row] = K Q^T for few rows: blocks of 4, 2 and 1 rows, as many keys as registers allow.

    `listed` holds the address of every key, `order` the order in which they are taken.
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
                to = order + 8 * first
                if block == 4:
                    _dots_4(kind, listed, to, queries, query_row, length, target, score_row, spare)
                elif block == 2:
                    _dots_2(kind, listed, to, queries, query_row, length, target, score_row, spare)
                else:
                    _dots_1(kind, listed, to, queries, query_row, length, target, score_row, spare)
                first += per
            else:
                for r in range(block):
                    place = target + first * score_row + r * size
                    key = peek_int64(listed + 8 * first)
                    poke(kind, place, _dot(kind, key, queries + r * query_row, length))
                first += 1
        row += block


@native
def _dot(kind: Kind, key: int, query: int, length: int) -> float:
    total = _no_sums(kind)[0]
    for i in range(length // register_bytes(kind)):
        total = _dot_one(kind, total, key + i * register_bytes(kind), query + i * vector_size(kind))
    return sum_lanes(kind, total)


@intrinsic
def _dot_one(tc: Any, kind: Any, total: Any, key: Any, query: Any) -> Any:
    k = kind.kind

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        one, other = _load_operand(b, k, args[2]), _load_query(b, kind, args[3])
        if k.pairs:
            return dot_pairs_value(b, args[1], one, other)
        return fma_value(b, kind.vector, one, other, args[1])

    return kind.vector(kind, kind.vector, types.int64, types.int64), gen


class Group(NamedTuple):
    """STREAMS keys, or one: where their weights and values lie."""

    keys: int
    weights: tuple[int, int, int, int]
    values: tuple[int, int, int, int]


def _make_weigh(rows: int, columns: int) -> Any:
    """O[rows][columns vectors] += P[key, row] * V[key] for a group of keys, V read in its own dtype."""

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
    def weigh(kind: Kind, group: Group, row: int, column: int, vectors: int, out: int, out_row: int) -> int:
        """Vectors [column, vectors) in steps of `columns`; returns the first one not computed."""
        while column + columns <= vectors:
            shift, tile = column * lanes(kind) * itemsize(kind), zeros(kind)
            tile = step(kind, tile, group.weights[0] + row, group.values[0] + shift)
            if group.keys == STREAMS:
                tile = step(kind, tile, group.weights[1] + row, group.values[1] + shift)
                tile = step(kind, tile, group.weights[2] + row, group.values[2] + shift)
                tile = step(kind, tile, group.weights[3] + row, group.values[3] + shift)
            add_tile(kind, tile, out + column * vector_size(kind), out_row)
            column += columns
        return column

    return weigh


# Vectors of V beside 4 rows of sums: what 16 registers, or 32, have room for.
_WIDE = 2 if TARGET.vector_bytes == 32 else 4
_weigh_4_wide, _weigh_4_1, _weigh_1_wide, _weigh_1_1 = (
    _make_weigh(r, c) for r, c in ((4, _WIDE), (4, 1), (1, _WIDE), (1, 1))
)


@native
def weigh_rows(
    kind: Kind,
    weights: int,
    weight_row: int,
    values: int,
    order: int,
    keys: int,
    rows: int,
    vectors: int,
    out: int,
    out_row: int,
) -> None:
    """O[row][d] += sum over keys of P[key][row] V[key][d]; V in whole vectors of its own dtype.

    `values` holds the address of every row of V, so that its bits do not depend on where the rows lie, and
    `order` the order in which keys are taken.
    """
    first = 0
    while first < keys:
        count, at = STREAMS if keys - first >= STREAMS else 1, order + 8 * first
        i = peek_int64(at)
        j, k, m = i, i, i
        if count == STREAMS:
            j, k, m = peek_int64(at + 8), peek_int64(at + 16), peek_int64(at + 24)
        group = Group(
            count,
            (
                weights + i * weight_row,
                weights + j * weight_row,
                weights + k * weight_row,
                weights + m * weight_row,
            ),
            (
                peek_int64(values + 8 * i),
                peek_int64(values + 8 * j),
                peek_int64(values + 8 * k),
                peek_int64(values + 8 * m),
            ),
        )
        _weigh_group(kind, group, rows, vectors, out, out_row)
        first += count


@native
def _weigh_group(kind: Kind, group: Group, rows: int, vectors: int, out: int, out_row: int) -> None:
    row, size = 0, compute_size(kind)
    while row < rows:
        weight, to = row * size, out + row * out_row
        if rows - row >= 4:
            column = _weigh_4_wide(kind, group, weight, 0, vectors, to, out_row)
            _weigh_4_1(kind, group, weight, column, vectors, to, out_row)
            row += 4
        else:
            column = _weigh_1_wide(kind, group, weight, 0, vectors, to, out_row)
            _weigh_1_1(kind, group, weight, column, vectors, to, out_row)
            row += 1
