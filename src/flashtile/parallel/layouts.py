"""How a sequence lies on the ranks of a group: one chunk each, or two that balance causal work (zigzag)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

Layout = Literal["contiguous", "zigzag"]


class Chunk(NamedTuple):
    """A run of positions (or heads)."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def span(self) -> slice:
        return slice(self.start, self.end)


def consecutive(lengths: Sequence[int]) -> list[Chunk]:
    """Chunks of these lengths, one behind the other."""
    ends = accumulate(lengths)
    return [Chunk(end - length, length) for end, length in zip(ends, lengths, strict=True)]


def even_chunks(length: int, parts: int) -> list[Chunk]:
    """``length`` in ``parts`` chunks as equal as can be, the longer ones first (torch.tensor_split)."""
    least, longer = divmod(length, parts)
    return consecutive([least + (part < longer) for part in range(parts)])


def checked_layout(layout: object) -> Layout:
    if layout not in get_args(Layout):
        raise ValueError(f'layout must be "contiguous" or "zigzag", got {layout!r}')
    return layout  # type: ignore[return-value]


def even_layout(length: int, ranks: int, layout: Layout) -> list[list[Chunk]]:
    """The chunks that every rank gets of a whole sequence.

    Zigzag cuts it into 2 * ranks chunks and gives rank r the chunks r and 2 * ranks - 1 - r: an early one,
    whose queries see few keys under a causal mask, and a late one, whose queries see many.
    """
    if layout == "contiguous":
        return [[chunk] for chunk in even_chunks(length, ranks)]
    chunks = even_chunks(length, 2 * ranks)
    return [[chunks[rank], chunks[-1 - rank]] for rank in range(ranks)]


def layout_of(lengths: Sequence[int], layout: Layout, name: str) -> list[list[Chunk]]:
    """The chunks of ranks that hold shards of these lengths; zigzag shards are those of ``even_layout``."""
    if layout == "contiguous":
        return [[chunk] for chunk in consecutive(lengths)]
    chunks = even_layout(sum(lengths), len(lengths), layout)
    expected = [sum(chunk.length for chunk in own) for own in chunks]
    if list(lengths) != expected:
        raise ValueError(
            f'{name} with layout="zigzag" must have the lengths that flashtile.parallel.shard gives, '
            f"{expected} for {sum(lengths)} positions, got {list(lengths)}"
        )
    return chunks
