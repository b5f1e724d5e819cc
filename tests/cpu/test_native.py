"""Functions that only compiled code calls end up in their callers, and nowhere else."""

from __future__ import annotations

from numba import njit

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


def test_callers_find_them_and_python_has_no_machine_code_of_them():
    assert called(3) == 18
    assert called(0.5) == 3.0
    for function in (doubled, quadrupled):
        assert len(function.overloads) == 2
        for result in function.overloads.values():
            for name in (result.fndesc.mangled_name, result.fndesc.llvm_cpython_wrapper_name):
                assert result.library.get_pointer_to_function(name) == 0
    ready = [
        result.library.get_pointer_to_function(result.fndesc.mangled_name)
        for result in called.overloads.values()
    ]
    assert all(ready)
    assert len(ready) == 2
