"""Measuring: interleaved rounds, medians with quantiles, and calls long enough for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Run = Callable[[], object]
PAUSE = 0.005  # thread pools spin for a while after their work; the next library starts after that


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the 20th and 80th percentiles of `rounds` measurements."""

    median: float
    p20: float
    p80: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        ordered = sorted(seconds)

        def quantile(share: float) -> float:
            position = share * (len(ordered) - 1)
            low = int(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (position - low) * (ordered[high] - ordered[low])

        return cls(quantile(0.5), quantile(0.2), quantile(0.8), len(ordered))


def seconds_per_call(run: Run, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def calls_for(run: Run, at_least: float = 0.01) -> int:
    """How many calls make up one measurement of `at_least` seconds; warms up on the way."""
    once = seconds_per_call(run, 1)
    if once < 0.5:
        once = min(seconds_per_call(run, 1) for _ in range(3))
    return max(1, min(1000, round(at_least / max(once, 1e-7))))


def interleave(runs: Mapping[str, Run], rounds: int = 7, seconds: float | None = None) -> dict[str, Timing]:
    """Time several callables in turn, `rounds` times over, so that all meet the same machine.

    With `seconds`, stops after the round in which that much time has passed (and at least one round).
    """
    calls = {name: calls_for(run) for name, run in runs.items()}
    measured: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + seconds if seconds is not None else float("inf")
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            measured[name].append(seconds_per_call(run, calls[name]))
        if time.perf_counter() > deadline:
            break
    return {name: Timing.of(values) for name, values in measured.items()}


def format_seconds(seconds: float) -> str:
    """Three digits with a unit: '181 ms', '9.27 us'."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if value >= 1 or unit == "us":
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")
