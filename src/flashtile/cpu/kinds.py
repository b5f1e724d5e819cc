"""Kinds and vectors as Numba types.

A vector holds one number per lane in one register. A `Kind` is a compile-time tag: how numbers lie in memory
(storage) and in which precision they are computed (compute). One kernel source thus serves every dtype.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.imputils import lower_constant
from numba.extending import NativeValue, intrinsic, register_model, typeof_impl, unbox

from .target import detect

TARGET = detect()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
SCALARS = {
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
        return ir.VectorType(SCALARS[self.dtype], self.lanes)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
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


# Facts about a kind, constants at compile time.


def _fact(read: Any) -> Any:
    @intrinsic
    def fact(tc: Any, kind: Any) -> Any:
        value = read(kind.kind)
        typ, llvm = (types.boolean, I1) if isinstance(value, bool) else (types.int64, I64)
        return typ(kind), lambda ctx, b, sig, args: ir.Constant(llvm, int(value))

    return fact


def kind_tag(choose: Any) -> Any:
    """A compile-time map from kind to kind."""

    @intrinsic
    def tag(tc: Any, kind: Any) -> Any:
        return choose(kind.kind).numba_type(kind), lambda ctx, b, sig, args: ctx.get_dummy_value()

    return tag


lanes = _fact(lambda kind: kind.lanes)
itemsize = _fact(lambda kind: kind.itemsize)
compute_size = _fact(lambda kind: kind.compute_size)
vector_size = _fact(lambda kind: TARGET.vector_bytes)
is_pairs = _fact(lambda kind: kind.pairs)
is_widened = _fact(lambda kind: kind.itemsize != kind.compute_size and not kind.pairs)
# Stored bytes that one register of a row takes: pairs fill it, other 16-bit numbers are widened first.
register_bytes = _fact(lambda kind: TARGET.vector_bytes if kind.pairs else kind.lanes * kind.itemsize)

mask_kind = kind_tag(lambda kind: BOOL64 if kind.compute_size == 8 else BOOL32)
raw_kind = kind_tag(lambda kind: FLOAT32 if kind.pairs else kind)
compute_kind = kind_tag(lambda kind: FLOAT64 if kind.compute_size == 8 else FLOAT32)
dot_kind = kind_tag(lambda k: BFLOAT16_PAIRS if k.storage == "bfloat16" and TARGET.bfloat16_dot else k)
