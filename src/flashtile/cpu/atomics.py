"""Shared counters between worker threads: take the next task, publish and await progress."""

from __future__ import annotations

import sys
from typing import Any

from numba import types
from numba.extending import intrinsic

from .call import NEXT_SLOT, NEXT_TASK, SCRATCH, SCRATCH_STEP, TASKS, field
from .kinds import I32, I64
from .llvm import call, pointer
from .native import native


@intrinsic
def fetch_add(tc: Any, address: Any, amount: Any) -> Any:
    """Adds to the shared int64 and returns what it was."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", pointer(b, args[0], I64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), gen


@native
def take_task(call: int) -> int:
    """The next task of the call; -1 when none is left."""
    task = fetch_add(call + 8 * NEXT_TASK, 1)
    return task if task < field(call, TASKS) else -1


@native
def worker_scratch(call: int) -> int:
    """Scratch memory for the thread that asks, once per visit."""
    return field(call, SCRATCH) + fetch_add(call + 8 * NEXT_SLOT, 1) * field(call, SCRATCH_STEP)


@intrinsic
def _load_acquire(tc: Any, address: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(pointer(b, args[0], I64), "acquire", 8)

    return types.int64(types.int64), gen


@intrinsic
def publish(tc: Any, address: Any, value: Any) -> Any:
    """Sets the shared int64 after everything written before it."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store_atomic(args[1], pointer(b, args[0], I64), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), gen


@intrinsic
def _yield_processor(tc: Any) -> Any:
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        call(b, name, I32, [])
        return ctx.get_dummy_value()

    return types.void(), gen


@native
def wait_above(address: int, value: int) -> None:
    """Returns once the shared int64 exceeds value; yields the processor to whoever must raise it."""
    spins = 0
    while _load_acquire(address) <= value:
        spins += 1
        if spins > 200:
            _yield_processor()
