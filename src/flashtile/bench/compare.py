"""`flashtile bench`: flashtile beside torch's SDPA and standard attention, interleaved in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from flashtile.bench import ceilings, machine
from flashtile.bench.cases import Case
from flashtile.bench.console import Progress, table
from flashtile.bench.runs import LIBRARIES, left_out, make_run
from flashtile.bench.timing import Timing, format_seconds, interleave


def measure(
    cases: Iterable[Case], libraries: Iterable[str], rounds: int, seconds: float | None
) -> list[dict[str, Any]]:
    """Time every case; each result holds the case, a timing per library and the reason for those left out."""
    cases, libraries, memory = list(cases), list(libraries), machine.memory_bytes()
    results = []
    with Progress("measuring", len(cases)) as progress:
        for case in cases:
            progress.step(case.name)
            reasons = {library: left_out(library, case, memory) for library in libraries}
            runs = {
                library: make_run(LIBRARIES[library](case), case)
                for library in libraries
                if reasons[library] is None
            }
            timings = interleave(runs, rounds, seconds)
            results.append(
                {
                    "case": case.as_dict(),
                    "seconds": {library: asdict(timing) for library, timing in timings.items()},
                    "left_out": {library: reason for library, reason in reasons.items() if reason},
                }
            )
    return results


def measure_ceilings(cases: Iterable[Case], threads: int) -> dict[str, float | None]:
    """The machine's ceilings, and for decoding how fast as many bytes can be read."""
    with Progress("measuring the machine", 1) as progress:
        progress.step("multiply-adds, bfloat16 dot products, memory")
        sizes = (case.key_value_bytes for case in cases if case.query_length == 1)
        return ceilings.measure(threads, sizes)


def ceilings_line(measured: dict[str, float | None]) -> str:
    """What the machine was measured to do at most, in words."""
    named = {
        "fma_gflops": "{:.0f} GFLOP/s of float32 multiply-adds (FMA)",
        "bf16_dot_gflops": "{:.0f} GFLOP/s of bfloat16 dot products (dot)",
        "read_gb_per_s": "{:.0f} GB/s read from memory (read)",
    }
    again = ceilings.READ_PREFIX  # a size in MiB that decoding reads, which a cache may hold in part
    named |= {
        name: "{:.0f} GB/s reading "
        + name.removeprefix(again).replace("_mib", " MiB again and again (reread)")
        for name in measured
        if name.startswith(again)
    }
    present = [text.format(value) for name, text in named.items() if (value := measured[name])]
    return f"Measured ceilings: {', '.join(present)}."


def ceiling_of(case: Case, measured: dict[str, float | None]) -> tuple[str, float]:
    """What bounds a case: bytes read for decoding, else dot products for bfloat16, else multiply-adds."""
    if case.query_length == 1:
        same_size = measured.get(ceilings.read_name(case.key_value_bytes))
        return "reread" if same_size else "read", (same_size or measured["read_gb_per_s"] or 0.0) * 1e9
    if case.dtype == "bf16" and measured["bf16_dot_gflops"]:
        return "dot", measured["bf16_dot_gflops"] * 1e9
    return "FMA", (measured["fma_gflops"] or 0.0) * 1e9


def share_of_ceiling(case: Case, seconds: float, measured: dict[str, float | None]) -> str:
    """Percent of what bounds the case, and what that is; nothing where it was not measured."""
    share, kind = _share(case, seconds, measured)
    return "" if share is None else f"{100 * share:.0f}% {kind}"


def _share(case: Case, seconds: float, measured: dict[str, float | None]) -> tuple[float | None, str]:
    kind, ceiling = ceiling_of(case, measured)
    work = case.key_value_bytes if kind in ("read", "reread") else case.flops
    return (work / seconds / ceiling if ceiling else None), kind


def report(results: list[dict[str, Any]], measured: dict[str, float | None] | None) -> str:
    """One row per case: times, flashtile's rate, its share of the ceiling, and the ratios."""
    libraries = list(
        dict.fromkeys(name for result in results for name in (*result["seconds"], *result["left_out"]))
    )
    others = [library for library in libraries if library != "flashtile"]
    header = ["case", *libraries, *[f"vs {library}" for library in others], "GFLOP/s", "of ceiling"]
    rows, above = [], False
    for result in results:
        case = Case.from_dict(result["case"])
        times = {library: Timing(**timing).median for library, timing in result["seconds"].items()}
        own = times.get("flashtile")
        above = above or bool(own and measured and (_share(case, own, measured)[0] or 0.0) > 1.005)
        rows.append(
            [
                case.name,
                *[format_seconds(times[library]) if library in times else "-" for library in libraries],
                *[f"{times[other] / own:.2f}x" if own and other in times else "-" for other in others],
                f"{case.flops / own / 1e9:.0f}" if own else "-",
                share_of_ceiling(case, own, measured) if own and measured else "-",
            ]
        )
    text = table(header, rows)
    if above:
        text += "\n  more than 100%: the ceiling was measured at a slower moment than this"
    return text
