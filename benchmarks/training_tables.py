"""The tables of training.json: for the terminal, and between the marks of docs/training.md."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.readme import between, machine_line, markdown
from flashtile.bench.console import table

BEGIN, END = "<!-- training:begin -->", "<!-- training:end -->"
# TFLOP/s for each of 8 A100, whose peak is 312: without FlashAttention, with it, and with FlashAttention-2
# (FlashAttention-2, table 1).
PAPER = {
    ("gpt3-1.3b", 2048): (142, 189, 196),
    ("gpt3-1.3b", 8192): (72, 170, 220),
    ("gpt3-2.7b", 2048): (149, 189, 205),
    ("gpt3-2.7b", 8192): (80, 175, 225),
}


def speed_rows(found: dict[str, Any]) -> list[list[str]]:
    """A row for each case: rates, our utilisation, and how many times as fast as each other we are."""
    rows = []
    for result in found["results"]:
        case, answers = result["case"], result["attentions"]
        row = [f"{case['dtype']} {case['batch']} x {case['context']}"]
        own, peak = answers.get("flashtile", {}).get("tokens_per_s"), found["peaks"][case["dtype"]]
        for name, answer in answers.items():
            speed = answer.get("tokens_per_s")
            if speed is None:
                row += ["-", "-", "-"]
                continue
            flops = speed * result["flops_per_token"]
            compared = f"{own / speed:.2f}x" if own else "-"
            utilisation = f"{flops / peak:.0%}" if peak else "-"
            row += [f"{speed:,.0f}", f"{flops / 1e12:.3g}", utilisation if name == "flashtile" else compared]
        predicted = result.get("predicted_speedup")
        row += [f"{result['attention_share']:.0%}", f"{predicted:.2f}x" if predicted else "-"]
        rows.append(row)
    return rows


def header(found: dict[str, Any]) -> list[str]:
    names = ["rows"]
    for name in found["results"][0]["attentions"]:
        names += [f"{name} tok/s", "TFLOP/s", "MFU" if name == "flashtile" else "ratio"]
    return [*names, "attention", "predicted"]


LEGEND = (
    "TFLOP/s: 6 N + 12 L d S a token; MFU: of the peak; ratio: flashtile's tokens a second to the other's; "
    "attention: its share of the causal operations; predicted: the ratio to sdpa, from that share and from "
    "how fast attention alone is."
)


def memory_rows(found: dict[str, Any]) -> list[list[str]]:
    """A row for each context; empty on a GPU, where the steps themselves say what they need."""
    points = found["memory"]
    lengths = [point["length"] for point in next(iter(points.values()), [])]
    return [[f"1 x {n}", *(cell(own[i]) for own in points.values())] for i, n in enumerate(lengths)]


def cell(point: dict[str, Any]) -> str:
    return f"{point['mib']:,.0f}" if "mib" in point else str(point["left_out"])


def remarks(found: dict[str, Any]) -> list[str]:
    """What is wrong, was left out, or stands in the paper."""
    lines = []
    for result in found["results"]:
        case = result["case"]
        where = f"{case['dtype']} at {case['context']}"
        if result["disagreement"]:
            lines.append(f"WRONG: {where}: {result['disagreement']}")
        for name, answer in result["attentions"].items():
            if "left_out" in answer:
                lines.append(f"left out: {name}, {where}: {answer['left_out']}")
            if "mib" in answer:
                lines.append(f"a step of {name}, {where}: {answer['mib']:,.0f} MiB")
        if paper := PAPER.get((case["preset"], case["context"])):
            lines.append(
                f"the paper, {case['preset']} at {case['context']}, on A100: {paper[0]} TFLOP/s without "
                f"FlashAttention, {paper[1]} with it, {paper[2]} with FlashAttention-2 ({paper[2] / 312:.0%})"
            )
    return lines


def report(found: dict[str, Any]) -> str:
    """For a terminal."""
    parts = [table(header(found), speed_rows(found)), *textwrap.wrap(LEGEND, 100)]
    if rows := memory_rows(found):
        parts += ["", table(["MiB of a step", *found["memory"]], rows)]
    return "\n".join([*parts, *remarks(found)])


def document(found: dict[str, Any]) -> str:
    """As Markdown."""
    parts = [machine_line(found["machine"]), markdown(header(found), speed_rows(found)), LEGEND]
    if rows := memory_rows(found):
        parts.append(markdown(["MiB of a step", *found["memory"]], rows))
    parts += [f"- {remark}" for remark in remarks(found)]
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_tables", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/training.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/training.md"))
    options = parser.parse_args(arguments)
    found = json.loads(options.results.read_text())
    text = options.document.read_text()
    options.document.write_text(between(text, BEGIN, END, document(found)))


if __name__ == "__main__":
    main()
