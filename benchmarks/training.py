"""Whole training steps of a GPT with flashtile's attention, SDPA's and standard attention.

    python -m benchmarks.training            a small model on the CPU, contexts 256 to 8192, fp32 and bf16
    python -m benchmarks.training --quick    short contexts: does everything work?
    python -m benchmarks.training --preset gpt3-1.3b --device cuda --compile
    python -m benchmarks.training --preset gpt3-2.7b --device cuda --contexts 8192 --batch 1

A step is forward, backward and AdamW, on rows of random tokens that are one document each, so that SDPA is
told `is_causal` and needs no matrix. All attentions share one model; losses are compared first, then steps
are timed in turn. Writes training.json and training.png (training_PRESET for the large shapes). Exit code 1 if
losses disagree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_figure import draw
from benchmarks.training_measure import (
    Case,
    attention_speedup,
    left_out,
    measure_case,
    measure_growth,
    memory_limit,
)
from flashtile import dispatch
from flashtile.bench import ceilings, machine
from flashtile.bench.console import Progress, heading, table
from flashtile.train import ATTENTIONS, PRESETS, model_flops
from flashtile.train.flops import attention_share, known_card, predicted_speedup

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
LARGE_CONTEXTS = (2048, 8192)
# TFLOP/s for each of 8 A100, whose peak is 312: without FlashAttention, with it, and with FlashAttention-2
# (FlashAttention-2, table 1).
PAPER = {
    ("gpt3-1.3b", 2048): (142, 189, 196),
    ("gpt3-1.3b", 8192): (72, 170, 220),
    ("gpt3-2.7b", 2048): (149, 189, 205),
    ("gpt3-2.7b", 8192): (80, 175, 225),
}


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Every dtype and context, with as many rows as make up the tokens of a step."""
    least = given.tokens or (2048 if given.device == "cpu" else 8192)
    return [
        Case(
            given.preset, dtype, context, given.batch or max(1, least // context), given.device, given.compile
        )
        for dtype in given.dtype
        for context in given.contexts
    ]


def peaks(device: str) -> dict[str, float | None]:
    """FLOP/s that the device can do at most, by dtype: measured on a CPU, a GPU's from its data sheet."""
    if device == "cpu":
        threads = torch.get_num_threads()
        fma, dot = ceilings.fma_peak(threads), ceilings.bf16_dot_peak(threads)
        return {"fp32": fma, "bf16": dot or fma}
    card = known_card(torch.device(device))
    return {dtype: card and card.matmul[dtype] for dtype in ("fp32", "bf16")}


def measure(cases: list[Case], given: argparse.Namespace) -> dict[str, Any]:
    limit = given.memory * 2**30 if given.memory else memory_limit(given.device)
    facts = machine.describe()
    if given.device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name(given.device)
    found: dict[str, Any] = {"machine": facts, "peaks": peaks(given.device), "results": [], "memory": {}}
    with Progress("measuring", len(cases)) as progress:
        for case in cases:
            progress.step(case.name)
            result = measure_case(case, given.attentions, given.rounds, given.seconds, limit)
            shape = case.shape
            result |= {
                "parameters": shape.parameters,
                "flops_per_token": model_flops(shape),
                "causal_flops_per_token": model_flops(shape, causal=True),
                "attention_share": attention_share(shape),
            }
            if {"flashtile", "sdpa"} <= set(given.attentions):
                alone = attention_speedup(case, given.rounds)
                result |= {
                    "attention_speedup": alone,
                    "predicted_speedup": predicted_speedup(result["attention_share"], alone),
                }
            found["results"].append(result)
    found["memory"] = measure_memory(cases, given, limit) if given.device == "cpu" else {}
    return found


def measure_memory(cases: list[Case], given: argparse.Namespace, limit: int) -> dict[str, Any]:
    """MiB of a step of one row at each context, in the first dtype; a process for each attention."""
    rows = [Case(case.preset, case.dtype, case.context, 1) for case in cases if case.dtype == given.dtype[0]]
    points: dict[str, Any] = {}
    with Progress("memory", len(given.attentions)) as progress:
        for name in given.attentions:
            progress.step(name)
            reasons = [left_out(name, case, limit) for case in rows]
            tried = [case for case, reason in zip(rows, reasons, strict=True) if not reason]
            grown = iter(measure_growth(tried, name) if tried else ())
            points[name] = [
                {"length": case.context, **({"left_out": reason} if reason else {"mib": next(grown)})}
                for case, reason in zip(rows, reasons, strict=True)
            ]
    return points


def speed_rows(found: dict[str, Any], attentions: list[str]) -> list[list[str]]:
    """A row for each case: our rate and utilisation, then how many times as fast as each other we are."""
    rows = []
    for result in found["results"]:
        case, answers = result["case"], result["attentions"]
        row = [f"{case['dtype']} {case['batch']} x {case['context']}"]
        own = answers.get("flashtile", {}).get("tokens_per_s")
        for name in attentions:
            speed = answers[name].get("tokens_per_s")
            if speed is None:
                row += ["-"] * (3 if name == "flashtile" else 2)
                continue
            flops, peak = speed * result["flops_per_token"], found["peaks"][case["dtype"]]
            row += [f"{speed:,.0f}", f"{flops / 1e12:.3g}"]
            if name == "flashtile":
                row.append(f"{flops / peak:.0%}" if peak else "-")
            else:
                row[-1] = f"{own / speed:.2f}x" if own else "-"
        predicted = result.get("predicted_speedup")
        row += [f"{result['attention_share']:.0%}", f"{predicted:.2f}x" if predicted else "-"]
        rows.append(row)
    return rows


def header(attentions: list[str]) -> list[str]:
    names = ["rows"]
    for name in attentions:
        names += [f"{name} tok/s", *(["TFLOP/s", "MFU"] if name == "flashtile" else ["ratio"])]
    return [*names, "attention", "predicted"]


def report(found: dict[str, Any], attentions: list[str]) -> str:
    lines = [table(header(attentions), speed_rows(found, attentions))]
    lines.append(
        "  TFLOP/s: 6 N + 12 L d S a token; MFU: of the peak; ratio: our tokens a second to the other's.\n"
        "  attention: its share of the causal operations; predicted: the ratio to sdpa, from that share and "
        "from\n  how fast attention alone is."
    )
    if any(found["memory"].values()):
        points = found["memory"]
        lengths = [point["length"] for point in next(iter(points.values()))]
        cells = [
            [f"1 x {length}", *(cell(own[i]) for own in points.values())] for i, length in enumerate(lengths)
        ]
        lines.append("\n" + table(["MiB of a step", *points], cells))
    for result in found["results"]:
        case = result["case"]
        if result["disagreement"]:
            lines.append(f"  WRONG: {case['dtype']} at {case['context']}: {result['disagreement']}")
        for name, answer in result["attentions"].items():
            if "left_out" in answer:
                lines.append(
                    f"  left out: {name}, {case['dtype']} at {case['context']}: {answer['left_out']}"
                )
            if "mib" in answer:
                lines.append(f"  {name}, {case['dtype']} at {case['context']}: {answer['mib']:,.0f} MiB")
        if paper := PAPER.get((case["preset"], case["context"])):
            lines.append(
                f"  the paper, {case['preset']} at {case['context']}, on A100: {paper[0]} TFLOP/s without "
                f"FlashAttention, {paper[1]} with it, {paper[2]} with FlashAttention-2 ({paper[2] / 312:.0%})"
            )
    return "\n".join(lines)


def cell(point: dict[str, Any]) -> str:
    return f"{point['mib']:,.0f}" if "mib" in point else point["left_out"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m benchmarks.training",
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def some(allowed: Any) -> Any:
        def parse_some(text: str) -> list[str]:
            chosen = text.split(",")
            if not set(chosen) <= set(allowed):
                raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {text!r}")
            return chosen

        return parse_some

    large = [name for name in PRESETS if name != "play"]
    parser.add_argument("--preset", choices=["small", *large], default="small")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--dtype", type=some(("fp32", "bf16")), help="default: fp32,bf16; bf16 on a GPU")
    parser.add_argument("--contexts", type=numbers, help="such as 2048,8192")
    parser.add_argument("--attentions", type=some(ATTENTIONS), default=list(ATTENTIONS))
    parser.add_argument("--batch", type=int, help="rows of a step; default: as many as make up --tokens")
    parser.add_argument("--tokens", type=int, help="tokens of a step, default: 2048; 8192 on a GPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--memory", type=int, metavar="GIB", help="what a step may need; default: 7/8 of all")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each attention (default: 7)")
    parser.add_argument("--seconds", type=float, default=15, help="at most about this long per case")
    parser.add_argument("--quick", action="store_true", help="two short contexts, two rounds")
    parser.add_argument(
        "--output", type=Path, help="folder; default: benchmarks/results, or benchmarks/quick"
    )
    given = parser.parse_args(arguments)
    if reason := dispatch.unserved_reason(given.device.partition(":")[0]):
        parser.error(f"--device {given.device}: {reason}")
    on_cpu = given.device == "cpu"
    given.dtype = given.dtype or (["fp32", "bf16"] if on_cpu else ["bf16"])
    given.contexts = given.contexts or list(CONTEXTS if given.preset == "small" else LARGE_CONTEXTS)
    if given.quick:
        given.contexts, given.rounds, given.seconds = [128, 256], 2, 1.0
    given.output = given.output or Path(__file__).parent / ("quick" if given.quick else "results")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    heading(f"Training steps on {given.device}, {given.preset}: {', '.join(given.attentions)}")
    found = measure(cases_of(given), given)
    print(report(found, given.attentions))
    given.output.mkdir(parents=True, exist_ok=True)
    name = "training" if given.preset == "small" else f"training_{given.preset}"
    (given.output / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, given.output / f"{name}.png")
    print(f"wrote {given.output / name}.json and .png")
    return 1 if any(result["disagreement"] for result in found["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
