"""Whole training steps of a GPT with flashtile's attention, SDPA's and standard attention.

    python -m benchmarks.training            a small model on the CPU, contexts 256 to 8192
    python -m benchmarks.training --quick    short contexts: does everything work?
    python -m benchmarks.training --preset gpt3-1.3b --device cuda --compile
    python -m benchmarks.training --preset gpt3-2.7b --device cuda --contexts 8192 --batch 1
    python -m benchmarks.training_tables     the numbers into docs/training.md

A step is forward, backward and AdamW, on rows of random tokens that are one document each, so that SDPA is
told `is_causal` and needs no matrix. All attentions share one model; losses are compared first, then steps
are timed in turn. Writes training.json and training.png (training_PRESET for the large shapes). Exit code 1
if losses disagree.
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
from benchmarks.training_tables import report
from flashtile import dispatch
from flashtile.bench import ceilings, machine
from flashtile.bench.console import Progress, heading
from flashtile.cli_types import positive
from flashtile.train import ATTENTIONS, PRESETS, model_flops
from flashtile.train.flops import attention_share, known_card, predicted_speedup

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
LARGE_CONTEXTS = (2048, 8192)


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


def default_dtypes(device: str) -> list[str]:
    """Without instructions for bfloat16 torch multiplies so slowly in it that no attention matters."""
    if device != "cpu":
        return ["bf16"]
    from flashtile.cpu.kinds import TARGET

    return ["fp32", "bf16"] if TARGET.bfloat16_dot else ["fp32"]


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
    parser.add_argument(
        "--dtype",
        type=some(("fp32", "bf16")),
        help="default: fp32, and bf16 where the CPU has instructions for it; bf16 on a GPU",
    )
    parser.add_argument("--contexts", type=numbers, help="such as 2048,8192")
    parser.add_argument("--attentions", type=some(ATTENTIONS), default=list(ATTENTIONS))
    parser.add_argument("--batch", type=int, help="rows of a step; default: as many as make up --tokens")
    parser.add_argument("--tokens", type=int, help="tokens of a step, default: 2048; 8192 on a GPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--memory", type=int, metavar="GIB", help="what a step may need; default: 7/8 of all")
    parser.add_argument("--rounds", type=positive, default=7, help="steps of each attention (default: 7)")
    parser.add_argument("--seconds", type=float, default=170, help="at most about this long per case")
    parser.add_argument("--quick", action="store_true", help="two short contexts, two rounds")
    parser.add_argument(
        "--output", type=Path, help="folder; default: benchmarks/results, or benchmarks/quick"
    )
    given = parser.parse_args(arguments)
    if reason := dispatch.unserved_reason(given.device.partition(":")[0]):
        parser.error(f"--device {given.device}: {reason}")
    given.dtype = given.dtype or default_dtypes(given.device)
    given.contexts = given.contexts or list(CONTEXTS if given.preset == "small" else LARGE_CONTEXTS)
    if given.quick:
        given.contexts, given.tokens = [128, 256], 256
        given.rounds, given.seconds = 2, 1.0
    given.output = given.output or Path(__file__).parent / ("quick" if given.quick else "results")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    heading(f"Training steps on {given.device}, {given.preset}: {', '.join(given.attentions)}")
    if given.device == "cpu" and "bf16" not in given.dtype:
        print(
            "  without bf16, for which this CPU has no instructions (--dtype bf16 measures it all the same)"
        )
    found = measure(cases_of(given), given)
    print(report(found))
    given.output.mkdir(parents=True, exist_ok=True)
    name = "training" if given.preset == "small" else f"training_{given.preset}"
    (given.output / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, given.output / f"{name}.png")
    print(f"wrote {given.output / name}.json and .png")
    return 1 if any(result["disagreement"] for result in found["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
