"""The figure of parallel.json: `python -m benchmarks.parallel_plots [FOLDER]` draws it again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.parallel import efficiency
from benchmarks.plots import titled_figure
from flashtile.bench import figure as figures

LOOK = {
    "ring, zigzag": ("ring, zigzag", "#1f6feb"),
    "ring, zigzag, no overlap": ("ring, zigzag, no overlap", "#9ec5fe"),
    "ring, contiguous": ("ring, contiguous", "#d8b365"),
    "allgather, zigzag": ("all-gather, zigzag", "#8250df"),
    "ulysses, contiguous": ("Ulysses", "#1a7f37"),
    "mesh, zigzag": ("mesh, zigzag", "#bf3989"),
}
Results = list[dict[str, Any]]


def draw(found: dict[str, Any], path: Path) -> None:
    """Efficiency, bytes beside the formula, and how evenly the ranks work."""
    work = found["work"]
    title = (
        f"Attention over processes of one machine: {work['length']} positions, {work['heads']} heads on "
        f"{work['kv_heads']}, head_dim {work['head_dim']}, {work['dtype']}, causal"
    )
    figure = titled_figure(found, title, (14, 9))
    (forward, backward), (sent, balance) = figure.subplots(2, 2)
    several = [result for result in found["results"] if result["way"]["ranks"] > 1]
    for axes, direction in ((forward, "forward"), (backward, "backward")):
        chosen = [result for result in several if result["direction"] == direction]
        _bars(axes, chosen, lambda result: 100 * efficiency(found, result), "{:.0f}")
        _limits(axes, found, direction)
        axes.set_title(f"{direction}: efficiency (% of one process / P)", loc="left", fontsize=10)
    counted = [result for result in several if result["way"]["overlap"] and result["direction"] == "forward"]
    _bars(sent, counted, lambda result: max(result["bytes"]) / 1e6, "{:.1f}")
    _formulas(sent, counted)
    sent.set_title("forward: MB sent by the rank that sends most (line: formula)", loc="left", fontsize=10)
    _balance(balance, found, [result for result in counted if result["way"]["method"] == "ring"])
    handles, labels = forward.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def _groups(results: Results) -> list[int]:
    return sorted({result["way"]["ranks"] for result in results})


def _bars(axes: Axes, results: Results, height: Callable[[dict[str, Any]], float], values: str) -> None:
    groups = _groups(results)
    series: figures.Series = {}
    for name in LOOK:
        by_ranks = {result["way"]["ranks"]: height(result) for result in results if result["name"] == name}
        if by_ranks:
            series[name] = [by_ranks.get(count) for count in groups]
    figures.grouped_bars(axes, [f"{count} processes" for count in groups], series, values, LOOK)


def _limits(axes: Axes, found: dict[str, Any], direction: str) -> None:
    """Beside as many processes as cores, what a thread on each reaches; over more, what the cores allow."""
    cores = found["machine"]["cores"]
    groups = _groups([result for result in found["results"] if result["way"]["ranks"] > 1])
    for result in found["results"]:
        way = result["way"]
        alone = way["method"] == "one process" and way["threads"] == cores
        if alone and result["direction"] == direction and cores in groups:
            percent = 100 * efficiency(found, result)
            _limit(axes, groups.index(cores), percent, f"one process, {cores} threads", "#57606a")
    for place, count in enumerate(groups):
        if count > cores:
            _limit(axes, place, 100 * cores / count, f"{cores} cores", "#cf222e")


def _limit(axes: Axes, place: float, percent: float, title: str, color: str) -> None:
    """A line over a group of bars, with its name behind the last of them."""
    axes.hlines(percent, place - 0.42, place + 0.42, color=color, linewidth=1, linestyles="--", zorder=0)
    axes.annotate(title, (place + 0.43, percent), fontsize=8, color=color, va="center", ha="left")


def _formulas(axes: Axes, results: Results) -> None:
    """A black line across each bar at the closed form."""
    groups = _groups(results)
    for container in axes.containers:
        label = container.get_label()
        for place, bar in enumerate(getattr(container, "patches", [])):
            for result in results:
                mine = LOOK[result["name"]][0] == label and result["way"]["ranks"] == groups[place]
                if mine and result["formula_bytes"] is not None:
                    left = bar.get_x()
                    height = result["formula_bytes"] / 1e6
                    axes.hlines(height, left, left + bar.get_width(), color="black", linewidth=1.5)


def _balance(axes: Axes, found: dict[str, Any], results: Results) -> None:
    """Kernel seconds of each rank over their mean; dots: the visible pairs."""
    places, labels = 0.0, []
    for result in results:
        seconds, layout = result["kernel_seconds"], result["way"]["layout"]
        pairs = found["visible_pairs"][layout][str(len(seconds))]
        color = LOOK[result["name"]][1]
        xs = [places + rank for rank in range(len(seconds))]
        axes.bar(xs, [one * len(seconds) / sum(seconds) for one in seconds], 0.8, color=color)
        axes.plot(xs, [one * len(pairs) / sum(pairs) for one in pairs], "o", color="black", markersize=4)
        labels.append((places + (len(seconds) - 1) / 2, f"{len(seconds)} processes\n{layout}"))
        places += len(seconds) + 1
    axes.axhline(1.0, color="#57606a", linewidth=0.8, linestyle="--")
    axes.set_xticks([place for place, _ in labels], [label for _, label in labels], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    title = "ring forward: kernel seconds of each rank over the average (dots: visible pairs)"
    axes.set_title(title, loc="left", fontsize=10)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    draw(json.loads((target / "parallel.json").read_text()), target / "parallel.png")
    print(target / "parallel.png")
