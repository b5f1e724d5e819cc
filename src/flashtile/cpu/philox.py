"""Philox4x32-10, one counter per lane: the dropout mask of `flashtile.dropout`, inside the kernels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kinds import I32, I64
from .llvm import splat_value

_MULTIPLIERS, _WEYL, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10


def _multiply_wide(b: ir.IRBuilder, x: ir.Value, factor: int, count: int) -> tuple[ir.Value, ir.Value]:
    wide = ir.VectorType(I64, count)
    full = b.mul(b.zext(x, wide), ir.Constant(wide, [factor] * count))
    high = b.trunc(b.lshr(full, ir.Constant(wide, [32] * count)), x.type)
    return high, b.trunc(full, x.type)


@intrinsic
def keep_factors(
    tc: Any,
    kind: Any,
    seed_low: Any,
    seed_high: Any,
    query: Any,
    batch_head: Any,
    quad: Any,
    threshold: Any,
    keep: Any,
) -> Any:
    """Four vectors, for keys 4 * quad .. 4 * quad + 3: `keep` where the entry is kept, else 0."""
    vector, n = kind.vector, kind.kind.lanes
    ints = ir.VectorType(I32, n)

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        def splat(x: ir.Value) -> ir.Value:
            return splat_value(b, b.trunc(x, I32), n)

        keys = [splat(args[1]), splat(args[2])]
        x = [splat(args[5]), args[3], args[4], ir.Constant(ints, [0] * n)]
        for round_number in range(_ROUNDS):
            if round_number:
                keys = [b.add(k, ir.Constant(ints, [w] * n)) for k, w in zip(keys, _WEYL, strict=True)]
            high0, low0 = _multiply_wide(b, x[0], _MULTIPLIERS[0], n)
            high1, low1 = _multiply_wide(b, x[2], _MULTIPLIERS[1], n)
            x = [b.xor(b.xor(high1, x[1]), keys[0]), low1, b.xor(b.xor(high0, x[3]), keys[1]), low0]
        scalar = ctx.cast(b, args[7], sig.args[7], vector.dtype)
        kept = splat_value(b, scalar, n)
        zero, limit = ir.Constant(vector.llvm, [0.0] * n), splat(args[6])
        return cgutils.pack_array(b, [b.select(b.icmp_unsigned(">=", word, limit), kept, zero) for word in x])

    result = types.UniTuple(vector, 4)
    int64 = types.int64
    return result(kind, int64, int64, kind.int_vector, kind.int_vector, int64, int64, types.float64), gen
