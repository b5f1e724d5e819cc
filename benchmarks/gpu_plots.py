"""The papers' bar charts from gpu.json: `python -m benchmarks.gpu_plots [FOLDER]` draws them again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.gpu_peers import TITLES
from benchmarks.plots import legend_below
from flashtile.bench import figure as figures

COLORS = {
    "flashtile": "#1f6feb",
    "flashtile, pages of 16": "#54aeff",
    "flashtile, pages of 256": "#9fd0ff",
    "flash": "#8b949e",
    "cudnn": "#1a7f37",
    "efficient": "#bf3989",
    "flex": "#8250df",
    "flash1": "#cf7b35",
    "standard": "#d8b365",
}
LOOK = {name: (title, COLORS[name]) for name, title in TITLES.items()}
Results = list[dict[str, Any]]


def draw_all(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draw every chart that the results have cases for, and return the files."""
    written = []
    for direction in ("forward", "backward"):
        chosen = [
            result
            for result in found["results"]
            if (result["case"]["group"], result["case"]["direction"]) == ("long", direction)
        ]
        if chosen:
            written.append(draw_long(chosen, found, folder / f"gpu_{direction}.png"))
    decode = [result for result in found["results"] if result["case"]["group"] == "decode"]
    if decode:
        written.append(draw_decode(decode, found, folder / "gpu_decode.png"))
    return written


def draw_long(results: Results, found: dict[str, Any], path: Path) -> Path:
    """TFLOP/s by sequence length, as in FlashAttention-2's figures: a panel for each head_dim and mask."""
    head_dims = sorted({result["case"]["head_dim"] for result in results})
    masks = sorted({result["case"]["causal"] for result in results})
    case = results[0]["case"]
    tokens, hidden = case["batch"] * case["query_length"], case["heads"] * case["head_dim"]
    title = f"{case['direction'].capitalize()} pass, {case['dtype']}, {tokens} tokens, hidden size {hidden}"
    figure = _titled(found, title, (10 * len(masks), 3.8 * len(head_dims) + 1))
    grid = figure.subplots(len(head_dims), len(masks), squeeze=False)
    for row, head_dim in enumerate(head_dims):
        for column, causal in enumerate(masks):
            chosen = [
                r for r in results if (r["case"]["head_dim"], r["case"]["causal"]) == (head_dim, causal)
            ]
            chosen.sort(key=lambda result: result["case"]["query_length"])
            axes = grid[row][column]
            _bars(axes, [_thousands(r["case"]["query_length"]) for r in chosen], chosen, "tflops")
            figures.draw_peak(axes, found["ceilings"].get("matmul_tflops"), "measured matrix products")
            axes.set_title(f"head_dim {head_dim}{', causal' if causal else ''}", loc="left", fontsize=10)
            axes.set_ylabel("TFLOP/s")
            axes.set_xlabel("sequence length")
    legend_below(figure, list(grid.flat), TITLES.values())
    figure.savefig(path, dpi=100)
    return path


def draw_decode(results: Results, found: dict[str, Any], path: Path) -> Path:
    """GB/s of keys and values read by one step of decoding."""
    figure = _titled(found, "Decoding, 32 query heads on 8 key heads, head_dim 128", (10, 4.5))
    axes = figure.subplots()
    groups = [f"{r['case']['batch']} x {_thousands(r['case']['key_length'])} keys" for r in results]
    _bars(axes, groups, results, "gb_per_s")
    figures.draw_peak(axes, found["ceilings"].get("copy_gb_per_s"), "measured copy")
    axes.set_ylabel("GB/s of keys and values")
    legend_below(figure, [axes], TITLES.values())
    figure.savefig(path, dpi=100)
    return path


def _titled(found: dict[str, Any], title: str, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    facts = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    where = f"{facts['gpu']}, {versions}, commit {facts['commit']}"
    figure.suptitle(f"{title}\n{where}", fontsize=12, fontweight="bold")
    return figure


def _bars(axes: Axes, groups: list[str], results: Results, unit: str) -> None:
    """Groups of bars; peers that none of the results has are left out."""
    peers = [name for name in TITLES if any(unit in r["peers"].get(name, {}) for r in results)]
    series: figures.Series = {name: [r["peers"].get(name, {}).get(unit) for r in results] for name in peers}
    if series:
        figures.grouped_bars(axes, groups, series, "{:.0f}", LOOK)


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    print(*draw_all(json.loads((target / "gpu.json").read_text()), target), sep="\n")
