"""What attention over 8 to 1024 GPUs gives on paper: `python -m benchmarks.scaling`.

    python -m benchmarks.scaling                                      the tables of docs/scaling.md
    python -m benchmarks.scaling --length 524288 --kv-heads 4         other sequences, other heads
    python -m benchmarks.scaling --card h200 --efficiency 0.7 --node 72
    python -m benchmarks.scaling --plot scaling.png
    python -m benchmarks.scaling --write                              docs/scaling.md and .png anew

Nothing is measured: flashtile.lab.scaling has the formulas and assumptions, docs/scaling.md explains them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.readme import between, markdown
from flashtile.lab import scaling
from flashtile.lab.roofline import CARDS
from flashtile.lab.scaling import Cluster, Shape, Split

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- scaling:begin -->", "<!-- scaling:end -->"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SHAPES = [Shape(length, kv_heads=kv_heads) for kv_heads in (32, 8) for length in (2**17, 2**20)]
LOOK = {
    "ring, NVLink everywhere": "#1f6feb",
    "ring": "#9ec5fe",
    "Ulysses": "#1a7f37",
    "mesh": "#bf3989",
    "all-gather": "#8250df",
}


def ways(gpus: int, cluster: Cluster) -> dict[str, tuple[Split, Cluster]]:
    """How so many GPUs attend, and over which links."""
    inside = min(gpus, cluster.node)
    return {
        "ring, NVLink everywhere": (Split(gpus), replace(cluster, node=gpus)),
        "ring": (Split(gpus), cluster),
        "Ulysses": (Split(heads=gpus), cluster),
        "mesh": (Split(gpus // inside, inside), cluster),
        "all-gather": (Split(gpus, gathering=True), cluster),
    }


def share(shape: Shape, split: Split, cluster: Cluster) -> float | None:
    """Efficiency in percent; None where the GPUs cannot share the sequence or its heads so."""
    refused = scaling.refusal(shape, split) is not None
    return None if refused else 100 * scaling.speedup_share(shape, split, cluster)


def efficiency_table(shape: Shape, cluster: Cluster) -> str:
    rows = []
    for gpus in GPUS:
        found = [share(shape, *way) for way in ways(gpus, cluster).values()]
        shown = ["-" if one is None else f"{one:.0f}%" for one in found]
        rows.append([str(gpus), f"{shape.length // gpus:,}", *shown])
    return markdown(["GPUs", "tokens on each", *LOOK], rows)


def tokens_table(shapes: list[Shape], cluster: Cluster) -> str:
    """From how many tokens on each GPU a ring hides its messages, and is ahead of Ulysses."""
    rows = []
    for shape in shapes:
        for link in (cluster.near, cluster.far):
            hidden = scaling.hiding_tokens(shape, link, cluster)
            inside = min(cluster.node, shape.heads)
            of_mesh = scaling.hiding_tokens(shape, link, cluster, inside) / inside
            even = [
                f"{scaling.break_even_tokens(shape, gpus, link, cluster):,.0f}"
                if gpus <= shape.heads
                else "-"
                for gpus in GPUS[:3]
            ]
            heads = f"{shape.heads} on {shape.kv_heads}"
            rows.append([f"{heads}, {link.name}", f"{hidden:,.0f}", f"{of_mesh:,.0f}", *even])
    header = ["heads, link", "a ring hides its messages", f"a mesh of nodes x {cluster.node} does"]
    return markdown([*header, *(f"ahead of Ulysses on {gpus}" for gpus in GPUS[:3])], rows)


def report(shapes: list[Shape], cluster: Cluster) -> str:
    """All tables, as Markdown."""
    heads = {(shape.heads, shape.kv_heads): shape for shape in shapes}
    parts = [
        f"{cluster.card.name}, {100 * cluster.efficiency:.0f}% of its peak, {cluster.node} GPUs in a node; "
        "causal, zigzag.",
        "**Tokens on each GPU from which on, forward**",
        tokens_table(list(heads.values()), cluster),
    ]
    for shape in shapes:
        title = f"{shape.length:,} tokens, {shape.heads} heads on {shape.kv_heads}, head_dim {shape.head_dim}"
        parts += [f"**Efficiency, forward and backward: {title}**", efficiency_table(shape, cluster)]
    return "\n\n".join(parts)


def draw(shapes: list[Shape], cluster: Cluster, path: Path) -> None:
    """Efficiency by the number of GPUs, one panel for each shape."""
    figure = Figure(figsize=(6.5 * len(shapes[:2]), 4.2 * -(-len(shapes) // 2)), layout="constrained")
    figure.suptitle(
        f"Attention on many GPUs, on paper: {cluster.card.name}, {cluster.node} in a node", fontsize=12,
        fontweight="bold",
    )  # fmt: skip
    panels = figure.subplots(-(-len(shapes) // 2), len(shapes[:2]), squeeze=False).flat
    for axes, shape in zip(panels, shapes, strict=False):
        _panel(axes, shape, cluster)
    handles, labels = next(iter(figure.axes)).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LOOK), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, shape: Shape, cluster: Cluster) -> None:
    for name, color in LOOK.items():
        found = {gpus: share(shape, *ways(gpus, cluster)[name]) for gpus in GPUS}
        points = {gpus: height for gpus, height in found.items() if height is not None}
        style = "--" if "everywhere" in name else "-"
        axes.plot(
            list(points), list(points.values()), style, marker="o", markersize=4, color=color, label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
    axes.set_ylim(0, 105)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("efficiency (%)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{shape.length:,} tokens, {shape.heads} heads on {shape.kv_heads}"
    axes.set_title(title, loc="left", fontsize=10)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shape, cluster = Shape(1), Cluster()
    parser.add_argument(
        "--length", type=int, nargs="+", help="tokens, a multiple of 2048 (default: 131072 1048576)"
    )
    parser.add_argument("--heads", type=int, default=shape.heads)
    parser.add_argument("--kv-heads", type=int, nargs="+", help="(default: 32 8)")
    parser.add_argument("--head-dim", type=int, default=shape.head_dim)
    parser.add_argument("--card", choices=CARDS, default="h100", help="(default: h100)")
    parser.add_argument("--efficiency", type=float, default=cluster.efficiency, help="share of its peak")
    parser.add_argument("--node", type=int, default=cluster.node, help="GPUs joined by NVLink (default: 8)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figure")
    parser.add_argument(
        "--write", action="store_true", help="write docs/scaling.md and docs/scaling.png anew"
    )
    given = parser.parse_args(arguments)
    changed = [f"--{name}" for name in ("length", "kv_heads", "plot") if getattr(given, name) is not None]
    if given.write and changed:
        parser.error(f"--write is for what docs/scaling.md shows; leave out {', '.join(changed)}")
    for length in given.length or []:
        if length < 2 * GPUS[-1] or length % (2 * GPUS[-1]):
            parser.error(f"--length must be a multiple of {2 * GPUS[-1]}, got {length}")
    for kv_heads in given.kv_heads or []:
        if kv_heads < 1 or given.heads % kv_heads:
            parser.error(f"--kv-heads must divide --heads, {given.heads}, got {kv_heads}")
    return given


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    shapes = [
        Shape(length, given.heads, kv_heads, given.head_dim)
        for kv_heads in given.kv_heads or dict.fromkeys(shape.kv_heads for shape in SHAPES)
        for length in given.length or dict.fromkeys(shape.length for shape in SHAPES)
    ]
    cluster = Cluster(card=CARDS[given.card], node=given.node, efficiency=given.efficiency)
    print(report(shapes, cluster))
    if given.plot is not None:
        draw(shapes, cluster, given.plot)
    if given.write:
        page = DOCS / "scaling.md"
        page.write_text(between(page.read_text(), BEGIN, END, report(SHAPES, Cluster())))
        draw(SHAPES, Cluster(), DOCS / "scaling.png")


if __name__ == "__main__":
    main()
