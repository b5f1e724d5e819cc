"""LLVM instructions by name, and conversion between storage and compute precision; `b` is the builder."""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .kinds import I8, I16, I32, I64, SCALARS, TARGET, Kind, VectorType


def const(typ: VectorType, x: float) -> ir.Constant:
    return ir.Constant(typ.llvm, [x] * typ.lanes)


def pointer(b: ir.IRBuilder, address: ir.Value, typ: ir.Type) -> ir.Value:
    """The address, a sum of integers, as a pointer.

    Numba optimises functions again that were prepared for machine code before. There such a sum may have
    become a pointer of one integer plus the others, and where a caller has 0 for that integer the access is
    undefined, and dropped. In a function with this attribute it is not.
    """
    set.add(b.function.attributes, "null_pointer_is_valid")  # llvmlite's own add does not know it
    return b.inttoptr(address, typ.as_pointer())


def offset(b: ir.IRBuilder, address: ir.Value, count: ir.Value | int, stride: ir.Value | int) -> ir.Value:
    """address + count * stride, either of them a Python int or a value."""
    factors = [ir.Constant(I64, x) if isinstance(x, int) else x for x in (count, stride)]
    return b.add(address, b.mul(*factors))


def call(b: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


LINE = 64  # bytes of a cache line


def prefetch(b: ir.IRBuilder, address: ir.Value, size: int) -> None:
    """Asks for the cache lines of ``size`` bytes before they are needed, in the second-level cache."""
    typ = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, typ, "llvm.prefetch.p0")
    read, second_level, data = (ir.Constant(I32, x) for x in (0, 2, 1))
    for shift in range(0, size, LINE):
        place = pointer(b, b.add(address, ir.Constant(I64, shift)), I8)
        b.call(function, [place, read, second_level, data])


def suffix(typ: VectorType) -> str:
    return f"v{typ.lanes}{'f64' if typ.dtype is types.float64 else 'f32'}"


def splat_value(b: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    typ = ir.VectorType(scalar.type, count)
    one = b.insert_element(ir.Constant(typ, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(
        one, ir.Constant(typ, ir.Undefined), ir.Constant(ir.VectorType(I32, count), [0] * count)
    )


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


def _splat_int(count: int, x: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, count), [x] * count)


def _half_to_float(b: ir.IRBuilder, bits: ir.Value, count: int) -> ir.Value:
    ints, floats = ir.VectorType(I32, count), ir.VectorType(ir.FloatType(), count)
    c = partial(_splat_int, count)
    wide = b.zext(bits, ints)
    magnitude = b.shl(b.and_(wide, c(0x7FFF)), c(13))
    rescale = ir.Constant(floats, [2.0**112] * count)
    value = b.bitcast(b.fmul(b.bitcast(magnitude, floats), rescale), ints)
    special = b.icmp_unsigned(">=", magnitude, c(0x0F800000))
    value = b.select(special, b.or_(magnitude, c(0x7F800000)), value)
    return b.bitcast(b.or_(value, b.shl(b.and_(wide, c(0x8000)), c(16))), floats)


def _float_to_half(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    ints, floats = ir.VectorType(I32, count), ir.VectorType(ir.FloatType(), count)
    c = partial(_splat_int, count)
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
    c = partial(_splat_int, count)
    bits = b.bitcast(value, ints)
    odd = b.and_(b.lshr(bits, c(16)), c(1))
    rounded = b.add(bits, b.add(odd, c(0x7FFF)))
    nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.lshr(b.select(nan, b.or_(bits, c(0x400000)), rounded), c(16)), ir.VectorType(I16, count))


def widen_value(b: ir.IRBuilder, kind: Kind, address: ir.Value, count: int) -> ir.Value:
    """`count` stored numbers at `address` in compute precision."""
    raw = {"float64": ir.DoubleType(), "float32": ir.FloatType(), "bool": I8}.get(kind.storage, I16)
    stored = b.load(pointer(b, address, ir.VectorType(raw, count)), align=1)
    compute = SCALARS[kind.compute]
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
