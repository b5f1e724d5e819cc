"""Draw the picture of docs/masks.md: `python scripts/mask_pictures.py` writes docs/images/masks.png."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from flashtile.masks import gallery

TARGET = Path(__file__).parents[1] / "docs" / "images" / "masks.png"
COLUMNS = 4


def main(target: Path = TARGET) -> None:
    shown = gallery.examples()[:12]
    figure = Figure(figsize=(3.4 * COLUMNS, 3.6 * len(shown) / COLUMNS), layout="constrained")
    panels = figure.subplots(len(shown) // COLUMNS, COLUMNS).flat
    for axes, (mask, query_length, key_length) in zip(panels, shown, strict=True):
        mask.plot(query_length, key_length, axes=axes)
        axes.set_title(repr(mask).replace(" & ", "\n& "), fontsize=9, family="monospace")
        axes.set(xticks=range(key_length), yticks=range(query_length))
        axes.tick_params(length=0, labelsize=7)
    figure.savefig(target, dpi=80)
    print(target)


if __name__ == "__main__":
    main()
