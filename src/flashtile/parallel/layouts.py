"""How a sequence lies on the ranks of a group: one chunk each, or two that balance causal work (zigzag).

Packed documents may be cut each for itself: a rank then has such chunks of every document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flashtile.ragged import check_starts, integer_tensor

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


def even_chunks(length: int, parts: int, turn: int = 0) -> list[Chunk]:
    """``length`` in ``parts`` chunks as equal as can be; the longer ones are the first from ``turn`` on."""
    least, longer = divmod(length, parts)
    return consecutive([least + ((part - turn) % parts < longer) for part in range(parts)])


def checked_layout(layout: object) -> Layout:
    if layout not in get_args(Layout):
        raise ValueError(f'layout must be "contiguous" or "zigzag", got {layout!r}')
    return layout  # type: ignore[return-value]


def checked_documents(
    cu_seqlens: Tensor | Sequence[int] | None, length: int | None = None
) -> tuple[int, ...] | None:
    """Where packed documents begin, and the length of all at the end; None where there are none.

    ``length`` is that of the sequence, where it is known.
    """
    if cu_seqlens is None:
        return None
    starts = integer_tensor("cu_seqlens", cu_seqlens, 1, torch.device("cpu"))
    if starts.shape[0] < 2:
        raise ValueError(f"cu_seqlens must hold 0 and the end of every document, got {starts.tolist()}")
    total = int(starts[-1])
    check_starts("cu_seqlens", starts, total)
    if length is not None and total != length:
        raise ValueError(f"cu_seqlens must end with the length of the sequence, {length}, got {total}")
    return tuple(starts.tolist())


def even_layout(
    length: int, ranks: int, layout: Layout, documents: tuple[int, ...] | None = None
) -> list[list[Chunk]]:
    """The chunks that every rank gets of a whole sequence, in their order.

    Zigzag cuts it into 2 * ranks chunks and gives rank r the chunks r and 2 * ranks - 1 - r: an early one,
    whose queries see few keys under a causal mask, and a late one, whose queries see many. ``documents`` (see
    ``checked_documents``) are cut so one by one. What is left over of them goes to the ranks in turn, chunks
    that touch become one, and empty ones are left out.
    """
    parts = ranks if layout == "contiguous" else 2 * ranks
    if documents is None:
        pieces = [[chunk] for chunk in even_chunks(length, parts)]
    else:
        pieces = _cut_documents(documents, parts)
    if layout == "zigzag":
        pieces = [pieces[rank] + pieces[-1 - rank] for rank in range(ranks)]
    return pieces if documents is None else [_joined(own) for own in pieces]


def _cut_documents(documents: tuple[int, ...], parts: int) -> list[list[Chunk]]:
    pieces: list[list[Chunk]] = [[] for _ in range(parts)]
    turn = 0
    for start, end in pairwise(documents):
        for own, (offset, length) in zip(pieces, even_chunks(end - start, parts, turn), strict=True):
            own.append(Chunk(start + offset, length))
        turn += (end - start) % parts
    return pieces


def _joined(chunks: list[Chunk]) -> list[Chunk]:
    joined = [Chunk(0, 0)]
    for chunk in sorted(chunks):
        if chunk.length and chunk.start == joined[-1].end and joined[-1].length:
            joined[-1] = Chunk(joined[-1].start, joined[-1].length + chunk.length)
        elif chunk.length:
            joined.append(chunk)
    return joined[1:] or joined


def positions_of(chunks: Sequence[Chunk], documents: tuple[int, ...] | None = None) -> Tensor:
    """int64 (own length,): where the positions of these chunks lie in the whole, or in their documents."""
    places = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
    if documents is None:
        return places
    starts = torch.tensor(documents)
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]


def layout_of(
    lengths: Sequence[int], layout: Layout, name: str, documents: tuple[int, ...] | None = None
) -> list[list[Chunk]]:
    """The chunks of ranks that hold shards of these lengths.

    Only contiguous ones of a sequence that is no packed documents may differ from those of ``even_layout``.
    """
    if layout == "contiguous" and documents is None:
        return [[chunk] for chunk in consecutive(lengths)]
    chunks = even_layout(sum(lengths), len(lengths), layout, documents)
    expected = [sum(chunk.length for chunk in own) for own in chunks]
    if list(lengths) != expected:
        how = f'layout="{layout}"' if documents is None else f'layout="{layout}" and cu_seqlens'
        raise ValueError(
            f"{name} with {how} must have the lengths that flashtile.parallel.shard gives, "
            f"{expected} for {sum(expected)} positions, got {list(lengths)}"
        )
    return chunks
