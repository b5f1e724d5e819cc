"""What the algorithms of the lab share: block sizes, the mask of a block, the dropout of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashtile.checks import check_sizes
from flashtile.dropout import keep_scale, keep_threshold, kept_entries, seed_tensor
from flashtile.lab.memory import Block


@dataclass(frozen=True)
class Blocks:
    """Sizes of a tile of the scores: ``rows`` queries (the papers' B_r) and ``columns`` keys (B_c)."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_sizes(**{"blocks.rows": self.rows, "blocks.columns": self.columns})


def check_blocks(name: str, blocks: object) -> None:
    """A TypeError for what is no :class:`Blocks`."""
    if not isinstance(blocks, Blocks):
        raise TypeError(f"{name} must be a flashtile.lab.Blocks, as in lab.Blocks(64, 32), got {blocks!r}")


def parts(length: int, size: int) -> list[slice]:
    """Blocks of ``size`` from 0 to ``length``; the last may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One head of attention, besides its tensors.

    Key j is visible to query i where ``i + lower <= j <= i + upper`` (None: unbounded), as in
    AttentionProblem: causal masks and windows. ``head`` numbers the head among those of all batch entries,
    for the dropout mask.
    """

    scale: float
    lower: int | None = None
    upper: int | None = None
    dropout_p: float = 0.0
    seed: int = 0
    head: int = 0

    def visits(self, rows: slice, columns: slice) -> bool:
        """Whether some query of these rows sees some key of these columns: other tiles are skipped."""
        lowest, highest = columns.start - (rows.stop - 1), columns.stop - 1 - rows.start
        return (self.lower is None or highest >= self.lower) and (self.upper is None or lowest <= self.upper)

    def mask(self, scores: Block, rows: slice, columns: slice) -> Block:
        """The scores of a tile with -inf where a key is not visible."""
        distance = _range(columns, scores) - _range(rows, scores)[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.lower is not None:
            hidden |= distance < self.lower
        if self.upper is not None:
            hidden |= distance > self.upper
        return scores.with_tensor(scores.tensor.masked_fill(hidden, -math.inf))

    def dropout(self, entries: Block, rows: slice, columns: slice) -> Block:
        """The entries of a tile with dropout: 0, or scaled by ``1 / (1 - dropout_p)``.

        The first paper saves the state of the random generator in the forward pass and sets it back in the
        backward pass, so that both draw the same numbers in the same order of tiles. flashtile's mask is a
        function of (seed; head, query, key): it needs no state, and no tile order or size changes it.
        """
        if self.dropout_p == 0.0:
            return entries
        device = entries.tensor.device
        kept = kept_entries(
            seed_tensor(self.seed, device),
            keep_threshold(self.dropout_p),
            torch.tensor([self.head], device=device),
            rows.stop - rows.start,
            columns.stop - columns.start,
            first_query=rows.start,
            first_key=columns.start,
        )
        return entries.with_tensor(entries.tensor * kept[0]) * keep_scale(self.dropout_p)


def _range(part: slice, like: Block) -> torch.Tensor:
    return torch.arange(part.start, part.stop, device=like.tensor.device)
