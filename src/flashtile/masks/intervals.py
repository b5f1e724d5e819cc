"""What a mask becomes once the lengths are known: one run of keys per query, and perhaps a dense rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_Field = TypeVar("_Field", int | None, Tensor | None)


class Intervals(NamedTuple):
    """The keys every query may see: the intersection of a band, one run of keys per row, and a dense mask.

    Key j is visible to query i of batch entry b if all of these hold (a field that is None asks nothing):

    - ``i + lower <= j <= i + upper``
    - ``first[b, i] <= j < last[b, i]``; both int32, (B or 1, Sq or 1), both or neither present
    - ``dense[b, h, i, j]``; bool, 4-D, broadcastable to (B, H, Sq, Sk)
    """

    lower: int | None = None
    upper: int | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    dense: Tensor | None = None

    def intersect(self, other: Intervals) -> Intervals:
        """The keys visible under both. Intervals are closed under intersection, so this stays as cheap."""
        # sym_max and sym_min keep symbolic lengths symbolic under torch.compile; max and min specialise.
        return Intervals(
            _both(torch.sym_max, self.lower, other.lower),
            _both(torch.sym_min, self.upper, other.upper),
            _both(torch.maximum, self.first, other.first),
            _both(torch.minimum, self.last, other.last),
            _both(torch.logical_and, self.dense, other.dense),
        )

    def visible(self, query_length: int, key_length: int, device: torch.device) -> Tensor:
        """Boolean tensor (B or 1, H or 1, Sq, Sk) of what is visible: quadratic, for tests and pictures."""
        query_index = torch.arange(query_length, device=device)[:, None]
        key_index = torch.arange(key_length, device=device)
        visible = torch.ones(1, 1, query_length, key_length, dtype=torch.bool, device=device)
        if self.lower is not None:
            visible = visible & (query_index + self.lower <= key_index)
        if self.upper is not None:
            visible = visible & (key_index <= query_index + self.upper)
        if self.first is not None:
            visible = visible & (self.first[:, None, :, None] <= key_index)
        if self.last is not None:
            visible = visible & (key_index < self.last[:, None, :, None])
        if self.dense is not None:
            visible = visible & self.dense
        return visible


def _both(combine: Callable[[Any, Any], Any], ours: _Field, theirs: _Field) -> _Field:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return combine(ours, theirs)  # type: ignore[no-any-return]
