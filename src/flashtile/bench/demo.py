"""`flashtile demo`: a real model with and without flashtile, exactness, speed and memory."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flashtile.bench import ceilings, language, machine, memory, runs, warmup
from flashtile.bench.cases import DTYPES, Case
from flashtile.bench.console import Progress, bar, heading, styled, table
from flashtile.bench.timing import Timing, format_seconds, interleave

LIBRARIES = ("flashtile", "torch", "standard")
TITLES = {"flashtile": "flashtile", "torch": "torch SDPA", "standard": "standard"}
MIB = 2**20


@dataclass
class Plan:
    """Sizes, and how long the whole may take."""

    minutes: float
    quick: bool
    start: float = field(default_factory=time.monotonic)

    @property
    def prefill_lengths(self) -> tuple[int, ...]:
        return (256, 512) if self.quick else (1024, 2048, 4096, 8192)

    @property
    def perplexity_length(self) -> int:
        return 512 if self.quick else 2048

    @property
    def speed_length(self) -> int:
        return 512 if self.quick else 2048

    @property
    def memory_lengths(self) -> tuple[int, ...]:
        return (1024, 2048) if self.quick else (1024, 2048, 4096, 8192, 16384)

    def seconds_until(self, share: float) -> float:
        """Seconds left until `share` of the time is used up."""
        return self.start + 60 * self.minutes * share - time.monotonic()


def run(output: Path, minutes: float = 4, quick: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Run every part, print it as it comes unless `quiet`, write demo.png and demo.json into `output`."""
    plan = Plan(minutes, quick)
    say = (lambda *_: None) if quiet else print
    facts = machine.describe()
    say(styled("flashtile: exact attention in tiles", "bold"))
    say(machine.headline(facts))
    result: dict[str, Any] = {"machine": facts, "quick": quick}
    _part(quiet, "Kernels: compiled once for this processor, then kept on disk")
    result["kernels"] = warmup.run(DTYPES)
    say(warmup.report(result["kernels"]))
    _part(quiet, "A language model reads Hamlet: SmolLM2-135M, 30 layers, 9 heads over 3 key heads")
    result["model"] = _model(plan)
    say(model_report(result["model"]))
    _part(quiet, "Exactness: largest error against float64, (1, 4, 512, 64)")
    result["exactness"] = _exactness()
    say(exactness_report(result["exactness"]))
    _part(quiet, f"Speed: (1, 8, {plan.speed_length}, 64), not causal")
    result["ceilings"] = ceilings.measure(torch.get_num_threads())
    result["speed"] = _speed(plan)
    say(speed_report(result["speed"], result["ceilings"]))
    _part(
        quiet,
        "Memory: most that a forward pass needs beyond its inputs and its result, (1, 2, S, 64) float32",
    )
    result["memory"] = _memory(plan)
    say(memory_report(result["memory"]))
    result["seconds"] = round(time.monotonic() - plan.start, 1)
    result["agrees"] = _agrees(result)
    _write(output, result, quiet)
    return result


def _part(quiet: bool, title: str) -> None:
    if not quiet:
        heading(title)


def _model(plan: Plan) -> dict[str, Any]:
    try:
        with Progress("loading the model", 1) as progress:
            progress.step("weights from GGUF, 135 million parameters")
            model, tokenizer = language.load()
    except language.UnavailableError as reason:
        return {"unavailable": str(reason)}
    ids = language.tokens(tokenizer)
    answer: dict[str, Any] = {"perplexity": {}, "perplexity_tokens": plan.perplexity_length, "prefill": []}
    with Progress("perplexity", 2) as progress:
        for name, attention in language.ATTENTIONS.items():
            progress.step(name)
            with attention():
                answer["perplexity"][name] = language.perplexity(model, ids[: plan.perplexity_length])
    for number, dtype in enumerate(("fp32", "bf16")):
        model = model.to(DTYPES[dtype])
        answer["prefill"] += _prefill(plan, model, ids, dtype, until=(0.42, 0.68)[number])
    return answer


def _prefill(plan: Plan, model: Any, ids: torch.Tensor, dtype: str, until: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with Progress(f"prefill {dtype}", len(plan.prefill_lengths)) as progress:
        for attention in language.ATTENTIONS.values():
            with attention():
                language.prefill_seconds(model, ids[:128])
        expected = 0.0
        for length in plan.prefill_lengths:
            progress.step(f"{length} tokens")
            row: dict[str, Any] = {"dtype": dtype, "tokens": length}
            rows.append(row)
            if expected > max(0.0, plan.seconds_until(until)):
                row["left_out"] = f"about {expected:.0f} s"
                continue
            times: dict[str, list[float]] = {name: [] for name in language.ATTENTIONS}
            begin = time.monotonic()
            for _ in range(3):
                for name, attention in language.ATTENTIONS.items():
                    with attention():
                        times[name].append(language.prefill_seconds(model, ids[:length]))
                once = sum(values[-1] for values in times.values())
                # A doubled length costs up to four times as much: more rounds only while that leaves enough.
                if time.monotonic() - begin + once > 4 or 5 * once > plan.seconds_until(until):
                    break
            row["seconds"] = {name: asdict(Timing.of(values)) for name, values in times.items()}
            expected = 3.5 * once
    return rows


def model_report(model: dict[str, Any]) -> str:
    if "unavailable" in model:
        return f"  left out: {model['unavailable']}"
    ours, theirs = model["perplexity"]["flashtile"], model["perplexity"]["torch"]
    rows, skipped = [], []
    for row in model["prefill"]:
        name = f"prefill {row['dtype']}, {row['tokens']} tokens"
        if "left_out" in row:
            skipped.append(f"{name} ({row['left_out']})")
            continue
        times = {library: timing["median"] for library, timing in row["seconds"].items()}
        ratio = times["torch"] / times["flashtile"]
        rows.append(
            [
                name,
                format_seconds(times["torch"]),
                format_seconds(times["flashtile"]),
                f"{ratio:.2f}x",
                bar(ratio / 4, 24),
            ]
        )
    header = ["the whole model", "torch", "flashtile", "faster", "1x    2x    3x    4x".rjust(24)]
    perplexity = (
        f"  perplexity of {model['perplexity_tokens']} tokens: {theirs:.4f} with torch's attention, "
        f"{ours:.4f} with flashtile's\n"
    )
    lines = [perplexity, table(header, rows)]
    if skipped:
        lines.append("  no time (--minutes gives more) for " + "; ".join(skipped))
    return "\n".join(lines)


def _exactness() -> list[dict[str, Any]]:
    rows = []
    with Progress("exactness", 4) as progress:
        for dtype in ("fp64", "fp32", "bf16", "fp16"):
            progress.step(dtype)
            case = Case("exactness", 1, 4, 512, 64, dtype, direction="backward")
            exact = runs.oracle(case)
            errors = {
                name: runs.largest_error(runs.outputs(runs.LIBRARIES[name](case), case), exact)
                for name in LIBRARIES
            }
            rows.append({"dtype": dtype, "errors": errors})
    return rows


def exactness_report(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        for title, results in (("output", ("output",)), ("gradients", runs.NAMES)):
            worst = [max(row["errors"][name][result] for result in results) for name in LIBRARIES]
            cells = [f"{error:.1e}" for error in worst]
            if row["dtype"] == "fp64":
                cells[LIBRARIES.index("standard")] = "oracle"
            lines.append([f"{row['dtype']} {title}", *cells])
    return table(["", *TITLES.values()], lines)


def _speed(plan: Plan) -> list[dict[str, Any]]:
    cases = [
        Case("demo", 1, 8, plan.speed_length, 64, dtype, direction=direction)
        for direction in ("forward", "backward")
        for dtype in ("fp32", "bf16", "fp16")
    ]
    rows = []
    with Progress("speed", len(cases)) as progress:
        for case in cases:
            progress.step(case.name)
            names = [name for name in LIBRARIES if not runs.left_out(name, case, machine.memory_bytes())]
            timings = interleave(
                {name: runs.make_run(runs.LIBRARIES[name](case), case) for name in names},
                rounds=5,
                seconds=0.3 if plan.quick else max(0.5, min(4.0, plan.seconds_until(0.9) / len(cases))),
            )
            rows.append(
                {
                    "case": case.as_dict(),
                    "gflops": {name: case.flops / timing.median / 1e9 for name, timing in timings.items()},
                    "seconds": {name: asdict(timing) for name, timing in timings.items()},
                }
            )
    return rows


def speed_report(rows: list[dict[str, Any]], measured: dict[str, float | None]) -> str:
    lines = []
    for row in rows:
        rates = row["gflops"]
        cells = [f"{rates[name]:.0f}" if name in rates else "-" for name in LIBRARIES]
        ratios = [
            f"{rates['flashtile'] / rates[name]:.1f}x" if name in rates else "-" for name in LIBRARIES[1:]
        ]
        case = row["case"]
        lines.append([f"{case['direction']} {case['dtype']}", *cells, *ratios])
    header = ["GFLOP/s", *TITLES.values(), "vs torch", "vs standard"]
    dot = measured["bf16_dot_gflops"]
    ceiling = f"  this machine's peaks: {measured['fma_gflops']:.0f} GFLOP/s of float32 multiply-adds" + (
        f", {dot:.0f} of bfloat16 dot products" if dot else ""
    )
    return table(header, lines) + "\n" + ceiling


def _memory(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    base = Case("memory", 1, 2, 0, 64)
    answer = {}
    with Progress("memory", len(LIBRARIES)) as progress:
        for library in LIBRARIES:
            progress.step(f"{library}, in a process of its own")
            cases = [replace(base, query_length=length) for length in plan.memory_lengths]
            cases = [case for case in cases if not runs.left_out(library, case, machine.memory_bytes() // 2)]
            grown = memory.measure(library, cases)
            answer[library] = [
                {"length": case.query_length, "mib": (bytes_ - case.result_bytes) / MIB}
                for case, bytes_ in zip(cases, grown, strict=True)
            ]
    return answer


def memory_report(measured: dict[str, list[dict[str, Any]]]) -> str:
    lengths = [point["length"] for point in measured["flashtile"]]
    found = {name: {point["length"]: point["mib"] for point in points} for name, points in measured.items()}
    rows = [
        [
            f"S = {length}",
            *[f"{found[name][length]:.1f} MiB" if length in found[name] else "-" for name in LIBRARIES],
        ]
        for length in lengths
    ]
    return table(["", *TITLES.values()], rows)


def _agrees(result: dict[str, Any]) -> bool:
    """Perplexities equal to four decimals, and no error above twice that of standard attention."""
    perplexities = result["model"].get("perplexity")
    if perplexities and abs(perplexities["flashtile"] - perplexities["torch"]) >= 1e-4:
        return False
    for row in result["exactness"]:
        ours, standard = row["errors"]["flashtile"], row["errors"]["standard"]
        floor = 8 * torch.finfo(DTYPES[row["dtype"]]).eps
        if any(not ours[name] <= 2 * standard[name] + floor for name in ours):
            return False
    return True


def _write(output: Path, result: dict[str, Any], quiet: bool) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    written = [str(output / "demo.json")]
    try:
        from flashtile.bench import figure
    except ImportError:
        note = "no figure: pip install 'flashtile[plot]' brings matplotlib"
    else:
        figure.draw(result, output / "demo.png")
        written.insert(0, str(output / "demo.png"))
        note = ""
    if not quiet:
        good = styled("agrees with the oracle", "green")
        verdict = good if result["agrees"] else styled("DISAGREES with the oracle", "red")
        print(f"\n{verdict}; {result['seconds']:.0f} s; wrote {' and '.join(written)}. {note}".rstrip())
