"""Functions that only compiled code calls.

Numba makes every function ready to run: optimised with all that it calls, and turned into machine code. Among
the hundred functions of a kernel only the entry point needs that. The others are left in LLVM's intermediate
code and optimised once, together, as parts of its module: compiling takes half the time.
"""

from __future__ import annotations

from typing import Any

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


def native(function: Any = None, *, forceinline: bool = False) -> Any:
    """Decorates a function that only compiled code calls; it may neither print nor use Python's objects."""
    make = njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=forceinline, pipeline_class=_PartCompiler
    )
    return make if function is None else make(function)
