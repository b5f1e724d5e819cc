"""SIMD vectors as ordinary Numba values.

A vector holds one number per lane; kernels written with vectors are plain Numba functions, and nothing outside
this file and `tiles.py` knows LLVM. The first argument of most functions is a `Kind`: a compile-time tag that
says how numbers lie in memory (storage) and in which precision they are computed (compute). One source thus
serves float64, float32, bfloat16 and float16.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_constant
from numba.extending import (
    NativeValue,
    intrinsic,
    overload,
    register_model,
    typeof_impl,
    unbox,
)

from . import target as _target

TARGET = _target.detect()

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_SCALARS = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: I32,
    types.uint32: I32,
    types.boolean: I1,
}


class VectorType(types.Type):
    """`lanes` numbers of a scalar type in one register; booleans are the result of a comparison."""

    def __init__(self, dtype: types.Type, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(f"Vector({dtype}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_SCALARS[self.dtype], self.lanes)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: VectorType) -> None:
        super().__init__(manager, fe_type, fe_type.llvm)


class Kind:
    """How a tensor's numbers are stored and computed with; a value without content, only a type to Numba."""

    def __init__(self, name: str, storage: str, compute: types.Type, pairs: bool = False) -> None:
        self.name, self.storage, self.compute, self.pairs = name, storage, compute, pairs
        self.itemsize = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}[storage]
        self.compute_size = compute.bitwidth // 8
        self.lanes = TARGET.vector_bytes // self.compute_size
        self.numba_type = KindType(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _kind_by_name, (self.name,)


class KindType(types.Type):
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        super().__init__(f"Kind({kind.name}, {TARGET.name})")

    def __reduce__(self) -> tuple[Any, ...]:
        return _kind_type_by_name, (self.kind.name,)

    @property
    def vector(self) -> VectorType:
        return VectorType(self.kind.compute, self.kind.lanes)

    @property
    def int_vector(self) -> VectorType:
        return VectorType(types.int32, self.kind.lanes)


register_model(KindType)(models.OpaqueModel)

FLOAT64 = Kind("float64", "float64", types.float64)
FLOAT32 = Kind("float32", "float32", types.float32)
BFLOAT16 = Kind("bfloat16", "bfloat16", types.float32)
BFLOAT16_PAIRS = Kind("bfloat16_pairs", "bfloat16", types.float32, pairs=True)
FLOAT16 = Kind("float16", "float16", types.float32)
BOOL32 = Kind("bool32", "bool", types.float32)
BOOL64 = Kind("bool64", "bool", types.float64)
_KINDS = {k.name: k for k in (FLOAT64, FLOAT32, BFLOAT16, BFLOAT16_PAIRS, FLOAT16, BOOL32, BOOL64)}


def _kind_by_name(name: str) -> Kind:
    return _KINDS[name]


def _kind_type_by_name(name: str) -> KindType:
    return _KINDS[name].numba_type


@typeof_impl.register(Kind)
def _typeof_kind(value: Kind, context: Any) -> KindType:
    return value.numba_type


@unbox(KindType)
def _unbox_kind(typ: KindType, obj: Any, c: Any) -> NativeValue:
    return NativeValue(c.context.get_dummy_value())


@lower_constant(KindType)
def _constant_kind(context: Any, builder: Any, typ: KindType, value: Kind) -> Any:
    return context.get_dummy_value()


# Facts about a kind, folded at compile time.


def _fact(read: Any) -> Any:
    def fact(kind):
        return read(kind)

    @overload(fact, inline="always")
    def _overload(kind):
        value = read(kind.kind)
        return lambda kind: value

    return fact


lanes = _fact(lambda kind: kind.lanes)
itemsize = _fact(lambda kind: kind.itemsize)
compute_size = _fact(lambda kind: kind.compute_size)
vector_size = _fact(lambda kind: TARGET.vector_bytes)
is_pairs = _fact(lambda kind: kind.pairs)
is_widened = _fact(lambda kind: kind.itemsize != kind.compute_size and not kind.pairs)


# LLVM helpers; b is the builder everywhere.


def const(typ: VectorType, x: float) -> ir.Constant:
    return ir.Constant(typ.llvm, [x] * typ.lanes)


def pointer(b: ir.IRBuilder, address: ir.Value, typ: ir.Type) -> ir.Value:
    return b.inttoptr(address, typ.as_pointer())


def offset(b: ir.IRBuilder, address: ir.Value, count: ir.Value | int, stride: ir.Value | int) -> ir.Value:
    """address + count * stride, either of them a Python int or a value."""
    as_value = lambda x: ir.Constant(I64, x) if isinstance(x, int) else x  # noqa: E731
    return b.add(address, b.mul(as_value(count), as_value(stride)))


def call(b: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def suffix(typ: VectorType) -> str:
    return f"v{typ.lanes}{'f64' if typ.dtype is types.float64 else 'f32'}"


def splat_value(b: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    typ = ir.VectorType(scalar.type, count)
    one = b.insert_element(ir.Constant(typ, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(typ, ir.Undefined), ir.Constant(ir.VectorType(I32, count), [0] * count))


def fma_value(b: ir.IRBuilder, typ: VectorType, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(b, f"llvm.fma.{suffix(typ)}", typ.llvm, [x, y, z])


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT, HALF = _BFloat(), ir.HalfType()


def dot_pairs_value(b: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """acc + x.low * y.low + x.high * y.high for bfloat16 pairs held in 32-bit lanes."""
    pairs = ir.VectorType(BFLOAT, 32)
    args = [acc, b.bitcast(x, pairs), b.bitcast(y, pairs)]
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", acc.type, args)


# Conversion between storage and compute. Integer arithmetic where no instruction is certain to exist.


def _half_to_float(b: ir.IRBuilder, bits: ir.Value, count: int) -> ir.Value:
    ints, floats = ir.VectorType(I32, count), ir.VectorType(ir.FloatType(), count)
    c = lambda x: ir.Constant(ints, [x] * count)  # noqa: E731
    wide = b.zext(bits, ints)
    magnitude = b.shl(b.and_(wide, c(0x7FFF)), c(13))
    rescale = ir.Constant(floats, [2.0**112] * count)
    value = b.bitcast(b.fmul(b.bitcast(magnitude, floats), rescale), ints)
    special = b.icmp_unsigned(">=", magnitude, c(0x0F800000))
    value = b.select(special, b.or_(magnitude, c(0x7F800000)), value)
    return b.bitcast(b.or_(value, b.shl(b.and_(wide, c(0x8000)), c(16))), floats)


def _float_to_half(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    ints, floats = ir.VectorType(I32, count), ir.VectorType(ir.FloatType(), count)
    c = lambda x: ir.Constant(ints, [x] * count)  # noqa: E731
    bits = b.bitcast(value, ints)
    sign = b.lshr(b.and_(bits, c(0x80000000)), c(16))
    magnitude = b.and_(bits, c(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, c(13)), c(1))
    normal = b.lshr(b.sub(b.add(magnitude, b.add(odd, c(0xFFF))), c(112 << 23)), c(13))
    # Adding 0.5 leaves a subnormal half, rounded, in the low mantissa bits.
    small = b.fadd(b.bitcast(magnitude, floats), ir.Constant(floats, [0.5] * count))
    subnormal = b.sub(b.bitcast(small, ints), c(0x3F000000))
    half = b.select(b.icmp_unsigned("<", magnitude, c(113 << 23)), subnormal, normal)
    half = b.select(b.icmp_unsigned(">=", magnitude, c(143 << 23)), c(0x7C00), half)
    half = b.select(b.icmp_unsigned(">", magnitude, c(0x7F800000)), c(0x7E00), half)
    return b.trunc(b.or_(half, sign), ir.VectorType(I16, count))


def _float_to_bfloat(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    ints = ir.VectorType(I32, count)
    c = lambda x: ir.Constant(ints, [x] * count)  # noqa: E731
    bits = b.bitcast(value, ints)
    odd = b.and_(b.lshr(bits, c(16)), c(1))
    rounded = b.add(bits, b.add(odd, c(0x7FFF)))
    nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.lshr(b.select(nan, b.or_(bits, c(0x400000)), rounded), c(16)), ir.VectorType(I16, count))


def widen_value(b: ir.IRBuilder, kind: Kind, address: ir.Value, count: int) -> ir.Value:
    """`count` stored numbers at `address` in compute precision."""
    raw = {"float64": ir.DoubleType(), "float32": ir.FloatType(), "bool": I8}.get(kind.storage, I16)
    stored = b.load(pointer(b, address, ir.VectorType(raw, count)), align=1)
    compute = _SCALARS[kind.compute]
    if kind.storage == "bfloat16":
        ints = ir.VectorType(I32, count)
        wide = b.shl(b.zext(stored, ints), ir.Constant(ints, [16] * count))
        return b.bitcast(wide, ir.VectorType(compute, count))
    if kind.storage == "float16":
        if not TARGET.half_conversion:
            return _half_to_float(b, stored, count)
        return b.fpext(b.bitcast(stored, ir.VectorType(HALF, count)), ir.VectorType(compute, count))
    if kind.storage == "bool":
        return b.uitofp(stored, ir.VectorType(compute, count))
    return stored


def narrow_value(b: ir.IRBuilder, kind: Kind, value: ir.Value, count: int) -> ir.Value:
    """A compute vector rounded to nearest even in storage precision."""
    if kind.storage == "bfloat16":
        return _float_to_bfloat(b, value, count)
    if kind.storage == "float16":
        if not TARGET.half_conversion:
            return _float_to_half(b, value, count)
        return b.bitcast(b.fptrunc(value, ir.VectorType(HALF, count)), ir.VectorType(I16, count))
    return value


# Vectors from and to memory. Addresses are plain int64.


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
        return b.extract_element(widen_value(b, kind.kind, args[1], 1), ir.Constant(I32, 0))

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
    llvm = {types.int64: I64}.get(typ) or _SCALARS[typ]

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
peek_float64, _ = _scalar_memory(types.float64)


@intrinsic
def copy_int16(tc: Any, source: Any, target: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(b.load(pointer(b, args[0], I16), align=2), pointer(b, args[1], I16), align=2)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), gen


@intrinsic
def peek(tc: Any, kind: Any, address: Any) -> Any:
    """One compute number at `address` (scratch memory)."""
    compute = kind.kind.compute

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(pointer(b, args[1], _SCALARS[compute]), align=4)

    return compute(kind, types.int64), gen


@intrinsic
def poke(tc: Any, kind: Any, address: Any, value: Any) -> Any:
    compute = kind.kind.compute

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(ctx.cast(b, args[2], sig.args[2], compute), pointer(b, args[1], _SCALARS[compute]), align=4)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, value), gen


@intrinsic
def splat(tc: Any, kind: Any, x: Any) -> Any:
    typ = kind.vector

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return splat_value(b, ctx.cast(b, args[1], sig.args[1], typ.dtype), typ.lanes)

    return typ(kind, x), gen


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
    def _overload(x, y):
        if isinstance(x, VectorType) and x == y:
            return lambda x, y: apply(x, y)
        return None


def _arithmetic(op: Any, real: str, integer: str | None) -> None:
    def emit(b: Any, typ: VectorType, x: Any, y: Any) -> Any:
        return getattr(b, real if isinstance(typ.dtype, types.Float) else integer)(x, y)

    _binary(op, emit)


def _comparison(op: Any, symbol: str) -> None:
    def emit(b: Any, typ: VectorType, x: Any, y: Any) -> Any:
        real = isinstance(typ.dtype, types.Float)
        return (b.fcmp_ordered if real else b.icmp_signed if typ.dtype is types.int32 else b.icmp_unsigned)(symbol, x, y)

    _binary(op, emit, compare=True)


for _op, _real, _integer in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
    (operator.truediv, "fdiv", None),
    (operator.and_, "and_", "and_"),
    (operator.or_, "or_", "or_"),
    (operator.xor, "xor", "xor"),
):
    _arithmetic(_op, _real, _integer)
for _op, _symbol in ((operator.lt, "<"), (operator.le, "<="), (operator.gt, ">"), (operator.ge, ">="), (operator.eq, "==")):
    _comparison(_op, _symbol)
