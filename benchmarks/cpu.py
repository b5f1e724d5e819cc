"""flashtile beside other libraries on this CPU: every peer in its own process, rounds interleaved, medians.

    python -m benchmarks.cpu --quick                       all cases, short sequences: does everything work?
    python -m benchmarks.cpu                               the whole table (about an hour on two cores)
    python -m benchmarks.cpu --cases "forward bf16"        only cases whose name holds these words
    python -m benchmarks.cpu --peers flashtile,torch       only some libraries
    python -m benchmarks.cpu --list                        names of cases and peers

Writes cpu.json and plots into --output. What a peer cannot do is left out with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import PEERS, TITLES
from flashtile.bench import machine, memory
from flashtile.bench.cases import Case, all_cases
from flashtile.bench.compare import measure_ceilings, share_of_ceiling
from flashtile.bench.console import Progress, heading, table
from flashtile.bench.timing import PAUSE, Timing, format_seconds

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "onnxruntime", "onnx", "openvino")
SLOW = 2.0  # seconds of one measurement from which on two rounds are enough


class Worker:
    """A peer's process."""

    def __init__(self, name: str, threads: int, log: Any) -> None:
        self.name = name
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "benchmarks.worker", name, str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; a dead worker says so in its answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else {"left_out": f"its process ended ({self.process.poll()})"}

    def stop(self) -> None:
        """Let the process end, which it does when its input does."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def measure(case: Case, workers: list[Worker], rounds: int) -> dict[str, Any]:
    """Prepare every peer, then time them in turn."""
    ready = {worker.name: worker.ask(prepare=asdict(case)) for worker in workers}
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for number in range(rounds):
        for worker in workers:
            answer, times = ready[worker.name], seconds[worker.name]
            if "left_out" in answer or (number >= 2 and times[0] * answer["calls"] > SLOW):
                continue
            time.sleep(4 * PAUSE)
            timed = worker.ask(measure=answer["calls"])
            if "left_out" in timed:
                answer |= timed
            else:
                times.append(timed["seconds"])
    peers: dict[str, Any] = {}
    for name, answer in ready.items():
        if "left_out" in answer:
            peers[name] = {"left_out": answer["left_out"]}
            continue
        timing = Timing.of(seconds[name])
        rate = case.flops / timing.median / 1e9
        peers[name] = {"error": answer["error"], "seconds": asdict(timing), "gflops": rate}
    return {"case": case.as_dict(), "peers": peers}


def measure_memory(quick: bool) -> dict[str, list[dict[str, float]]]:
    """MiB by which a forward or backward pass grows the process beyond its results, by length."""
    lengths = (1024, 4096) if quick else (2048, 4096, 8192, 16384, 32768)
    answer: dict[str, list[dict[str, float]]] = {}
    for direction in ("forward", "backward"):
        for library in ("flashtile", "torch"):
            base = Case("memory", 1, 2, 0, 64, direction=direction)
            cases = [replace(base, query_length=length) for length in lengths]
            grown = memory.measure(library, cases)
            answer[f"{library} {direction}"] = [
                {"length": case.query_length, "mib": (bytes_ - case.result_bytes) / 2**20}
                for case, bytes_ in zip(cases, grown, strict=True)
            ]
    return answer


def largest(*measured: dict[str, float | None]) -> dict[str, float | None]:
    """The largest of each ceiling: other work on the machine can only lower what is measured."""
    return {name: max((one[name] or 0.0 for one in measured), default=0.0) or None for name in measured[0]}


def report(results: list[dict[str, Any]], ceiling: dict[str, float | None], peers: list[str]) -> str:
    """Medians of all peers; flashtile's share of the ceiling, its ratio to torch and to the best peer."""
    rows = []
    for result in results:
        case = Case.from_dict(result["case"])
        medians = {
            name: peer["seconds"]["median"] for name, peer in result["peers"].items() if "seconds" in peer
        }
        own = medians.get("flashtile")
        others = {name: seconds for name, seconds in medians.items() if name != "flashtile"}
        best = min(others, key=lambda name: others[name]) if others else None
        cells = [format_seconds(medians[name]) if name in medians else "-" for name in peers]
        if own:
            cells += [f"{case.flops / own / 1e9:.0f}", share_of_ceiling(case, own, ceiling)]
            cells += [f"{medians['torch'] / own:.2f}x" if "torch" in medians else "-"]
            cells += [f"{others[best] / own:.2f}x {best}" if best else "-"]
        rows.append([case.name, *cells])
    columns = ["GFLOP/s", "of ceiling", "vs torch", "vs best peer"] if "flashtile" in peers else []
    return table(["case", *[TITLES[name] for name in peers], *columns], rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases", default="", metavar="WORDS", help="only cases whose name holds all of these words"
    )
    parser.add_argument(
        "--peers", default=",".join(PEERS), metavar="LIST", help=f"default: {','.join(PEERS)}"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="an eighth of the lengths and three rounds")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument(
        "--output", type=Path, help="default: benchmarks/results, or benchmarks/quick for a quick run"
    )
    parser.add_argument("--list", action="store_true", help="print the names of cases and peers, and stop")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = Path("benchmarks") / ("quick" if options.quick else "results")
    options.peers = options.peers.split(",")
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"--peers: expected some of {','.join(PEERS)}, got {','.join(sorted(unknown))}")
    words = options.cases.split()
    options.cases = [
        case for case in all_cases(options.quick) if set(words) <= {*case.name.split(), case.group}
    ]
    if not options.cases:
        parser.error(f"--cases: no case has all of {words}; --list shows the names")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print(
            "peers: " + ", ".join(options.peers),
            *(f"{case.group:<7} {case.name}" for case in options.cases),
            sep="\n",
        )
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    facts = machine.describe() | {"versions": machine.versions(PACKAGES)}
    before = measure_ceilings(options.cases, options.threads)
    results = []
    with (
        open(options.output / "peers.log", "w") as log,
        Progress("measuring", len(options.cases)) as progress,
    ):
        workers = [Worker(name, options.threads, log) for name in options.peers]
        try:
            for case in options.cases:
                progress.step(case.name)
                results.append(measure(case, workers, 3 if options.quick else options.rounds))
        finally:
            for worker in workers:
                worker.stop()
    found: dict[str, Any] = {
        "machine": facts,
        "ceilings": largest(before, measure_ceilings(options.cases, options.threads)),
    }
    found |= {"results": results, "memory": {} if options.no_memory else measure_memory(options.quick)}
    (options.output / "cpu.json").write_text(json.dumps(found, indent=2) + "\n")
    show(found, options)
    return 0


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the tables, and draw the plots where matplotlib is installed."""
    print(f"{found['machine']['cpu']}, {options.threads} threads, commit {found['machine']['commit']}")
    print(
        ", ".join(
            f"{name.replace('_', ' ')} {value:.0f}" for name, value in found["ceilings"].items() if value
        )
    )
    for group in dict.fromkeys(result["case"]["group"] for result in found["results"]):
        heading(group)
        chosen = [result for result in found["results"] if result["case"]["group"] == group]
        print(report(chosen, found["ceilings"], options.peers))
    reasons = {
        f"{name}: {peer['left_out']}"
        for result in found["results"]
        for name, peer in result["peers"].items()
        if "left_out" in peer
    }
    print("\nleft out:", *sorted(reasons), sep="\n  ")
    for name, points in found["memory"].items():
        print(f"extra memory, {name}: " + ", ".join(f"{p['length']}: {p['mib']:.1f} MiB" for p in points))
    try:
        from benchmarks import plots
    except ImportError as error:
        print(f"no plots: {error}")
    else:
        print("wrote " + ", ".join(map(str, plots.draw_all(found, options.output))))


if __name__ == "__main__":
    sys.exit(main())
