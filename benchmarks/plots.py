"""Plots of cpu.json: `python -m benchmarks.plots [FOLDER]` draws them again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers import TITLES
from flashtile.bench import figure as figures
from flashtile.bench import machine
from flashtile.bench.cases import DTYPES, Case
from flashtile.bench.compare import ceiling_of

COLORS = {
    "flex": "#8250df",
    "ort-mha": "#1a7f37",
    "ort-gqa": "#4ac26b",
    "ort-attention": "#aceebb",
    "openvino": "#bf3989",
}
LOOK = {name: (title, COLORS.get(name) or figures.LOOK[name][1]) for name, title in TITLES.items()}
Results = list[dict[str, Any]]


def draw_all(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draw every plot that the results have cases for, and return the files."""
    written = []
    results = found["results"]
    for direction in ("forward", "backward"):
        chosen = [r for r in results if r["case"]["group"] == "long" and r["case"]["direction"] == direction]
        if chosen:
            written.append(draw_long(chosen, found, folder / f"{direction}.png"))
    short = [r for r in results if r["case"]["group"] in ("decode", "small")]
    if short:
        written.append(draw_short(short, found, folder / "decode_and_small.png"))
    if found["memory"]:
        written.append(draw_memory(found, folder / "memory.png"))
    written.append(draw_roofline(found, folder / "roofline.png"))
    return written


def titled_figure(found: dict[str, Any], title: str, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    facts = found["machine"]
    where = f"{machine.processor(facts)}, torch {facts['versions']['torch']}"
    figure.suptitle(f"{title}\n{where}", fontsize=12, fontweight="bold")
    return figure


def legend_below(figure: Figure, axes: list[Axes], titles: Iterable[str] = TITLES.values()) -> None:
    """One legend for all panels, under them, in the order of the titles."""
    handles = {
        label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    order = [title for title in titles if title in handles] or list(handles)
    shown = [handles[label] for label in order]
    figure.legend(shown, order, loc="outside lower center", ncols=8, frameon=False, fontsize=9)


def bars(axes: Axes, groups: list[str], results: Results, rate: Any, values: str = "{:.0f}") -> None:
    """One group of bars for each result; peers that none of the results has are left out."""
    peers = [name for name in TITLES if any("seconds" in r["peers"].get(name, {}) for r in results)]
    series = {
        name: [rate(r, name) if "seconds" in r["peers"].get(name, {}) else None for r in results]
        for name in peers
    }
    figures.grouped_bars(axes, groups, series, values, LOOK)


def draw_long(results: Results, found: dict[str, Any], path: Path) -> Path:
    """Panels: head_dim by causal; groups: dtypes; dashed lines: the machine's peaks."""
    head_dims = sorted({r["case"]["head_dim"] for r in results})
    masks = sorted({r["case"]["causal"] for r in results})
    case = results[0]["case"]
    title = f"{case['direction'].capitalize()} GFLOP/s, {case['heads']} heads, length {case['query_length']}"
    figure = titled_figure(found, title, (7.5 * len(masks), 4.2 * len(head_dims)))
    grid = figure.subplots(len(head_dims), len(masks), squeeze=False)
    for row, head_dim in enumerate(head_dims):
        for column, causal in enumerate(masks):
            axes = grid[row][column]
            chosen = [
                r for r in results if (r["case"]["head_dim"], r["case"]["causal"]) == (head_dim, causal)
            ]
            bars(
                axes, [r["case"]["dtype"] for r in chosen], chosen, lambda r, name: r["peers"][name]["gflops"]
            )
            figures.draw_peaks(axes, found["ceilings"])
            axes.set_title(f"head_dim {head_dim}{', causal' if causal else ''}", loc="left", fontsize=10)
            axes.set_ylabel("GFLOP/s")
    legend_below(figure, list(grid.flat))
    figure.savefig(path, dpi=110)
    return path


def draw_short(results: Results, found: dict[str, Any], path: Path) -> Path:
    """Decoding in GB/s of keys and values; small problems as ratios to torch SDPA."""
    figure = titled_figure(found, "Decoding, and small problems", (15, 8))
    decode, small = figure.subplots(2, 1)
    steps = [r for r in results if r["case"]["group"] == "decode"]
    if steps:
        draw_decode(decode, steps, found["ceilings"])
    shorts = [
        r for r in results if r["case"]["group"] == "small" and "seconds" in r["peers"].get("torch", {})
    ]
    if shorts:

        def ratio(result: dict[str, Any], name: str) -> float:
            peers = result["peers"]
            return peers["torch"]["seconds"]["median"] / peers[name]["seconds"]["median"]

        bars(
            small,
            [r["case"]["name"].replace("forward ", "").replace(" ", "\n") for r in shorts],
            shorts,
            ratio,
            "{:.1f}",
        )
    small.set_yscale("log")
    small.set_title("small: speed relative to torch SDPA", loc="left", fontsize=10)
    legend_below(figure, [decode, small])
    figure.savefig(path, dpi=110)
    return path


def draw_decode(axes: Axes, results: Results, ceilings: dict[str, float | None]) -> None:
    """GB/s of keys and values, under what bounds each case in the tables, too."""

    def bandwidth(result: dict[str, Any], name: str) -> float:
        return (
            Case.from_dict(result["case"]).key_value_bytes / result["peers"][name]["seconds"]["median"] / 1e9
        )

    bars(axes, [r["case"]["dtype"] for r in results], results, bandwidth)
    for group, result in enumerate(results):
        kind, ceiling = ceiling_of(Case.from_dict(result["case"]), ceilings)
        axes.hlines(ceiling / 1e9, group - 0.45, group + 0.45, "#57606a", "--", linewidth=0.8)
        axes.annotate(f"{kind} {ceiling / 1e9:.0f}", (group - 0.45, ceiling / 1e9), fontsize=8, va="bottom")
    title = "decode: GB/s of keys and values (dashed: reading as many bytes again and again)"
    axes.set_title(title, loc="left", fontsize=10)


def draw_memory(found: dict[str, Any], path: Path) -> Path:
    """Extra memory by length; backward passes dashed."""
    figure = titled_figure(found, "Memory beyond inputs and results, 2 heads, head_dim 64, float32", (9, 4.5))
    axes = figure.subplots()
    look = {}
    for name in found["memory"]:
        label, color = LOOK[name.split()[0]]
        look[name] = (f"{label}, {name.split()[1]}", color)
    figures.draw_memory(axes, found["memory"], look)
    legend_below(figure, [axes])
    figure.savefig(path, dpi=110)
    return path


def least_bytes(case: Case) -> int:
    """Inputs read and results written once: Q, O and K, V; backward Q, O, dO, dQ and K, V, dK, dV."""
    passes = 2 if case.direction == "backward" else 1
    numbers = 2 * case.batch * case.heads * case.query_length * case.head_dim
    return passes * (numbers * DTYPES[case.dtype].itemsize + case.key_value_bytes)


def draw_roofline(found: dict[str, Any], path: Path) -> Path:
    """flashtile's rates over FLOPs per byte, under what memory and arithmetic allow.

    Bytes are those of inputs and results, each moved once: what no algorithm can do without.
    """
    figure = titled_figure(found, "flashtile under the roofline", (9, 5))
    axes = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {}
    for result in found["results"]:
        if "gflops" in (peer := result["peers"].get("flashtile", {})):
            case = Case.from_dict(result["case"])
            label = f"{case.group}, {case.direction} {case.dtype}"
            points.setdefault(label, []).append((case.flops / least_bytes(case), peer["gflops"]))
    colors = {"fp32": "#1f6feb", "bf16": "#1a7f37", "fp16": "#bf3989"}
    shapes = {"long, forward": "o", "long, backward": "s", "decode, forward": "^", "small, forward": "D"}
    for label, places in points.items():
        kind, dtype = label.rsplit(" ", 1)
        axes.scatter(*zip(*places, strict=True), label=label, s=30, marker=shapes[kind], color=colors[dtype])
    ceilings = found["ceilings"]
    figures.draw_peaks(axes, ceilings)
    rate, most = ceilings["read_gb_per_s"], max(ceilings["fma_gflops"], ceilings["bf16_dot_gflops"] or 0.0)
    least = min(intensity for places in points.values() for intensity, _ in places) / 2
    axes.plot([least, most / rate], [least * rate, most], color="#57606a", linewidth=0.8, linestyle="--")
    axes.annotate(f"memory, {rate:.0f} GB/s", (least, least * 1.8 * rate), fontsize=8)
    axes.set(xscale="log", yscale="log", ylabel="GFLOP/s")
    axes.set_xlabel("FLOPs for each byte of inputs and results")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9, ncols=2)
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    print(*draw_all(json.loads((target / "cpu.json").read_text()), target), sep="\n")
