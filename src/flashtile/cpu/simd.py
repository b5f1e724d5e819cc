"""SIMD vectors as ordinary Numba values: what the kernels are written in.

Kernels are plain Numba functions over vectors; only this file, its helpers (`kinds.py`, `llvm.py`) and the
other files that define intrinsics (`tiles.py`, `dots.py`, `exponential.py`, `philox.py`, `atomics.py`) know
LLVM. Addresses are plain int64.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .kinds import I8, I64, SCALARS, VectorType
from .llvm import (
    call,
    fma_value,
    narrow_value,
    pointer,
    splat_value,
    suffix,
    widen_value,
)

# Vectors and numbers from and to memory.


@intrinsic
def load(tc: Any, kind: Any, address: Any) -> Any:
    """One vector of compute numbers at `address` (scratch memory)."""
    typ = kind.vector

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(pointer(b, args[1], typ.llvm), align=4)

    return typ(kind, types.int64), gen


@intrinsic
def load_int(tc: Any, kind: Any, address: Any) -> Any:
    """One int32 per lane at `address`."""
    typ = kind.int_vector

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(pointer(b, args[1], typ.llvm), align=4)

    return typ(kind, types.int64), gen


@intrinsic
def store(tc: Any, address: Any, value: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[1], pointer(b, args[0], args[1].type), align=4)
        return ctx.get_dummy_value()

    return types.void(types.int64, value), gen


@intrinsic
def load_stored(tc: Any, kind: Any, address: Any) -> Any:
    """One vector of consecutive stored numbers (a tensor's own dtype), widened."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return widen_value(b, kind.kind, args[1], kind.kind.lanes)

    return kind.vector(kind, types.int64), gen


@intrinsic
def store_stored(tc: Any, kind: Any, address: Any, value: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        narrow = narrow_value(b, kind.kind, args[2], kind.kind.lanes)
        b.store(narrow, pointer(b, args[1], narrow.type), align=1)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, value), gen


@intrinsic
def read(tc: Any, kind: Any, address: Any) -> Any:
    """One stored number at `address` as a compute scalar."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.extract_element(widen_value(b, kind.kind, args[1], 1), ir.Constant(ir.IntType(32), 0))

    return kind.kind.compute(kind, types.int64), gen


@intrinsic
def write(tc: Any, kind: Any, address: Any, value: Any) -> Any:
    """A compute scalar rounded into the tensor's dtype at `address`."""
    compute = kind.kind.compute

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        scalar = ctx.cast(b, args[2], sig.args[2], compute)
        narrow = narrow_value(b, kind.kind, splat_value(b, scalar, 1), 1)
        b.store(narrow, pointer(b, args[1], narrow.type), align=1)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, value), gen


def _scalar_memory(typ: types.Type) -> tuple[Any, Any]:
    llvm = {types.int64: I64}.get(typ) or SCALARS[typ]

    @intrinsic
    def peek(tc: Any, address: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.load(pointer(b, args[0], llvm), align=4)

        return typ(types.int64), gen

    @intrinsic
    def poke(tc: Any, address: Any, value: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            b.store(ctx.cast(b, args[1], sig.args[1], typ), pointer(b, args[0], llvm), align=4)
            return ctx.get_dummy_value()

        return types.void(types.int64, value), gen

    return peek, poke


peek_int64, poke_int64 = _scalar_memory(types.int64)
peek_int32, poke_int32 = _scalar_memory(types.int32)


@intrinsic
def copy_bytes(tc: Any, source: Any, target: Any, count: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        cgutils.raw_memcpy(b, pointer(b, args[1], I8), pointer(b, args[0], I8), args[2], 1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), gen


@intrinsic
def peek(tc: Any, kind: Any, address: Any) -> Any:
    """One compute number at `address` (scratch memory)."""
    compute = kind.kind.compute

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(pointer(b, args[1], SCALARS[compute]), align=4)

    return compute(kind, types.int64), gen


@intrinsic
def poke(tc: Any, kind: Any, address: Any, value: Any) -> Any:
    compute = kind.kind.compute

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(ctx.cast(b, args[2], sig.args[2], compute), pointer(b, args[1], SCALARS[compute]), align=4)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, value), gen


@intrinsic
def splat(tc: Any, kind: Any, x: Any) -> Any:
    typ = kind.vector

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return splat_value(b, ctx.cast(b, args[1], sig.args[1], typ.dtype), typ.lanes)

    return typ(kind, x), gen


@intrinsic
def rounded(tc: Any, kind: Any, x: Any) -> Any:
    """A number in compute precision."""
    compute = kind.kind.compute
    return compute(kind, x), lambda ctx, b, sig, args: ctx.cast(b, args[1], sig.args[1], compute)


@intrinsic
def splat_int(tc: Any, kind: Any, x: Any) -> Any:
    typ = kind.int_vector

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return splat_value(b, ctx.cast(b, args[1], sig.args[1], types.int32), typ.lanes)

    return typ(kind, x), gen


# Arithmetic.


@intrinsic
def fma(tc: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return x(x, x, x), lambda ctx, b, sig, args: fma_value(b, x, *args)


@intrinsic
def maximum(tc: Any, x: Any, y: Any) -> Any:
    """The larger; y where either is NaN."""
    return x(x, x), lambda ctx, b, sig, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def select(tc: Any, condition: Any, x: Any, y: Any) -> Any:
    return x(condition, x, x), lambda ctx, b, sig, args: b.select(*args)


@intrinsic
def to_float(tc: Any, kind: Any, x: Any) -> Any:
    """Integers per lane as compute numbers."""
    typ = kind.vector
    return typ(kind, x), lambda ctx, b, sig, args: b.sitofp(args[1], typ.llvm)


@intrinsic
def absolute(tc: Any, x: Any) -> Any:
    return x(x), lambda ctx, b, sig, args: call(b, f"llvm.fabs.{suffix(x)}", x.llvm, list(args))


@intrinsic
def round_to_integer(tc: Any, x: Any) -> Any:
    return x(x), lambda ctx, b, sig, args: call(b, f"llvm.nearbyint.{suffix(x)}", x.llvm, list(args))


@intrinsic
def any_lane(tc: Any, condition: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], ir.IntType(condition.lanes))
        return b.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(condition), gen


@intrinsic
def all_lanes(tc: Any, condition: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], ir.IntType(condition.lanes))
        return b.icmp_unsigned("==", bits, ir.Constant(bits.type, -1))

    return types.boolean(condition), gen


def _binary(op: Any, emit: Any, compare: bool = False) -> None:
    @intrinsic
    def apply(tc: Any, x: Any, y: Any) -> Any:
        result = VectorType(types.boolean, x.lanes) if compare else x
        return result(x, y), lambda ctx, b, sig, args: emit(b, x, *args)

    @overload(op)
    def _overload(x, y):  # type: ignore[no-untyped-def]
        if isinstance(x, VectorType) and x == y:
            return lambda x, y: apply(x, y)
        return None


def _arithmetic(op: Any, real: str, integer: str) -> None:
    def emit(b: Any, typ: VectorType, x: Any, y: Any) -> Any:
        return getattr(b, real if isinstance(typ.dtype, types.Float) else integer)(x, y)

    _binary(op, emit)


def _comparison(op: Any, symbol: str) -> None:
    def emit(b: Any, typ: VectorType, x: Any, y: Any) -> Any:
        real = isinstance(typ.dtype, types.Float)
        return (b.fcmp_ordered if real else b.icmp_signed if typ.dtype is types.int32 else b.icmp_unsigned)(
            symbol, x, y
        )

    _binary(op, emit, compare=True)


for _op, _real, _integer in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
    (operator.truediv, "fdiv", "sdiv"),
    (operator.and_, "and_", "and_"),
    (operator.or_, "or_", "or_"),
    (operator.xor, "xor", "xor"),
):
    _arithmetic(_op, _real, _integer)
for _op, _symbol in (
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.gt, ">"),
    (operator.ge, ">="),
    (operator.eq, "=="),
):
    _comparison(_op, _symbol)
