"""exp2 and tanh on vectors: minimax polynomials, no table; NaN in gives NaN out."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .kinds import I32, I64, TARGET, Kind
from .llvm import call, const, fma_value
from .native import native
from .simd import absolute, fma, maximum, round_to_integer, select, splat

# Polynomials on [-1/2, 1/2], highest degree first.
# 2**f: relative error 2e-17 and 1.5e-7; 4e-6 where the result is rounded to bfloat16 next.
_EXP2_FLOAT64 = (
    4.0780717860928705e-10, 7.072570394540799e-09, 1.0180647660573069e-07, 1.3215442675452854e-06,
    1.5252727385189775e-05, 0.0001540353044157185, 0.001333355815343997, 0.009618129107607003,
    0.05550410866479039, 0.24022650695910097, 0.6931471805599457, 1.0,
)  # fmt: skip
_EXP2_FLOAT32 = (
    0.0013276471989809428, 0.009675541334452364, 0.05550713273506415, 0.24022119723840207,
    0.6931469670647551, 1.0,
)  # fmt: skip
_EXP2_BFLOAT16 = (0.009782911186619846, 0.055976883149044095, 0.24020711100517408, 0.693113604482677, 1.0)
# (2**f - 1) / f, with the leading term exact, so that small results keep their relative accuracy.
_EXP2_MINUS_1_FLOAT32 = (
    0.0001559467701510541, 0.0013406643847480061, 0.009617692976143188, 0.05550310551206981,
    0.24022652782876178, 0.693147214967885,
)  # fmt: skip
_EXP2_MINUS_1_FLOAT64 = _EXP2_FLOAT64[:-1]


def _polynomial(choose: Any) -> Any:
    """A Horner scheme whose coefficients are chosen from the kind at compile time."""

    @intrinsic
    def evaluate(tc: Any, kind: Any, f: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            first, *rest = choose(kind.kind)
            total = const(f, first)
            for coefficient in rest:
                total = fma_value(b, f, total, args[1], const(f, coefficient))
            return total

        return f(kind, f), gen

    return evaluate


def _exp2_coefficients(kind: Any) -> tuple[float, ...]:
    if kind.compute is types.float64:
        return _EXP2_FLOAT64
    return _EXP2_BFLOAT16 if kind.pairs else _EXP2_FLOAT32


_exp2_polynomial = _polynomial(_exp2_coefficients)
_exp2_minus_1_polynomial = _polynomial(
    lambda kind: _EXP2_MINUS_1_FLOAT64 if kind.compute is types.float64 else _EXP2_MINUS_1_FLOAT32
)


@intrinsic
def _scale_exponent(tc: Any, x: Any, n: Any) -> Any:
    """x * 2**n for integral n; 0 below the normal range; NaN stays NaN."""
    double = x.dtype is types.float64
    ints = ir.VectorType(I64 if double else I32, x.lanes)

    def by_instruction(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.x86.avx512.mask.scalef.{'pd' if double else 'ps'}.512"
        mask = ir.IntType(x.lanes)
        return call(b, name, x.llvm, [*args, args[0], ir.Constant(mask, -1), ir.Constant(I32, 4)])

    def portable(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        # Adding 1.5 * 2**23 (2**52) leaves n in the low bits of the mantissa, without a conversion that NaN
        # breaks.
        magic, shift, lowest = (1.5 * 2**52, 52, -1022.0) if double else (1.5 * 2**23, 23, -126.0)
        bits = b.bitcast(b.fadd(args[1], const(x, magic)), ints)
        exponent = b.shl(bits, ir.Constant(ints, [shift] * x.lanes))
        scaled = b.bitcast(b.add(b.bitcast(args[0], ints), exponent), x.llvm)
        scaled = b.select(b.fcmp_ordered("<", args[1], const(x, lowest)), const(x, 0.0), scaled)
        return b.select(b.fcmp_unordered("uno", args[0], args[0]), args[0], scaled)

    return x(x, x), by_instruction if TARGET.scale_exponent else portable


@native(forceinline=True)
def exp2(kind: Kind, x: Any) -> Any:
    """2**x for x <= 0 or slightly above; exactly 0 far below (x = -inf too)."""
    x = maximum(splat(kind, -2000.0), x)
    n = round_to_integer(x)
    return _scale_exponent(_exp2_polynomial(kind, x - n), n)


@native(forceinline=True)
def tanh(kind: Kind, x: Any) -> Any:
    """tanh(|x|) = e / (e + 2) with e = exp(2|x|) - 1, which loses no digits where x is small."""
    one, magnitude = splat(kind, 1.0), absolute(x)
    doubled = magnitude * splat(kind, 2.8853900817779268)
    n = round_to_integer(select(doubled > splat(kind, 80.0), splat(kind, 80.0), doubled))
    # NaN survives: it reaches the result through f, and the clamped n of a large x meets an irrelevant f.
    f = select(doubled > splat(kind, 80.0), splat(kind, 0.0), doubled - n)
    scale = _scale_exponent(one, n)
    e = fma(scale, f * _exp2_minus_1_polynomial(kind, f), scale - one)
    result = e / (e + one + one)
    return select(x < splat(kind, 0.0), splat(kind, 0.0) - result, result)
