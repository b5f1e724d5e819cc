"""Measuring on a GPU: events around single calls, correctness before speed, the card's own ceilings."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu_peers import Builder
from benchmarks.peers import LeftOutError
from flashtile.bench import check
from flashtile.bench.cases import DTYPES, Case
from flashtile.bench.runs import NAMES, Attention, standard_attention
from flashtile.bench.timing import Run

WARM_UPS = 3
# Cycles that the GPU waits while the host queues the call that is timed: about two milliseconds.
AHEAD = 4_000_000


class Clock(Protocol):
    """Times calls on a device; a mark is read only after the device is done."""

    def mark(self, run: Run) -> Any: ...

    def seconds(self, mark: Any) -> float: ...


class GpuClock:
    """CUDA events around one call, with a cache that holds nothing of it.

    The device idles before the first event until the host has queued the call, so that the time of a short
    call is its own and not that of its launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flush = torch.empty(max(4 * cache, 2**28), dtype=torch.uint8, device=device)

    def mark(self, run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(AHEAD)
        begin.record()
        run()
        end.record()
        return begin, end

    def seconds(self, mark: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        mark[1].synchronize()
        return mark[0].elapsed_time(mark[1]) / 1e3


@dataclass(frozen=True)
class Inputs:
    """query, key, value and the gradient of the output: standard normal, the same for every peer."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        queries = (case.batch, case.heads, case.query_length, case.head_dim)
        keys = (case.batch, case.kv_heads or case.heads, case.keys, case.head_dim)
        tensors = (
            torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])
            for shape in (queries, keys, keys, queries)
        )
        return cls(*tensors)

    def last_head(self, case: Case) -> Inputs:
        """Those of the last head of the last batch entry."""
        return Inputs(*(tensor[-1:, -1:] for tensor in (self.query, self.key, self.value, self.grad)))


def make_run(attention: Attention, inputs: Inputs, direction: str) -> Run:
    """The timed call: the forward pass without gradients, or the backward pass alone."""
    if direction == "forward":

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attention(inputs.query, inputs.key, inputs.value),)

        return forward
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value))
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.grad, retain_graph=True)


def truths(case: Case, inputs: Inputs, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the last head's results are in float64, and in standard attention of the case's dtype."""
    names = ("output",) if case.direction == "forward" else NAMES
    one = replace(case, batch=1, heads=1, kv_heads=None)
    attention, last = standard_attention(one, device), inputs.last_head(case)
    found = []
    for dtype in (torch.float64, DTYPES[case.dtype]):
        cast = Inputs(*(tensor.to(dtype) for tensor in (last.query, last.key, last.value, last.grad)))
        results: Any = make_run(attention, cast, case.direction)()
        found.append(dict(zip(names, results, strict=True)))
    return found[0], found[1]


def prepare(
    builder: Builder,
    case: Case,
    inputs: Inputs,
    device: torch.device,
    truth: tuple[dict[str, Tensor], dict[str, Tensor]],
    strict: bool = False,
) -> tuple[Run | None, dict[str, Any]]:
    """The call, and what is known of it before it is timed: its error and its peak of memory.

    A result that errs by more than is allowed is left out if ``strict``, else its error tells.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run = make_run(builder(case, device), inputs, case.direction)
            results: Any = run()
            last = {name: result[-1:, -1:] for name, result in zip(truth[0], results, strict=True)}
            verdict = check.compare(case.name, case.dtype, last, *truth)
            del results, last
            facts: dict[str, Any] = {"error": check.as_dict(verdict)["error"], "allowed": verdict.allowed}
            if strict and not verdict.passed:
                why = verdict.failure or f"{verdict.worst} is off by {verdict.error:.2e}"
                return None, {
                    **facts,
                    "left_out": f"wrong: {why}, allowed {verdict.allowed:.2e}",
                    "wrong": True,
                }
            for _ in range(WARM_UPS - 1):
                run()
            return run, {**facts, "peak_bytes": peak_bytes(run, device)}
        except LeftOutError as reason:
            return None, {"left_out": str(reason)}
        except Exception as failure:  # a peer that fails on a case must not end the others' benchmark
            heard = "; ".join(dict.fromkeys(first_line(one.message) for one in said))
            return None, {
                "left_out": f"{type(failure).__name__}: {first_line(failure)}" + (f" ({heard})" * bool(heard))
            }


def first_line(message: object) -> str:
    return (str(message).strip().splitlines() or [""])[0][:200]


def peak_bytes(run: Run, device: torch.device) -> int | None:
    """Bytes that a call allocates at its peak beyond what lay there before and what it returns."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results: Any = run()
    returned = sum(result.untyped_storage().nbytes() for result in results)
    return max(0, torch.cuda.max_memory_allocated(device) - before - returned)


def interleave(
    runs: Mapping[str, Run], clock: Clock, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Time all callables in turn, at least three rounds and then until ``seconds`` have passed."""
    marks: dict[str, list[float]] = {name: [] for name in runs}
    start = time.monotonic()
    for number in range(rounds):
        pending = {name: clock.mark(run) for name, run in runs.items()}
        for name, mark in pending.items():
            marks[name].append(clock.seconds(mark))
        if number >= 2 and time.monotonic() - start > seconds:
            break
    return {name: quartiles(values) for name, values in marks.items()}


def quartiles(seconds: list[float]) -> dict[str, float]:
    q25, median, q75 = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median": median, "q25": q25, "q75": q75, "rounds": len(seconds)}


class Budget:
    """The time there is, and the share of it that may go into compiling one peer."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start, self.seconds = now, now(), 60 * minutes
        self._spent: dict[str, float] = {}

    @property
    def left(self) -> float:
        return self.seconds - (self._now() - self._start)

    def exhausted(self, peer: str, share: float = 0.25) -> str | None:
        """Why a peer is not prepared any more, or None."""
        if self._spent.get(peer, 0.0) > share * self.seconds:
            return f"preparing it took {self._spent[peer]:.0f} s of {self.seconds:.0f} s already"
        return None

    def preparing(self, peer: str, seconds: float) -> None:
        self._spent[peer] = self._spent.get(peer, 0.0) + seconds


def measure_case(
    case: Case, peers: Mapping[str, Builder], clock: Clock, device: torch.device, rounds: int, budget: Budget
) -> dict[str, Any]:
    """Prepare and check every peer, then time them in turn."""
    inputs = Inputs.of(case, device)
    truth = truths(case, inputs, device)
    runs, answers = {}, {}
    for name, builder in peers.items():
        ours, before = name.startswith("flashtile"), time.monotonic()
        reason = None if ours else budget.exhausted(name)
        run, answers[name] = None, {"left_out": reason}
        if reason is None:
            run, answers[name] = prepare(builder, case, inputs, device, truth, strict=ours)
            budget.preparing(name, time.monotonic() - before)
        if run is not None:
            runs[name] = run
        elif device.type == "cuda":
            torch.cuda.empty_cache()  # what did not fit must not be in the way of the others
    del truth
    for name, timing in interleave(runs, clock, rounds, seconds=2.0).items():
        answers[name] |= {"seconds": timing, "tflops": case.flops / timing["median"] / 1e12}
        if case.query_length == 1:
            answers[name]["gb_per_s"] = case.key_value_bytes / timing["median"] / 1e9
    return {"case": case.as_dict(), "peers": answers}


def measure_ceilings(
    clock: Clock, device: torch.device, size: int = 8192, copied: int = 2**30
) -> dict[str, float]:
    """The card's best matrix product in bfloat16, and bytes read plus written by a copy."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Run] = {"matmul": lambda: left @ right, "copy": lambda: target.copy_(source)}
    for run in runs.values():
        run()
    found = interleave(runs, clock, rounds=15, seconds=5.0)
    return {
        "matmul_tflops": 2 * size**3 / found["matmul"]["median"] / 1e12,
        "copy_gb_per_s": 2 * copied / found["copy"]["median"] / 1e9,
    }


def long_cases(dtype: str, tokens: int = 16384, hidden: int = 2048) -> list[Case]:
    """The papers' figures: so many tokens in all, as many heads as the hidden size gives; longest first."""
    lengths = [length for length in (16384, 8192, 4096, 2048, 1024, 512) if length <= tokens]
    return [
        Case("long", tokens // length, hidden // head_dim, length, head_dim, dtype, causal, direction)
        for head_dim in (128, 64, 256)
        for direction in ("forward", "backward")
        for length in lengths
        for causal in (False, True)
    ]


def decode_cases(
    dtype: str, shapes: Iterable[tuple[int, int]] = ((1, 131072), (8, 16384), (32, 8192))
) -> list[Case]:
    """One new token for so many sequences against so many keys: 32 query heads on 8 key heads."""
    return [Case("decode", batch, 32, 1, 128, dtype, kv_heads=8, key_length=keys) for batch, keys in shapes]
