"""Pictures of a dense mask: text for the terminal, an image through matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FULL, _PARTIAL, _EMPTY = "██", "▒▒", " ·"


def text(visible: Tensor, max_size: int) -> str:
    """Rows are queries, columns keys, of a (Sq, Sk) boolean tensor.

    What is longer than ``max_size`` is drawn in square tiles: full, partly visible, or empty.
    """
    query_length, key_length = visible.shape
    tile = max(1, -(-max(query_length, key_length) // max_size))
    rows = []
    for query_start in range(0, query_length, tile):
        cells = []
        for key_start in range(0, key_length, tile):
            block = visible[query_start : query_start + tile, key_start : key_start + tile]
            cells.append(_FULL if bool(block.all()) else _PARTIAL if bool(block.any()) else _EMPTY)
        rows.append(f"{query_start:>6} │{''.join(cells)}│")
    width = 2 * -(-key_length // tile)
    # An empty side still shows as a frame, so that a picture of nothing does not look like a missing one.
    return "\n".join([f"{'':>6} ┌{'─' * width}┐", *rows, f"{'':>6} └{'─' * width}┘"])


def plot(visible: Tensor, title: str, axes: Axes | None) -> Axes:
    """Draw a (Sq, Sk) boolean tensor as an image on ``axes``, or on a new figure."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Mask.plot needs matplotlib (pip install matplotlib); Mask.draw does not"
        ) from error

    if axes is None:
        axes = pyplot.figure().add_subplot()
    axes.imshow(
        visible.cpu().numpy(), cmap="Blues", vmin=0, vmax=1.3, aspect="equal", interpolation="nearest"
    )
    axes.set(title=title, xlabel="key", ylabel="query")
    return axes
