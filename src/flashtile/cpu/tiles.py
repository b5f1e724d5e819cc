"""Register tiles, and tiles moved between memory and registers: rank-1 updates, transposition, bfloat16
pairs.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kinds import I16, I32, I64
from .llvm import (
    BFLOAT,
    const,
    dot_pairs_value,
    fma_value,
    narrow_value,
    offset,
    pointer,
    splat_value,
    widen_value,
)


def tile_operations(rows: int, columns: int) -> tuple[Any, Any, Any, Any]:
    """zeros, add to memory, store and rank-1 update of a tile of rows x columns vectors held in registers.

    A tile is a tuple of vectors, row by row. Memory rows are `stride` bytes apart.
    """

    def tile_type(kind: Any) -> Any:
        return types.UniTuple(kind.vector, rows * columns)

    def places(b: Any, kind: Any, address: Any, stride: Any) -> list[Any]:
        llvm, width = kind.vector.llvm, kind.kind.lanes * kind.kind.compute_size
        return [
            pointer(b, b.add(offset(b, address, r, stride), ir.Constant(I64, width * c)), llvm)
            for r in range(rows)
            for c in range(columns)
        ]

    @intrinsic
    def zeros(tc: Any, kind: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return cgutils.pack_array(b, [const(kind.vector, 0.0)] * (rows * columns))

        return tile_type(kind)(kind), gen

    @intrinsic
    def add_tile(tc: Any, kind: Any, tile: Any, address: Any, stride: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            for i, place in enumerate(places(b, kind, args[2], args[3])):
                b.store(b.fadd(b.load(place, align=4), b.extract_value(args[1], i)), place, align=4)
            return ctx.get_dummy_value()

        return types.void(kind, tile_type(kind), types.int64, types.int64), gen

    @intrinsic
    def store_tile(tc: Any, kind: Any, tile: Any, address: Any, stride: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            for i, place in enumerate(places(b, kind, args[2], args[3])):
                b.store(b.extract_value(args[1], i), place, align=4)
            return ctx.get_dummy_value()

        return types.void(kind, tile_type(kind), types.int64, types.int64), gen

    @intrinsic
    def rank1(tc: Any, kind: Any, tile: Any, column: Any, stride: Any, row: Any) -> Any:
        """tile += column (rows numbers or pairs, `stride` bytes apart) x row (columns vectors)."""
        vector, pairs = kind.vector, kind.kind.pairs
        scalar = ir.FloatType() if kind.kind.compute is types.float32 else ir.DoubleType()

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _, tile_value, column_value, stride_value, row_value = args
            width = kind.kind.lanes * kind.kind.compute_size
            bs = [
                b.load(pointer(b, b.add(row_value, ir.Constant(I64, width * c)), vector.llvm), align=4)
                for c in range(columns)
            ]
            result = []
            for r in range(rows):
                place = pointer(b, offset(b, column_value, r, stride_value), scalar)
                a = splat_value(b, b.load(place, align=2 if pairs else 4), vector.lanes)
                for c in range(columns):
                    old = b.extract_value(tile_value, r * columns + c)
                    result.append(
                        dot_pairs_value(b, old, a, bs[c]) if pairs else fma_value(b, vector, a, bs[c], old)
                    )
            return cgutils.pack_array(b, result)

        return tile_type(kind)(kind, tile_type(kind), types.int64, types.int64, types.int64), gen

    return zeros, add_tile, store_tile, rank1


# Blocks of lanes x lanes numbers, transposed in registers.


def _transpose(b: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Swaps off-diagonal blocks of 1, 2, 4, ... lanes: log2(lanes) rounds of two-source shuffles."""
    count, step = len(vectors), 1
    mask_type = ir.VectorType(I32, count)
    while step < count:
        low = ir.Constant(
            mask_type, [count + (lane ^ step) if lane & step else lane for lane in range(count)]
        )
        high = ir.Constant(mask_type, [count + lane if lane & step else lane ^ step for lane in range(count)])
        for i in range(count):
            if not i & step:
                x, y = vectors[i], vectors[i | step]
                vectors[i], vectors[i | step] = b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)
        step *= 2
    return vectors


def _address_at(b: ir.IRBuilder, table: ir.Value, index: int, shift: ir.Value) -> ir.Value:
    return b.add(b.load(pointer(b, offset(b, table, index, 8), I64), align=8), shift)


@intrinsic
def gather_block(tc: Any, kind: Any, addresses: Any, shift: Any, target: Any, stride: Any) -> Any:
    """target[d][lane] = number d of the row at addresses[lane] + shift, for lanes numbers of each of lanes
    rows.
    """
    k = kind.kind

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _, table, shift_value, target_value, stride_value = args
        rows = [widen_value(b, k, _address_at(b, table, i, shift_value), k.lanes) for i in range(k.lanes)]
        for i, vector in enumerate(_transpose(b, rows)):
            b.store(vector, pointer(b, offset(b, target_value, i, stride_value), vector.type), align=4)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.int64, types.int64), gen


@intrinsic
def scatter_block(
    tc: Any, kind: Any, source: Any, stride: Any, factor: Any, addresses: Any, shift: Any
) -> Any:
    """The inverse: number d of the row at addresses[lane] + shift = source[d][lane] * factor[lane]."""
    k, vector = kind.kind, kind.vector

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _, source_value, stride_value, factor_value, table, shift_value = args
        columns = []
        for i in range(k.lanes):
            place = pointer(b, offset(b, source_value, i, stride_value), vector.llvm)
            columns.append(b.fmul(b.load(place, align=4), factor_value))
        for i, row in enumerate(_transpose(b, columns)):
            narrow = narrow_value(b, k, row, k.lanes)
            b.store(narrow, pointer(b, _address_at(b, table, i, shift_value), narrow.type), align=1)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, types.int64, vector, types.int64, types.int64), gen


@intrinsic
def add_block(tc: Any, kind: Any, source: Any, stride: Any, addresses: Any, shift: Any) -> Any:
    """Number d of the row of compute numbers at addresses[lane] + shift += source[d][lane]; rows are
    distinct.
    """
    k, vector = kind.kind, kind.vector

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _, source_value, stride_value, table, shift_value = args
        places = [pointer(b, offset(b, source_value, i, stride_value), vector.llvm) for i in range(k.lanes)]
        for i, row in enumerate(_transpose(b, [b.load(place, align=4) for place in places])):
            place = pointer(b, _address_at(b, table, i, shift_value), vector.llvm)
            b.store(b.fadd(b.load(place, align=4), row), place, align=4)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.int64, types.int64), gen


@intrinsic
def sum_lanes(tc: Any, kind: Any, x: Any) -> Any:
    """The sum over all lanes, neighbours first (as the sums of several vectors at once are formed)."""
    n = kind.kind.lanes

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        total, width = args[1], n
        while width > 1:
            width //= 2
            mask = ir.VectorType(I32, width)
            halves = [
                b.shuffle_vector(total, total, ir.Constant(mask, list(range(s, 2 * width, 2))))
                for s in (0, 1)
            ]
            total = b.fadd(*halves)
        return b.extract_element(total, ir.Constant(I32, 0))

    return kind.kind.compute(kind, kind.vector), gen


# bfloat16 pairs: two numbers that meet in one dot product, low half first.


@intrinsic
def interleave(tc: Any, kind: Any, low: Any, high: Any, target: Any) -> Any:
    """target lane = pair (low[lane], high[lane]) from two rows of stored bfloat16; address 0 stands for
    zeros.
    """
    n = kind.kind.lanes
    shorts, ints = ir.VectorType(I16, n), ir.VectorType(I32, n)

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _, low_value, high_value, target_value = args
        x = b.zext(b.load(pointer(b, low_value, shorts), align=2), ints)
        missing = b.icmp_signed("==", high_value, ir.Constant(I64, 0))
        safe = b.select(missing, low_value, high_value)
        y = b.zext(b.load(pointer(b, safe, shorts), align=2), ints)
        y = b.select(missing, ir.Constant(ints, [0] * n), y)
        b.store(b.or_(x, b.shl(y, ir.Constant(ints, [16] * n))), pointer(b, target_value, ints), align=4)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.int64), gen


@intrinsic
def pack_pairs(tc: Any, kind: Any, low: Any, high: Any) -> Any:
    """Two compute vectors rounded to bfloat16 and paired lane by lane."""
    n = kind.kind.lanes
    shorts, ints = ir.VectorType(I16, n), ir.VectorType(I32, n)

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        if not kind.kind.pairs:  # unreachable in such a kernel, yet it must compile
            return args[1]
        rounded = [b.bitcast(b.fptrunc(x, ir.VectorType(BFLOAT, n)), shorts) for x in args[1:]]
        low, high = (b.zext(x, ints) for x in rounded)
        pairs = b.or_(low, b.shl(high, ir.Constant(ints, [16] * n)))
        return b.bitcast(pairs, kind.vector.llvm)

    return kind.vector(kind, kind.vector, kind.vector), gen


@intrinsic
def store_rounded(tc: Any, kind: Any, address: Any, value: Any) -> Any:
    """One vector rounded to bfloat16, lanes contiguous."""
    n = kind.kind.lanes

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        if kind.kind.pairs:
            half = b.fptrunc(args[2], ir.VectorType(BFLOAT, n))
            b.store(half, pointer(b, args[1], half.type), align=2)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, kind.vector), gen
