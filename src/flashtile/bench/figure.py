"""The figure of `flashtile demo`: prefill, speed, memory and exactness in four panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashtile.bench import machine

# library: label and colour
Look = Mapping[str, tuple[str, str]]
LOOK: Look = {
    "flashtile": ("flashtile", "#1f6feb"),
    "torch": ("torch SDPA", "#8b949e"),
    "standard": ("standard attention", "#d8b365"),
}
Series = dict[str, list[float | None]]


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the figure of a demonstration's result as PNG."""
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    (prefill, speed), (memory, exactness) = figure.subplots(2, 2)
    title = f"flashtile on {machine.processor(result['machine'])}"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    _prefill(prefill, result["model"])
    _speed(speed, result["speed"], result["ceilings"])
    draw_memory(memory, result["memory"])
    _titled(memory, "Memory of a forward pass beyond inputs and result (MiB, lower is better)")
    _exactness(exactness, result["exactness"])
    figure.savefig(path, dpi=120)


def grouped_bars(
    axes: Axes, groups: Sequence[str], series: Series, values: str = "{:.0f}", look: Look = LOOK
) -> None:
    """Bars in groups, one colour per library, with the value above each bar; None leaves a gap."""
    width = 0.8 / len(series)
    for number, (library, heights) in enumerate(series.items()):
        label, color = look[library]
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(places, [height or 0.0 for height in heights], width, label=label, color=color)
        texts = [values.format(height) if height is not None else "" for height in heights]
        axes.bar_label(bars, texts, fontsize=8, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)


def draw_peaks(axes: Axes, measured: Mapping[str, float | None]) -> None:
    """Dashed lines where the machine's arithmetic ends."""
    for name, title in (("fma_gflops", "FMA peak"), ("bf16_dot_gflops", "bf16 dot peak")):
        draw_peak(axes, measured.get(name), title)


def draw_peak(axes: Axes, peak: float | None, title: str) -> None:
    """A dashed line at what a machine can do at most, if that is known."""
    if peak:
        axes.axhline(peak, color="#57606a", linewidth=0.8, linestyle="--")
        place = ("axes fraction", "data")
        axes.annotate(title, (0.002, peak), xycoords=place, fontsize=8, ha="left", va="bottom")


def draw_memory(axes: Axes, measured: Mapping[str, list[dict[str, Any]]], look: Look = LOOK) -> None:
    """MiB by sequence length, both logarithmic, a line per library, with the value at each line's end."""
    lengths: set[int] = set()
    for name, points in measured.items():
        label, color = look[name]
        sizes = [max(point["mib"], 0.1) for point in points]
        places = [point["length"] for point in points]
        lengths.update(places)
        style = "--" if name.endswith("backward") else "-"
        axes.plot(places, sizes, style, marker="o", color=color, label=label)
        end, number = (places[-1], sizes[-1]), f"{sizes[-1]:.1f}"
        shift = (6, -9) if sizes[-1] == min(points_at(measured, places[-1])) else (6, 3)
        axes.annotate(number, end, xytext=shift, textcoords="offset points", fontsize=8, color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [f"{length:,}" for length in sorted(lengths)])
    axes.set_xlabel("sequence length")
    axes.set_ylabel("MiB")
    axes.margins(x=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def points_at(measured: Mapping[str, list[dict[str, Any]]], length: int) -> list[float]:
    """What all lines have at one length."""
    return [
        max(point["mib"], 0.1)
        for points in measured.values()
        for point in points
        if point["length"] == length
    ]


def _titled(axes: Axes, title: str) -> None:
    """A title, and the legend between it and the bars, where it hides nothing."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=26)
    above = (0.0, 1.0)
    axes.legend(loc="lower left", bbox_to_anchor=above, ncols=4, frameon=False, fontsize=9, borderaxespad=0.2)


def _prefill(axes: Axes, model: dict[str, Any]) -> None:
    rows = [row for row in model.get("prefill", ()) if "seconds" in row]
    if not rows:
        reason = model.get("unavailable", "no time")
        axes.text(0.5, 0.5, f"no language model:\n{reason}", ha="center", wrap=True)
        axes.set_axis_off()
        return
    series: Series = {
        library: [row["seconds"][library]["median"] for row in rows] for library in ("flashtile", "torch")
    }
    grouped_bars(axes, [f"{row['tokens']}\n{row['dtype']}" for row in rows], series, "{:.1f}")
    axes.set_ylabel("seconds")
    found = ", ".join(f"{number:.4f} ({library})" for library, number in model["perplexity"].items())
    axes.set_xlabel(f"tokens; perplexity {found}")
    _titled(axes, "SmolLM2-135M reads Hamlet: prefill (seconds, lower is better)")


def _speed(axes: Axes, rows: list[dict[str, Any]], measured: dict[str, float | None]) -> None:
    groups = [f"{row['case']['direction']}\n{row['case']['dtype']}" for row in rows]
    grouped_bars(axes, groups, {library: [row["gflops"].get(library) for row in rows] for library in LOOK})
    draw_peaks(axes, measured)
    axes.set_ylabel("GFLOP/s")
    case = rows[0]["case"]
    shape = f"({case['batch']}, {case['heads']}, {case['query_length']}, {case['head_dim']})"
    _titled(axes, f"Speed on {shape} (GFLOP/s, higher is better)")


def _exactness(axes: Axes, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["dtype"] != "fp64"]  # where standard attention is the oracle
    series: Series = {library: [max(row["errors"][library].values()) for row in rows] for library in LOOK}
    grouped_bars(axes, [row["dtype"] for row in rows], series, "{:.0e}")
    axes.set_yscale("log")
    axes.set_ylabel("largest error")
    _titled(axes, "Exactness: outputs and gradients against float64 (lower is better)")
