"""Functions that only compiled code calls end up in their callers, and nowhere else."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite.binding import Linkage
from numba import int64, njit, types
from numba.core.compiler_lock import global_compiler_lock

from flashtile.cpu.decode import merge
from flashtile.cpu.entries import dispatcher
from flashtile.cpu.kinds import FLOAT32
from flashtile.cpu.native import native


@native
def doubled(number):
    return number + number


@native
def quadrupled(number):
    return doubled(doubled(number))


@njit
def called(number):
    return quadrupled(number) + doubled(number)


def pointers(function):
    return [
        result.library.get_pointer_to_function(result.fndesc.mangled_name)
        for result in function.overloads.values()
    ]


def test_a_function_for_compiled_code_alone_has_no_machine_code():
    alone = native(lambda number: number + number)
    alone.compile((int64,))
    with global_compiler_lock:  # asked for its address, it is put together
        assert pointers(alone) == [0]


def test_its_callers_have():
    assert called(3) == 18
    assert called(0.5) == 3.0
    assert len(pointers(called)) == 2
    assert all(pointers(called))


def test_a_kernel_shows_no_names_but_its_own():
    """Kernels of several processes meet in a cache, where parts of one name and number may differ."""
    compiled = dispatcher(merge, FLOAT32)
    compiled.compile(types.void(types.int64))
    (code,) = compiled.inspect_llvm().values()
    functions = [one for one in llvm.parse_assembly(code).functions if not one.is_declaration]
    seen = [one.name for one in functions if one.linkage is not Linkage.internal]
    assert len(seen) == 3, "the function, and what Python and C call"
    assert all("merge_2dfloat32" in name for name in seen)
    assert len(functions) > len(seen)
