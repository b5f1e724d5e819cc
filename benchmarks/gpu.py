"""flashtile beside its peers on this GPU: correct first, then fast. One command, no network, under 8 minutes.

    python -m benchmarks.gpu                         everything: for a person with a card for ten minutes
    python -m benchmarks.gpu --check-only            only correctness, about a minute
    python -m benchmarks.gpu --quick                 a few cases of every kind: does everything work?
    python -m benchmarks.gpu --cases "forward 128"   only cases whose name or head_dim these words are
    python -m benchmarks.gpu --list                  names of cases and peers

Writes gpu.json and the papers' bar charts into --output. What a peer cannot do is left out with the reason;
cases for which no time is left are named. Exit code 1 if flashtile was wrong anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_measure import (
    Budget,
    Clock,
    GpuClock,
    Inputs,
    decode_cases,
    long_cases,
    make_run,
    measure_case,
    measure_ceilings,
)
from benchmarks.gpu_peers import DECODERS, PEERS, TITLES
from flashtile import dispatch
from flashtile.bench import check, machine
from flashtile.bench.cases import DTYPES, Case
from flashtile.bench.console import Progress, heading, table
from flashtile.bench.timing import format_seconds

PACKAGES = ("torch", "triton", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """The card, what drives it, the versions and the commit."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "architecture": getattr(properties, "gcnArchName", ""),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "versions": machine.versions(PACKAGES),
        "commit": machine.commit(),
    }


def judge(trial: int, dtype: str, device: str) -> check.Verdict:
    """One trial by its number, as a process of its own can be asked for it."""
    return check.judge(check.TRIALS[trial], DTYPES[dtype], device)


def check_all(device: torch.device, pool: ProcessPoolExecutor | None) -> list[check.Verdict]:
    """Every option in every dtype of the kernels, against float64 on the device.

    Most of the time goes into compiling, so the processes of a pool share the work.
    """
    names = [name for name, dtype in DTYPES.items() if dtype in check.GPU_DTYPES]
    calls = [(trial, name, str(device)) for trial in range(len(check.TRIALS)) for name in names]
    verdicts = []
    with Progress("checking", len(calls)) as progress:
        try:
            for verdict in (pool.map if pool else map)(judge, *zip(*calls, strict=True)):
                progress.step(f"{verdict.trial}, {verdict.dtype}")
                verdicts.append(verdict)
        except BrokenExecutor as failure:
            verdicts.append(check.Verdict("the rest", "", float("inf"), 0.0, "process", str(failure)))
    return verdicts


def compile_kernels(
    cases: list[Case], device: torch.device, pool: ProcessPoolExecutor, seconds: float
) -> None:
    """Fill Triton's cache on disk with what flashtile needs for the cases, in several processes.

    What is not done after ``seconds``, or fails, is left to the process that measures.
    """
    calls = [
        pool.submit(call_once, name, case, str(device))
        for case in cases
        for name in (DECODERS if case.group == "decode" else PEERS)
        if name.startswith(("flashtile", "flash1"))
    ]
    deadline = time.monotonic() + seconds
    with Progress("compiling", len(calls)) as progress:
        for call in calls:
            progress.step("kernels for the measured cases")
            wait([call], timeout=max(0.0, deadline - time.monotonic()))


def call_once(name: str, case: Case, device: str) -> None:
    """One call of a peer, for the sake of what it compiles."""
    builder = (DECODERS if case.group == "decode" else PEERS)[name]
    make_run(builder(case, torch.device(device)), Inputs.of(case, torch.device(device)), case.direction)()


def measure(
    cases: list[Case], clock: Clock, device: torch.device, rounds: int, budget: Budget
) -> tuple[list[dict[str, Any]], list[str]]:
    """The results, and the names of the cases for which no time was left."""
    results, skipped = [], []
    with Progress("measuring", len(cases)) as progress:
        for case in cases:
            progress.step(case.name)
            if budget.left < 0:
                skipped.append(case.name)
                continue
            peers = DECODERS if case.group == "decode" else PEERS
            try:
                results.append(measure_case(case, peers, clock, device, rounds, budget))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                skipped.append(f"{case.name} (float64 attention does not fit)")
    return results, skipped


def rate(case: dict[str, Any], answer: dict[str, Any]) -> str:
    if "seconds" not in answer:
        return "-"
    return f"{answer['gb_per_s']:.0f}" if case["group"] == "decode" else f"{answer['tflops']:.0f}"


def share(case: dict[str, Any], answer: dict[str, Any], ceilings: dict[str, float]) -> str:
    """Percent of the card's measured ceiling: bytes copied for decoding, else matrix products."""
    if "seconds" not in answer:
        return "-"
    if case["group"] == "decode":
        return f"{100 * answer['gb_per_s'] / ceilings['copy_gb_per_s']:.0f}%"
    return f"{100 * answer['tflops'] / ceilings['matmul_tflops']:.0f}%"


def report(results: list[dict[str, Any]], ceilings: dict[str, float]) -> str:
    """One row per case: rates of all peers, and of flashtile time, share of the ceiling, ratio and memory."""
    names = list(dict.fromkeys(name for result in results for name in result["peers"]))
    rows = []
    for result in results:
        case, peers = result["case"], result["peers"]
        own, flash = peers["flashtile"], peers["flash"]
        timed = "seconds" in own
        ratio = "-"
        if timed and "seconds" in flash:
            ratio = f"{flash['seconds']['median'] / own['seconds']['median']:.2f}x"
        rows.append(
            [
                case["name"],
                *(rate(case, peers.get(name, {})) for name in names),
                format_seconds(own["seconds"]["median"]) if timed else "-",
                share(case, own, ceilings),
                ratio,
                f"{own['peak_bytes'] / 2**20:.1f}" if own.get("peak_bytes") is not None else "-",
            ]
        )
    return table(["case", *names, "flashtile", "of ceiling", "vs flash", "MiB"], rows)


def show(found: dict[str, Any]) -> None:
    """Print what was found."""
    facts, ceilings = found["machine"], found["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['gpu']} (compute capability {facts['capability']}, {facts['memory_gib']} GiB)")
    print(f"CUDA or ROCm {facts['cuda']}, cuDNN {facts['cudnn']}, {versions}, commit {facts['commit']}")
    if ceilings:
        print(
            f"measured ceilings: {ceilings['matmul_tflops']:.0f} TFLOP/s of bfloat16 matrix products, "
            f"{ceilings['copy_gb_per_s']:.0f} GB/s copied (read and written)"
        )
    for group, unit in (("long", "TFLOP/s"), ("decode", "GB/s of keys and values")):
        chosen = [result for result in found["results"] if result["case"]["group"] == group]
        if chosen:
            heading(f"{group}, {unit}")
            print(report(chosen, ceilings))
    reasons = {
        f"{TITLES[name]}, {result['case']['name']}: {answer['left_out']}"
        for result in found["results"]
        for name, answer in result["peers"].items()
        if answer.get("left_out")
    }
    for title, lines in (("left out", sorted(reasons)), ("no time left for", found["skipped"])):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")


def draw(found: dict[str, Any], folder: Path) -> None:
    """The plots, where matplotlib is installed."""
    try:
        from benchmarks import gpu_plots
    except ImportError as error:
        print(f"no plots: {error}; python -m benchmarks.gpu_plots draws them from gpu.json")
    else:
        print("wrote " + ", ".join(map(str, gpu_plots.draw_all(found, folder))))


def is_wrong(found: dict[str, Any]) -> bool:
    """Whether flashtile erred by more than is allowed in a check or a measured case."""
    answers = (answer for result in found["results"] for answer in result["peers"].values())
    return not all(verdict["passed"] for verdict in found["check"]) or any(
        answer.get("wrong", False) for answer in answers
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="stop measuring after so many (default: 7.5)"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of what is timed")
    parser.add_argument(
        "--rounds", type=int, default=11, help="measurements of each, at least 3; medians count"
    )
    parser.add_argument("--cases", default="", metavar="WORDS", help='"backward causal", "decode", "long 64"')
    parser.add_argument("--check-only", action="store_true", help="measure nothing")
    parser.add_argument("--no-check", action="store_true", help="leave out the check of every option")
    parser.add_argument(
        "--quick", action="store_true", help="only lengths 512 and 4096, and the small caches"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, min(8, (os.cpu_count() or 2) // 2)),
        metavar="N",
        help="processes that check and compile (default: %(default)s)",
    )
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--list", action="store_true", help="print the names of cases and peers, and stop")
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error(f"--rounds: quartiles need at least 3, got {options.rounds}")
    words = set(options.cases.split())
    cases = decode_cases(options.dtype) + long_cases(options.dtype)
    if options.quick:
        cases = [case for case in cases if case.keys in (512, 4096) or (case.batch, case.keys) == (32, 8192)]
    options.cases = [case for case in cases if words <= {*case.name.split(), case.group, str(case.head_dim)}]
    if not options.cases:
        parser.error(f"--cases: no case has all of {sorted(words)}; --list shows the names")
    return options


def run(
    options: argparse.Namespace, device: torch.device, clock: Clock, facts: dict[str, Any]
) -> dict[str, Any]:
    """Check, then measure: everything that ends up in gpu.json."""
    budget = Budget(options.minutes)
    pool = None
    if options.jobs > 1:
        pool = ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        verdicts = [] if options.no_check else check_all(device, pool)
        if verdicts:
            heading("correctness")
            print(check.report(verdicts), flush=True)
        if pool is not None and not options.check_only:
            with contextlib.suppress(BrokenExecutor):
                compile_kernels(options.cases, device, pool, seconds=budget.left / 4)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)  # nothing else runs while something is measured
    found: dict[str, Any] = {
        "machine": facts,
        "check": [check.as_dict(verdict) for verdict in verdicts],
        "ceilings": {},
        "results": [],
        "skipped": [],
    }
    if not options.check_only:
        found["ceilings"] = measure_ceilings(clock, device)
        found["results"], found["skipped"] = measure(options.cases, clock, device, options.rounds, budget)
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print("peers: " + ", ".join(dict.fromkeys((*PEERS, *DECODERS))))
        print(*(f"{case.group:<7} {case.name}" for case in options.cases), sep="\n")
        return 0
    device = torch.device(options.device)
    reason = dispatch.unserved_reason(device.type)
    if device.type != "cuda" or reason:
        print(f"benchmarks.gpu needs a GPU: {reason or f'{device} is none'}", file=sys.stderr)
        return 2
    torch.cuda.set_device(device)
    facts = describe(device)
    print(f"{facts['gpu']}, commit {facts['commit']}: at most {options.minutes:g} minutes", flush=True)
    print(dispatch.explain(device=device, dtype=DTYPES[options.dtype]), flush=True)
    found = run(options, device, GpuClock(device), facts)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")
    show(found)
    if found["results"]:
        draw(found, options.output)
    return 1 if is_wrong(found) else 0


if __name__ == "__main__":
    sys.exit(main())
