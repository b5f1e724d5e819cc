"""Compiled entry points: one function per kernel and kind, callable from Python and from a native thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import types

from .atomics import take_task, worker_scratch
from .cache import DiskCache
from .call import LIMIT, field
from .kinds import Kind
from .native import whole


class Entry(NamedTuple):
    """Machine code that works on the call at an address."""

    run: Callable[[int], None]  # releases the interpreter lock
    pointer: int  # void (*)(int64_t)


@cache
def entry(kernel: Any, kind: Kind) -> Entry:
    """The machine code of `kernel` for `kind`, from disk or compiled now."""
    work = dispatcher(kernel, kind)
    work._cache = DiskCache(work.py_func.__name__)
    work.compile(types.void(types.int64))
    result = work.overloads[(types.int64,)]
    pointer = result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)
    return Entry(result.entry_point, pointer)


def dispatcher(kernel: Any, kind: Kind) -> Any:
    """What compiles a function of the address of a call, which works on its tasks until none is left."""

    def work(call):  # type: ignore[no-untyped-def]
        scratch = worker_scratch(call)
        for _ in range(field(call, LIMIT)):
            task = take_task(call)
            if task < 0:
                return
            kernel(kind, call, scratch, task)

    return whole(work, f"{kernel.py_func.__name__}-{kind.name}")
