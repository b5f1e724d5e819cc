"""The picture of training.json: tokens a second by context for each dtype, and memory.

python -m benchmarks.training_figure benchmarks/results/training.json    draw it again
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashtile.bench import figure as figures
from flashtile.bench import machine

LOOK = {
    "flashtile": figures.LOOK["flashtile"],
    "sdpa": figures.LOOK["torch"],
    "standard": figures.LOOK["standard"],
}


def draw(found: dict[str, Any], path: Path) -> None:
    dtypes = list(dict.fromkeys(result["case"]["dtype"] for result in found["results"]))
    memory = {
        name: [point for point in points if "mib" in point]
        for name, points in (found["memory"] or memory_of(found)).items()
    }
    measured = {name: points for name, points in memory.items() if points}
    panels = len(dtypes) + bool(measured)
    figure = Figure(figsize=(1 + 4.6 * panels, 4.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel, dtype in zip(axes, dtypes, strict=False):
        draw_speed(panel, [result for result in found["results"] if result["case"]["dtype"] == dtype], dtype)
    if measured:
        figures.draw_memory(axes[-1], measured, LOOK)
        axes[-1].set_title("memory of a step (MiB)", loc="left", fontsize=10, fontweight="bold")
    facts, case = found["machine"], found["results"][0]["case"]
    where = facts.get("gpu") or machine.processor(facts)
    parameters = found["results"][0]["parameters"]
    figure.suptitle(f"Training a GPT of {parameters / 1e6:,.1f}M parameters ({case['preset']})\n{where}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def draw_speed(axes: Axes, results: list[dict[str, Any]], dtype: str) -> None:
    """Tokens a second, a line for each attention; what was left out has no point."""
    contexts = [result["case"]["context"] for result in results]
    for name, (label, color) in LOOK.items():
        points = [
            (result["case"]["context"], result["attentions"][name]["tokens_per_s"])
            for result in results
            if "tokens_per_s" in result["attentions"].get(name, {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context (tokens)")
    axes.set_title(f"{dtype}: tokens a second", loc="left", fontsize=10, fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def memory_of(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """On a GPU the timed steps themselves say what they allocate."""
    points: dict[str, list[dict[str, Any]]] = {}
    for result in found["results"]:
        for name, answer in result["attentions"].items():
            if "mib" in answer:
                points.setdefault(name, []).append(
                    {"length": result["case"]["context"], "mib": answer["mib"]}
                )
    return points


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
