"""Worker threads that take tasks from a shared counter.

Kernels release the interpreter lock, so plain Python threads run them side by side. Threads are started on
demand, are started anew after a fork, follow torch.get_num_threads(), and never touch a system threading
library.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from queue import SimpleQueue

import torch

from .call import NEXT_TASK, TASKS, address

Kernel = Callable[[int, int, int], bool]  # (call, scratch, at most so many tasks) -> tasks still to take?

_TASKS_PER_VISIT = 4  # the caller's thread returns to Python this often, so that Ctrl-C is heard


class _Job:
    """One kernel call shared by several threads."""

    def __init__(self, kernel: Kernel, call: array[int], scratch_bytes: int) -> None:
        self.kernel, self.call, self.scratch_bytes = kernel, call, scratch_bytes
        self.counter = array("q", (0,))
        call[NEXT_TASK] = address(self.counter)
        self.lock, self.idle = threading.Lock(), threading.Event()
        self.running, self.closed = 0, False
        self.error: BaseException | None = None

    def work(self) -> None:
        scratch = scratch_memory(self.scratch_bytes)
        call = address(self.call)
        while self.kernel(call, scratch, _TASKS_PER_VISIT):
            pass

    def help(self) -> None:
        """What a worker thread does with the job; nothing if its caller has finished it."""
        with self.lock:
            if self.closed:
                return
            self.running += 1
        try:
            self.work()
        except BaseException as error:
            self.error = error
            self.cancel()
        with self.lock:
            self.running -= 1
            if not self.running:
                self.idle.set()

    def cancel(self) -> None:
        self.counter[0] = self.call[TASKS]

    def close(self) -> None:
        """Waits for the helpers that have begun; later ones find the job closed."""
        with self.lock:
            self.closed = True
            if not self.running:
                self.idle.set()
            else:
                self.idle.clear()
        self.idle.wait()
        if self.error is not None:
            raise self.error


class _Pool:
    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads = 0

    def offer(self, job: _Job, helpers: int) -> None:
        if self.threads < helpers:
            with self.lock:
                while self.threads < helpers:
                    name = f"flashtile-{self.threads}"
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
                    self.threads += 1
        for _ in range(helpers):
            self.jobs.put(job)

    def _serve(self) -> None:
        while True:
            self.jobs.get().help()


_pool = _Pool()
_local = threading.local()


def _after_fork() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def scratch_memory(size: int) -> int:
    """This thread's scratch memory, aligned to 64 bytes; kept and grown between calls."""
    memory = getattr(_local, "memory", None)
    if memory is None or len(memory) < size + 64:
        _local.memory = memory = bytearray(size + 64)
        _local.keep = array("b")
        _local.base = (torch.frombuffer(memory, dtype=torch.uint8).data_ptr() + 63) // 64 * 64
    return int(_local.base)


def run(kernel: Kernel, call: array[int], tasks: int, scratch_bytes: int, work: float) -> None:
    """Runs every task of the call; `work` in FLOPs decides whether other threads are worth waking."""
    call[TASKS] = tasks
    job = _Job(kernel, call, scratch_bytes)
    helpers = min(torch.get_num_threads(), tasks) - 1
    if helpers < 1 or work < _INLINE_FLOPS:
        job.work()
        return
    _pool.offer(job, helpers)
    try:
        job.work()
    except BaseException:
        job.cancel()
        raise
    finally:
        job.close()


_INLINE_FLOPS = 4e6  # a hand-off costs tens of microseconds
