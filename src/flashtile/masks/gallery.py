"""A picture of every kind of mask: ``flashtile masks``, or ``python -m flashtile.masks``."""

from __future__ import annotations

import torch

from flashtile import masks
from flashtile.masks.kinds import Mask

Example = tuple[Mask, int, int]


def examples() -> list[Example]:
    """(mask, query_length, key_length) of one example of each kind."""
    return [
        (masks.causal(), 8, 8),
        (masks.causal(alignment="top-left"), 5, 9),
        (masks.causal(alignment="bottom-right"), 5, 9),
        (masks.window(2, 1), 8, 8),
        (masks.key_lengths([5]), 8, 8),
        (masks.key_starts([3]), 8, 8),
        (masks.key_range([2], [6]), 8, 8),
        (masks.documents([0, 0, 0, 1, 1, 2, 2, 2]), 8, 8),
        (masks.causal() & masks.documents([0, 0, 0, 1, 1, 2, 2, 2]), 8, 8),
        (masks.prefix([3]), 8, 8),
        (masks.chunks(3), 8, 8),
        (masks.chunks(3) & masks.causal(), 8, 8),
        (masks.window(2, 0) & masks.key_starts([2]), 8, 8),
        (masks.causal() & masks.from_dense(torch.arange(8) % 3 != 1), 8, 8),
        (masks.causal() & masks.window(300, 0), 1024, 1024),
    ]


def drawn(shown: list[Example], max_size: int) -> str:
    """Each mask as it is written, its lengths, and its picture of at most ``max_size`` rows and columns."""
    return "\n".join(
        f"\n{mask!r}   {query_length} queries, {key_length} keys\n"
        + mask.draw(query_length, key_length, max_size=max_size)
        for mask, query_length, key_length in shown
    )
