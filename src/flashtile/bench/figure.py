"""The figure of `flashtile demo`: prefill, speed, memory and exactness in four panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {"flashtile": "#1f6feb", "torch": "#8b949e", "standard": "#d8b365"}
LABELS = {"flashtile": "flashtile", "torch": "torch SDPA", "standard": "standard attention"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the figure of a demonstration's result as PNG."""
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    (prefill, speed), (memory, exactness) = figure.subplots(2, 2)
    facts = result["machine"]
    figure.suptitle(
        f"flashtile on {facts['cpu']}, {facts['threads']} threads", fontsize=13, fontweight="bold"
    )
    _prefill(prefill, result["model"])
    _speed(speed, result["speed"], result["ceilings"])
    _memory(memory, result["memory"])
    _exactness(exactness, result["exactness"])
    figure.savefig(path, dpi=120)


def grouped_bars(
    axes: Axes, groups: Sequence[str], series: dict[str, list[float | None]], values: str = "{:.0f}"
) -> None:
    """Bars in groups, one colour per library, with the value above each bar; None leaves a gap."""
    width = 0.8 / len(series)
    for number, (library, heights) in enumerate(series.items()):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(
            places,
            [height or 0.0 for height in heights],
            width,
            label=LABELS.get(library, library),
            color=COLORS.get(library),
        )
        texts = [values.format(height) if height is not None else "" for height in heights]
        axes.bar_label(bars, texts, fontsize=8, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)


def legend_above(axes: Axes) -> None:
    """The legend between title and bars, where it hides nothing."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=9, borderaxespad=0.2
    )


def _titled(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=26)
    legend_above(axes)


def _prefill(axes: Axes, model: dict[str, Any]) -> None:
    rows = [row for row in model.get("prefill", ()) if "seconds" in row]
    if not rows:
        axes.text(
            0.5, 0.5, f"no language model:\n{model.get('unavailable', 'no time')}", ha="center", wrap=True
        )
        axes.set_axis_off()
        return
    groups = [
        f"{row['tokens'] // 1024 or row['tokens']}{'k' if row['tokens'] >= 1024 else ''}\n{row['dtype']}"
        for row in rows
    ]
    series: dict[str, list[float | None]] = {
        library: [row["seconds"][library]["median"] for row in rows] for library in ("flashtile", "torch")
    }
    grouped_bars(axes, groups, series, "{:.1f}")
    axes.set_ylabel("seconds")
    _titled(axes, "SmolLM2-135M reads Hamlet: prefill of a prompt (seconds, lower is better)")


def _speed(axes: Axes, rows: list[dict[str, Any]], measured: dict[str, float | None]) -> None:
    groups = [f"{row['case']['direction']}\n{row['case']['dtype']}" for row in rows]
    series: dict[str, list[float | None]] = {
        library: [row["gflops"].get(library) for row in rows]
        for library in ("flashtile", "torch", "standard")
    }
    grouped_bars(axes, groups, series)
    for name, title in (("fma_gflops", "FMA peak"), ("bf16_dot_gflops", "bf16 dot peak")):
        peak = measured.get(name)
        if peak:
            axes.axhline(peak, color="#57606a", linewidth=0.8, linestyle="--")
            axes.annotate(
                title, (1, peak), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom"
            )
    axes.set_ylabel("GFLOP/s")
    case = rows[0]["case"]
    shape = f"({case['batch']}, {case['heads']}, {case['query_length']}, {case['head_dim']})"
    _titled(axes, f"Speed on {shape} (GFLOP/s, higher is better)")


def _memory(axes: Axes, measured: dict[str, list[dict[str, Any]]]) -> None:
    for library, points in measured.items():
        lengths = [point["length"] for point in points]
        sizes = [max(point["mib"], 0.1) for point in points]
        axes.plot(lengths, sizes, marker="o", color=COLORS[library], label=LABELS[library])
        axes.annotate(
            f"{sizes[-1]:.0f} MiB",
            (lengths[-1], sizes[-1]),
            xytext=(6, -3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequence length")
    axes.set_ylabel("MiB")
    axes.margins(x=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _titled(axes, "Memory of a forward pass beyond its inputs (MiB, lower is better)")


def _exactness(axes: Axes, rows: list[dict[str, Any]]) -> None:
    groups = [row["dtype"] for row in rows]
    series: dict[str, list[float | None]] = {
        library: [max(row["errors"][library].values()) for row in rows]
        for library in ("flashtile", "torch", "standard")
    }
    grouped_bars(axes, groups, series, "{:.0e}")
    axes.set_yscale("log")
    axes.set_ylabel("largest error")
    _titled(axes, "Exactness: outputs and gradients against float64 (lower is better)")
