"""How many queries and keys each sequence has, and what the masks ask about them.

Three kinds of call: every sequence alike (:class:`Uniform`), sequences packed one behind the
other (:class:`Packed`), and a cache that each sequence fills to a length of its own (:class:`Cached`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flashtile.masks.arguments import Alignment, check_size, shown_value, values_known


class Lengths(ABC):
    """The lengths of a call. A row is one query of one sequence; values per row are (B or 1, Sq or 1).

    Packed sequences have one row of values for all their queries: (1, Tq or 1).
    """

    batch: int  # sequences
    query_length: int  # queries of a sequence; of all, where they are packed
    key_length: int  # keys of the longest sequence, or a bound where that is not known
    longest: tuple[int | None, int | None]  # queries and keys of the longest sequence, None if not known
    rows: int  # of values per query, or per key
    keys: int | None  # how many keys a value per key has to be given for; None: such values have no place
    device: torch.device

    @property
    @abstractmethod
    def limit(self) -> Tensor | int:
        """The number of keys, where it is the same for all, else per row."""

    @property
    def most(self) -> Tensor | int:
        """The largest key position that a mask may give."""
        return self.limit

    @abstractmethod
    def diagonal(self, alignment: Alignment | None, name: str) -> Tensor | int:
        """Query i of a sequence stands at key position i + diagonal; int where it is the same for all."""

    @abstractmethod
    def per_row(self, values: Tensor, name: str) -> Tensor:
        """(B or 1, Sq or 1) values of a mask, checked and laid out per row."""

    @abstractmethod
    def index(self) -> Tensor:
        """The index of every query in its own sequence, int32 per row."""

    def own_keys(self, positions: Tensor) -> Tensor:
        """Places among all the ``keys`` as positions in the row's own sequence, within 0..number of keys."""
        return self.clamp(positions)

    def positions(self, alignment: Alignment | None, name: str) -> Tensor:
        """The key position at which every query stands, int32 per row."""
        return self.index() + self.diagonal(alignment, name)

    def clamp(self, positions: Tensor) -> Tensor:
        """Key positions brought into 0..number of keys."""
        limit = self.limit
        if isinstance(limit, Tensor):
            return torch.minimum(positions.clamp(min=0), limit)
        return positions.clamp(0, limit)

    def key_positions(self, values: Tensor, name: str) -> Tensor:
        """``values`` as int32 per row within 0..number of keys; ValueError where they are beyond ``most``."""
        rows, most = self.per_row(values, name), self.most
        known = values_known(rows) and not (isinstance(most, Tensor) and not values_known(most))
        if known and bool(((rows < 0) | (rows > most)).any()):
            bound = "the number of keys" if isinstance(most, Tensor) else f"{most}, the number of keys"
            raise ValueError(f"{name}: values must be in 0..{bound}, got {shown_value(values)}")
        return self.clamp(rows.to(self.device)).to(torch.int32)


class Uniform(Lengths):
    """Every sequence has the same lengths."""

    def __init__(self, batch: int, query_length: int, key_length: int, device: torch.device) -> None:
        self.batch, self.query_length, self.key_length = batch, query_length, key_length
        self.rows = batch
        self.longest, self.keys, self.device = (query_length, key_length), key_length, device

    @property
    def limit(self) -> int:
        return self.key_length

    def diagonal(self, alignment: Alignment | None, name: str) -> int:
        if alignment == "top-left":
            return 0
        if alignment is None and self.query_length != self.key_length:
            raise _needs_alignment(name, f"{self.query_length} queries, {self.key_length} keys")
        return self.key_length - self.query_length if alignment else 0

    def per_row(self, values: Tensor, name: str) -> Tensor:
        check_size(name, "batch", values.shape[0], self.batch)
        check_size(name, "query", values.shape[1], self.query_length)
        return values

    def index(self) -> Tensor:
        return torch.arange(self.query_length, dtype=torch.int32, device=self.device)[None]


class Cached(Uniform):
    """A cache of ``key_length`` places: sequence b uses key_lengths[b], and its queries stand at the last."""

    def __init__(
        self, batch: int, query_length: int, key_length: int, key_lengths: Tensor, device: torch.device
    ) -> None:
        super().__init__(batch, query_length, key_length, device)
        self._key_lengths = key_lengths

    @property
    def limit(self) -> Tensor:  # type: ignore[override]
        return self._key_lengths.to(torch.int32)[:, None]

    @property
    def most(self) -> int:
        # A place may be given that the sequence has yet to fill: a prompt comes in chunks.
        return self.key_length

    def diagonal(self, alignment: Alignment | None, name: str) -> Tensor | int:  # type: ignore[override]
        # Where a query stands is known here, so that a mask need not say it.
        return 0 if alignment == "top-left" else self.limit - self.query_length


class Packed(Lengths):
    """Sequence b has the packed queries query_starts[b] .. query_starts[b + 1] - 1, and key_lengths[b] keys.

    ``query_starts`` and ``key_starts`` (B + 1,) and ``key_lengths`` (B,) are int64. The keys are packed
    too, ``keys`` in all, or lie in a cache (``key_starts`` is None). There is at least one sequence.
    """

    def __init__(
        self,
        queries: int,
        keys: int | None,
        key_length: int,
        longest: tuple[int | None, int | None],
        query_starts: Tensor,
        key_starts: Tensor | None,
        key_lengths: Tensor,
        *,
        same: bool = False,
    ) -> None:
        """``same``: every sequence has as many keys as queries, even where their values are not known."""
        self.rows, self._same = 1, same
        self.batch, self.device = key_lengths.shape[0], query_starts.device
        self.query_length, self.key_length, self.keys, self.longest = queries, key_length, keys, longest
        self._query_starts, self._key_starts, self._key_lengths = query_starts, key_starts, key_lengths
        self._rows = torch.arange(queries, device=self.device)
        # Queries behind the last sequence count to it; nobody computes them.
        self._sequence = torch.searchsorted(query_starts[1:], self._rows, right=True).clamp(
            max=self.batch - 1
        )

    @property
    def limit(self) -> Tensor:
        return self._gather(self._key_lengths)

    def own_keys(self, positions: Tensor) -> Tensor:
        assert self._key_starts is not None  # else there are no values per key
        return self.clamp(positions - self._gather(self._key_starts[:-1]))

    def _gather(self, values: Tensor) -> Tensor:
        return values.to(torch.int32)[self._sequence][None]

    def diagonal(self, alignment: Alignment | None, name: str) -> Tensor | int:
        if alignment == "top-left" or self._same:
            return 0
        diagonals = self._key_lengths - self._query_starts.diff()
        if values_known(diagonals) and bool((diagonals == diagonals[0]).all()):
            diagonal = int(diagonals[0])
            if diagonal == 0 or alignment is not None:
                return diagonal
        if alignment is None:
            raise _needs_alignment(name, "those of the queries and the keys of a sequence")
        return self._gather(diagonals)

    def per_row(self, values: Tensor, name: str) -> Tensor:
        if values.shape[1] == 1:
            check_size(name, "batch", values.shape[0], self.batch)
            return values if values.shape[0] == 1 else values.to(self.device)[:, 0][self._sequence][None]
        if values.shape[0] != 1:
            raise ValueError(
                f"{name}: values per query of packed sequences must have shape ({self.query_length},), "
                f"got {tuple(values.shape)}"
            )
        check_size(name, "query", values.shape[1], self.query_length)
        return values

    def index(self) -> Tensor:
        return (self._rows - self._query_starts[self._sequence]).to(torch.int32)[None]


def _needs_alignment(name: str, lengths: str) -> ValueError:
    return ValueError(
        f"{name} needs an alignment where lengths differ ({lengths}): "
        'alignment="top-left" puts the first query at the first key, '
        '"bottom-right" the last query at the last key'
    )
