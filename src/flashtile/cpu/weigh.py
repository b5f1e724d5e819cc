"""P V for few query rows, where memory is the limit: V is read once, in whole vectors along head_dim."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .dots import BURST, ask_for, numbers
from .kinds import I64, TARGET, Kind, compute_size, itemsize, lanes, vector_size
from .llvm import LINE, fma_value, offset, pointer, splat_value, widen_value
from .native import native
from .tiles import tile_operations

# Keys whose products are summed in registers before they are added to O; their addresses are kept at hand.
_GROUP = 8 if TARGET.vector_bytes == 64 else 4


def _make_weigh(rows: int, columns: int, group: int) -> Any:
    """O[rows][columns vectors] += P[key, row] * V[key] for a group of keys, V read in its own dtype."""
    addresses = types.UniTuple(types.int64, group)

    @intrinsic
    def step(tc: Any, kind: Any, tile: Any, weights: Any, weight_row: Any, values: Any, shift: Any) -> Any:
        k, vector = kind.kind, kind.vector
        size = k.lanes * k.itemsize

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _, tile_value, weights_value, row_value, values_value, shift_value = args
            sums = [b.extract_value(tile_value, i) for i in range(rows * columns)]
            for i in range(group):
                at = b.add(b.extract_value(values_value, i), shift_value)
                value = [
                    widen_value(b, k, b.add(at, ir.Constant(I64, c * size)), k.lanes) for c in range(columns)
                ]
                first = offset(b, weights_value, i, row_value)
                for r in range(rows):
                    place = b.add(first, ir.Constant(I64, r * k.compute_size))
                    weight = b.load(pointer(b, place, vector.llvm.element), align=4)
                    weight = splat_value(b, weight, k.lanes)
                    for c in range(columns):
                        n = r * columns + c
                        sums[n] = fma_value(b, vector, weight, value[c], sums[n])
            return cgutils.pack_array(b, sums)

        t = types.UniTuple(vector, rows * columns)
        return t(kind, t, types.int64, types.int64, addresses, types.int64), gen

    zeros, add_tile, _, _ = tile_operations(rows, columns)
    listed = numbers(lambda kind: group)

    # Inlined, like its caller: it is called for every few vectors of every group.
    @native(forceinline=True)
    def weigh(
        kind: Kind,
        weights: int,
        weight_row: int,
        values: int,
        keys: int,
        first: int,
        last: int,
        out: int,
        out_row: int,
    ) -> None:
        """Vectors [first, last) in steps of `columns`; a multiple of `group` keys."""
        for column in range(first, last, columns):
            shift, tile = column * lanes(kind) * itemsize(kind), zeros(kind)
            for key in range(0, keys, group):
                tile = step(
                    kind, tile, weights + key * weight_row, weight_row, listed(kind, values + 8 * key), shift
                )
            add_tile(kind, tile, out + column * vector_size(kind), out_row)

    return weigh


def _make_weigh_group(group: int) -> Any:
    """O += P V for up to _GROUP keys, `group` at a time, and any number of rows and vectors."""
    # Vectors of V beside 4 rows of sums: what 16 registers, or 32, have room for.
    wide = 2 if TARGET.vector_bytes == 32 else 4
    weigh_4_wide, weigh_4_1, weigh_1_wide, weigh_1_1 = (
        _make_weigh(r, c, group) for r, c in ((4, wide), (4, 1), (1, wide), (1, 1))
    )

    @native(forceinline=True)
    def weigh_group(
        kind: Kind,
        weights: int,
        weight_row: int,
        values: int,
        ahead: int,
        keys: int,
        rows: int,
        vectors: int,
        out: int,
        out_row: int,
    ) -> None:
        size, fours = compute_size(kind), rows // 4 * 4
        number = lanes(kind) * itemsize(kind)
        step = BURST // _GROUP * LINE // number
        for first in range(0, vectors, step):
            last = min(first + step, vectors)
            whole = first + (last - first) // wide * wide
            ask_for(ahead, keys, first * number, last * number)
            for row in range(0, fours, 4):
                p, to = weights + row * size, out + row * out_row
                weigh_4_wide(kind, p, weight_row, values, keys, first, whole, to, out_row)
                weigh_4_1(kind, p, weight_row, values, keys, whole, last, to, out_row)
            for row in range(fours, rows):
                p, to = weights + row * size, out + row * out_row
                weigh_1_wide(kind, p, weight_row, values, keys, first, whole, to, out_row)
                weigh_1_1(kind, p, weight_row, values, keys, whole, last, to, out_row)

    return weigh_group


_weigh_group, _weigh_rest = _make_weigh_group(_GROUP), _make_weigh_group(1)


@native
def weigh_rows(
    kind: Kind,
    weights: int,
    weight_row: int,
    values: int,
    ahead: int,
    keys: int,
    rows: int,
    vectors: int,
    out: int,
    out_row: int,
) -> None:
    """O[row][d] += sum over keys of P[key][row] V[key][d]; V in whole vectors of its own dtype.

    `values` holds the address of every row of V, `ahead` that of a row to ask for meanwhile.
    """
    whole = keys // _GROUP * _GROUP
    for first in range(0, whole, _GROUP):
        p, v, later = weights + first * weight_row, values + 8 * first, ahead + 8 * first
        _weigh_group(kind, p, weight_row, v, later, _GROUP, rows, vectors, out, out_row)
    if whole < keys:
        # Summed as in a group, whose other keys a row does not see: a row's bits are its own.
        p, v, later = weights + whole * weight_row, values + 8 * whole, ahead + 8 * whole
        _weigh_rest(kind, p, weight_row, v, later, keys - whole, rows, vectors, out, out_row)
