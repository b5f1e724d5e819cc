"""What this machine can do at most: multiply-adds, bfloat16 dot products, and bytes read from memory.

The two arithmetic ceilings run independent chains of one instruction on registers alone, on every thread at
once: nothing a kernel has to do besides (loads, exponentials, stores) is in them, so no kernel reaches 100%.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..cpu import simd
from ..cpu.kinds import FLOAT32, TARGET
from ..cpu.llvm import dot_pairs_value, fma_value

READ_PREFIX = "read_gb_per_s_of_"
CHAINS = 12  # latency x throughput of one FMA is 8 to 10 on current cores; AVX2 has 16 registers


def _chain_step(instruction: Callable[..., Any]) -> Any:
    """An intrinsic that advances CHAINS independent accumulators by one instruction each."""
    vector = FLOAT32.numba_type.vector
    chains = types.UniTuple(vector, CHAINS)

    @intrinsic
    def step(tc: Any, x: Any, accumulators: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x = args[0]
            return cgutils.pack_array(
                b, [instruction(b, x, b.extract_value(args[1], i)) for i in range(CHAINS)]
            )

        return chains(vector, chains), gen

    @intrinsic
    def zeros(tc: Any) -> Any:
        return chains(), lambda ctx, b, sig, args: ir.Constant(ctx.get_value_type(chains), None)

    @intrinsic
    def used(tc: Any, accumulators: Any) -> Any:
        """A number that depends on every accumulator, so that none is optimised away."""

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            total = b.extract_value(args[0], 0)
            for i in range(1, CHAINS):
                total = b.fadd(total, b.extract_value(args[0], i))
            return b.extract_element(total, ir.Constant(ir.IntType(32), 0))

        return types.float32(chains), gen

    @njit(nogil=True)
    def work(count):  # type: ignore[no-untyped-def]  # numba reads the signature
        x = simd.splat(FLOAT32, 1e-3)
        accumulators = zeros()
        for _ in range(count):
            accumulators = step(x, accumulators)
        return used(accumulators)

    return work


def _fma(b: ir.IRBuilder, x: ir.Value, total: ir.Value) -> ir.Value:
    return fma_value(b, FLOAT32.numba_type.vector, x, x, total)


def _dot(b: ir.IRBuilder, x: ir.Value, total: ir.Value) -> ir.Value:
    return dot_pairs_value(b, total, x, x)


@njit(nogil=True, fastmath=True)
def _read(numbers):  # type: ignore[no-untyped-def]  # numba reads the signature
    total = np.float32(0)
    for i in range(numbers.size):
        total += numbers[i]
    return total


def _best_seconds(work: Callable[[int], Any], threads: int, rounds: int) -> float:
    """The shortest time in which `threads` threads, each on its own core, finish `work(thread)`."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    barrier = threading.Barrier(threads)

    def pin() -> None:
        if cores:
            os.sched_setaffinity(0, {cores[barrier.wait() % len(cores)]})

    with ThreadPoolExecutor(threads, initializer=pin) as pool:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(work, range(threads)))
            times.append(time.perf_counter() - start)
    return float(min(times))


def _peak(instruction: Callable[..., Any], flops_per_lane: int, threads: int) -> float:
    work, count = _chain_step(instruction), 4_000_000
    work(1)
    seconds = _best_seconds(lambda _: work(count), threads, rounds=20)
    return float(flops_per_lane * FLOAT32.lanes * CHAINS * count * threads / seconds)


def fma_peak(threads: int) -> float:
    """float32 operations per second with fused multiply-adds on `threads` threads."""
    return _peak(_fma, 2, threads)


def bf16_dot_peak(threads: int) -> float | None:
    """bfloat16 operations per second with pair dot products; None where there is no such instruction."""
    return _peak(_dot, 4, threads) if TARGET.bfloat16_dot else None


def read_bandwidth(threads: int, size: int = 2**29) -> float:
    """Bytes per second read when `threads` threads sum an array of `size` bytes, again and again."""
    numbers = np.ones(size // 4, np.float32)
    parts = np.array_split(numbers, threads)
    seconds = _best_seconds(lambda thread: _read(parts[thread]), threads, rounds=20)
    return numbers.nbytes / seconds


def read_name(size: int) -> str:
    """The name under which `measure` gives the bandwidth of reading `size` bytes again and again."""
    return f"{READ_PREFIX}{size / 2**20:g}_mib"


def measure(threads: int, sizes: Iterable[int] = ()) -> dict[str, float | None]:
    """All three, in GFLOP/s and GB/s; `sizes` in bytes are read, too, part of which a cache may hold."""
    dot = bf16_dot_peak(threads)
    return {
        "fma_gflops": fma_peak(threads) / 1e9,
        "bf16_dot_gflops": dot / 1e9 if dot else None,
        "read_gb_per_s": read_bandwidth(threads) / 1e9,
        **{read_name(size): read_bandwidth(threads, size) / 1e9 for size in sorted(set(sizes))},
    }
