"""Threads that work on one call together, taking tasks from a shared counter.

PyTorch's own OpenMP team where PyTorch has one: a hand-off costs microseconds, and no second set of threads
competes with PyTorch's for the cores (its threads go on spinning for milliseconds after every operator).
Elsewhere, and in a forked child, where an OpenMP team does not survive: Python threads, since kernels release
the interpreter lock. Both follow torch.get_num_threads(), and the results do not depend on which it is.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from .call import LIMIT, NEXT_SLOT, NEXT_TASK, SCRATCH, SCRATCH_STEP, TASKS, address
from .entries import Entry

_INLINE_FLOPS = 2e6  # smaller calls are over before another thread has begun
_VISIT_FLOPS = 2e10  # a visit lasts a fraction of a second, so that Ctrl-C is heard


def run(entry: Entry, call: array[int], tasks: int, scratch_bytes: int, work: float) -> None:
    """Runs every task of the call; `work` in FLOPs, `scratch_bytes` for each thread."""
    threads = 1 if work < _INLINE_FLOPS else min(torch.get_num_threads(), tasks)
    step = (scratch_bytes + 127) // 64 * 64
    call[TASKS], call[NEXT_TASK] = tasks, 0
    call[SCRATCH], call[SCRATCH_STEP] = scratch_memory(step * threads), step
    held = getattr(_local, "memory", None)  # a signal handler that calls us may replace it
    call[LIMIT] = tasks if work < _VISIT_FLOPS else max(1, int(_VISIT_FLOPS * tasks / work))
    at = address(call)
    while call[NEXT_TASK] < tasks:
        call[NEXT_SLOT] = 0
        if threads == 1:
            entry.run(at)
        else:
            _together(entry, at, threads)
    del held


def _together(entry: Entry, call: int, threads: int) -> None:
    parallel = None if _in_forked_child else _openmp_parallel()
    if parallel is None:
        _pool.run(entry, call, threads)
    else:
        parallel(entry.pointer, call, threads, 0)


@cache
def _openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP runtime that PyTorch has loaded."""
    if not hasattr(os, "RTLD_NOLOAD") or "OpenMP" not in torch.__config__.parallel_info():
        return None
    package = Path(torch.__file__).parent
    shipped = [*(package / "lib").glob("*omp*"), *package.parent.glob("torch.libs/*omp*")]
    for library in (*map(str, sorted(shipped)), "libgomp.so.1", "libiomp5.so", "libomp.so", "libomp.dylib"):
        try:
            function: Any = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


class _Visit:
    """One visit of several Python threads to a call."""

    def __init__(self, entry: Entry, call: int) -> None:
        self.entry, self.call = entry, call
        self.lock, self.idle = threading.Lock(), threading.Event()
        self.running, self.closed = 0, False

    def help(self) -> None:
        """What another thread does; nothing if the caller has finished meanwhile."""
        with self.lock:
            if self.closed:
                return
            self.running += 1
        try:
            self.entry.run(self.call)
        finally:
            with self.lock:
                self.running -= 1
                if not self.running:
                    self.idle.set()

    def close(self) -> None:
        """Waits for the threads that have begun, whatever interrupts; later ones find the visit closed."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._close()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _close(self) -> None:
        with self.lock:
            self.closed = True
            if self.running:
                self.idle.clear()
            else:
                self.idle.set()
        self.idle.wait()


class _Pool:
    """Python threads, started on demand."""

    def __init__(self) -> None:
        self.visits: SimpleQueue[_Visit] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads = 0

    def run(self, entry: Entry, call: int, threads: int) -> None:
        with self.lock:
            while self.threads < threads - 1:
                try:
                    threading.Thread(
                        target=self._serve, name=f"flashtile-{self.threads}", daemon=True
                    ).start()
                except RuntimeError:  # the system gives no more threads: those there are do the work
                    break
                self.threads += 1
        visit = _Visit(entry, call)
        try:
            for _ in range(threads - 1):
                self.visits.put(visit)
            entry.run(call)
        finally:
            visit.close()

    def _serve(self) -> None:
        while True:
            self.visits.get().help()


_pool = _Pool()
_in_forked_child = False
_local = threading.local()


def _after_fork() -> None:
    global _pool, _in_forked_child
    _pool, _in_forked_child = _Pool(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def scratch_memory(size: int) -> int:
    """Scratch memory of the calling thread for its calls, aligned to 64 bytes; kept and grown."""
    memory = getattr(_local, "memory", None)
    if memory is None or memory.numel() < size + 64:
        _local.memory = memory = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
        _local.base = (memory.data_ptr() + 63) // 64 * 64
    return int(_local.base)
