"""Functions that only compiled code calls, and those that are made of them.

Numba makes every function ready to run: optimised with all that it calls, and turned into machine code. Among
the hundred functions of a kernel only the entry point needs that. The others are left in LLVM's intermediate
code and optimised once, together, as parts of its module: compiling takes half the time.

Numba tells functions of one name apart by numbers that each process counts anew. Kernels that different
processes have compiled meet in the cache, so a kernel keeps the names of its parts to itself: otherwise one
could be linked to another's part of the same name and number.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import Linkage
from numba import _dynfunc, njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _Part(JITCodeLibrary):
    """Code that is only linked into another library, never run by itself."""

    def _optimize_functions(self, module: Any) -> None:
        """Left to the library that this one is linked into."""

    def _optimize_final_module(self) -> None:
        """Left to the library that this one is linked into."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _PartCompiler(Compiler):
    """Numba's pipeline up to LLVM's intermediate code."""

    def compile_extra(self, function: Any) -> Any:
        context = self.state.targetctx
        library = _Part(context.codegen(), function.__qualname__)
        self.state.library, self.state.flags.no_compile = library, True
        result = super().compile_extra(function)
        # It only identifies the function to its callers: a call from Python would jump to address 0.
        module, name = result.fndesc.lookup_module(), function.__name__
        nothing = _dynfunc.make_function(module, name, "", 0, result.environment, (library,))
        context.insert_user_function(nothing, result.fndesc, [library])
        return result._replace(entry_point=nothing)


class _Whole(JITCodeLibrary):
    """Code that runs; of its names only those of the entry point itself can be seen from outside."""

    def _optimize_final_module(self) -> None:
        super()._optimize_final_module()
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage != Linkage.external:
                function.linkage = Linkage.internal


class _WholeCompiler(Compiler):
    """Numba's pipeline for an entry point."""

    def compile_extra(self, function: Any) -> Any:
        self.state.library = _Whole(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(function)


def whole(function: Any, name: str) -> Any:
    """Decorates an entry point, whose name no other may have; it releases the interpreter lock."""
    function.__name__ = function.__qualname__ = name
    return njit(nogil=True, pipeline_class=_WholeCompiler)(function)


def native(function: Any = None, *, forceinline: bool = False) -> Any:
    """Decorates a function that only compiled code calls; it may neither print nor use Python's objects."""
    make = njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=forceinline, pipeline_class=_PartCompiler
    )
    return make if function is None else make(function)
