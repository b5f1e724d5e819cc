"""The figure of `flashtile lab --plot`: traffic by length, and the roofline of a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashtile.lab.algorithms import ALGORITHMS, Algorithm
from flashtile.lab.report import TITLES, Case
from flashtile.lab.roofline import Card

COLORS: dict[Algorithm, str] = {"standard": "#d8b365", "flash1": "#8250df", "flash2": "#1f6feb"}


def draw(case: Case, cards: Sequence[Card], path: Path) -> None:
    """Write the figure; the file's suffix says in which format."""
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    traffic, roofline = figure.subplots(1, 2)
    figure.suptitle(f"Forward and backward: {case}", fontsize=11)
    _traffic(traffic, case)
    _roofline(roofline, case, cards)
    figure.savefig(path, dpi=120)


def _traffic(axes: Axes, case: Case) -> None:
    lengths = sorted({case.length, *(2**power for power in range(7, 18))})
    for algorithm in ALGORITHMS:
        sizes = [replace(case, length=length).counts(algorithm).traffic / 2**30 for length in lengths]
        axes.plot(lengths, sizes, color=COLORS[algorithm], label=TITLES[algorithm])
        axes.plot(case.length, case.counts(algorithm).traffic / 2**30, "o", color=COLORS[algorithm])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequence length")
    axes.set_ylabel("GiB read and written")
    axes.set_title("Traffic of the large memory (lower is better)", loc="left", fontsize=11)
    _finish(axes)


def _roofline(axes: Axes, case: Case, cards: Sequence[Card]) -> None:
    places = {name: case.counts(name).matmul / case.counts(name).traffic for name in ALGORITHMS}
    ridges = [card.matmul[case.dtype] / card.bandwidth for card in cards]
    ends = min(*places.values(), *ridges) / 4, max(*places.values(), *ridges) * 4
    for card, ridge in zip(cards, ridges, strict=True):
        intensities = [ends[0], ridge, ends[1]]
        heights = [card.attainable(intensity, case.dtype) / 1e12 for intensity in intensities]
        axes.plot(intensities, heights, color="#57606a", linewidth=1)
        start = (ends[0], heights[0])
        axes.annotate(
            card.name, start, xytext=(-4, 0), textcoords="offset points", fontsize=8, ha="right", va="center"
        )
        for name, place in places.items():
            axes.plot(place, card.attainable(place, case.dtype) / 1e12, "o", color=COLORS[name])
    for name, place in places.items():
        axes.axvline(place, color=COLORS[name], linestyle="--", linewidth=1, label=TITLES[name])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs of matrix products for each byte")
    axes.set_ylabel(f"TFLOP/s at most, {case.dtype}")
    axes.set_title("Roofline", loc="left", fontsize=11)
    axes.margins(x=0.12)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
