"""The masks: what they mean, and the interval of keys each gives a query (every structural mask is one)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from flashtile.masks import drawing
from flashtile.masks.arguments import (
    LONGEST,
    Alignment,
    IntegerRows,
    Integers,
    call,
    check_size,
    checked_alignment,
    integers,
    is_int,
    per_batch,
    per_position,
    values_known,
)
from flashtile.masks.intervals import Intervals
from flashtile.masks.lengths import Lengths, Uniform

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Mask(ABC):
    """Which keys a query may see, before any length is known. Immutable; ``&`` gives what both allow.

    The constructors are the functions of this module: :func:`causal`, :func:`window`, :func:`key_lengths`,
    :func:`key_starts`, :func:`key_range`, :func:`documents`, :func:`prefix`, :func:`chunks`,
    :func:`from_dense`. A boolean tensor may stand on either side of ``&``. Tensors are kept, not copied, and
    follow the device of the call.
    """

    def resolve(self, batch: int, query_length: int, key_length: int, device: torch.device) -> Intervals:
        """The intervals of this mask for these lengths, the same for every sequence, on ``device``."""
        return self.intervals(Uniform(batch, query_length, key_length, device))

    @abstractmethod
    def intervals(self, lengths: Lengths) -> Intervals:
        """The intervals of this mask for these lengths, on their device.

        Raises ValueError where the mask does not fit them: lengths that differ and no alignment, a batch or
        a length other than that of the mask's own tensors, a key index outside 0..key_length. Key indices are
        checked for tensors in host memory, outside torch.compile; elsewhere they are clamped to that range.
        """

    @property
    @abstractmethod
    def batch(self) -> int:
        """The batch size that the mask's tensors need; 1 where it fits any."""

    def dense(
        self, batch: int, query_length: int, key_length: int, device: torch.device | str | None = None
    ) -> Tensor:
        """Boolean tensor (batch or 1, heads or 1, query_length, key_length); True = is visible."""
        device = torch.device("cpu" if device is None else device)
        return self.resolve(batch, query_length, key_length, device).visible(query_length, key_length, device)

    def draw(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        batch_index: int = 0,
        head: int = 0,
        max_size: int = 48,
    ) -> str:
        """Text picture of one batch entry and head: rows are queries, columns keys.

        ``key_length`` defaults to ``query_length``. Beyond ``max_size`` rows or columns, each cell stands for
        a square tile: full, partly visible (shaded) or empty (a dot).
        """
        return drawing.text(self._matrix(query_length, key_length, batch_index, head), max_size)

    def plot(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        batch_index: int = 0,
        head: int = 0,
        axes: Axes | None = None,
    ) -> Axes:
        """Image of one batch entry and head on matplotlib ``axes`` (default: a new figure); returns them."""
        return drawing.plot(self._matrix(query_length, key_length, batch_index, head), repr(self), axes)

    def _matrix(self, query_length: int, key_length: int | None, batch_index: int, head: int) -> Tensor:
        visible = self.dense(self.batch, query_length, query_length if key_length is None else key_length)
        for name, index, size in (
            ("batch_index", batch_index, visible.shape[0]),
            ("head", head, visible.shape[1]),
        ):
            if not 0 <= index < size:
                raise ValueError(f"{name} must be in 0..{size - 1} for {self!r}, got {index}")
        return visible[batch_index, head]

    def __and__(self, other: Mask | Tensor) -> Mask:
        if isinstance(other, Tensor):
            other = from_dense(other)
        return _Both(self, other) if isinstance(other, Mask) else NotImplemented

    def __rand__(self, other: Tensor) -> Mask:
        return from_dense(other) & self if isinstance(other, Tensor) else NotImplemented

    def __or__(self, other: object) -> NoReturn:
        raise TypeError(
            "masks combine with & only: a union is no interval of keys; masks.from_dense takes bool tensors"
        )

    def __invert__(self) -> NoReturn:
        raise TypeError(
            "a Mask cannot be inverted: the rest is no interval of keys; masks.from_dense takes bool tensors"
        )

    def __bool__(self) -> bool:
        # `causal() and window(3)` would be window(3) alone.
        raise TypeError(
            "a Mask has no truth value: combine masks with &, and test presence with `is not None`"
        )


class _Both(Mask):
    def __init__(self, left: Mask, right: Mask) -> None:
        self._left = left
        self._right = right

    @property
    def batch(self) -> int:
        return max(self._left.batch, self._right.batch)

    def intervals(self, lengths: Lengths) -> Intervals:
        return self._left.intervals(lengths).intersect(self._right.intervals(lengths))

    def __repr__(self) -> str:
        return f"{self._left!r} & {self._right!r}"


class _Band(Mask):
    """Keys from ``left`` before the query's own position to ``right`` after it."""

    batch = 1

    def __init__(self, left: int | None, right: int | None, alignment: Alignment | None, name: str) -> None:
        self._left = left
        self._right = right
        self._alignment = checked_alignment(alignment)
        self._name = name

    def intervals(self, lengths: Lengths) -> Intervals:
        left, right = self._left, self._right
        diagonal = lengths.diagonal(self._alignment, self._name)
        if not isinstance(diagonal, Tensor):
            return Intervals(
                lower=None if left is None else diagonal - left,
                upper=None if right is None else diagonal + right,
            )
        position = lengths.index() + diagonal
        longest = lengths.query_length + lengths.key_length  # positions are int32
        last = lengths.key_length if right is None else position + 1 + min(right, longest)
        first = torch.zeros_like(position) if left is None else position - min(left, longest)
        if not isinstance(last, Tensor):
            last = torch.full_like(position, last)
        return Intervals(first=lengths.clamp(first), last=lengths.clamp(last))

    def __repr__(self) -> str:
        if self._name == "causal":
            return call("causal", alignment=self._alignment)
        return call("window", self._left, self._right, alignment=self._alignment)


class _KeyRange(Mask):
    """Keys in [starts, ends), each (B or 1, Sq or 1) or absent."""

    def __init__(self, starts: Tensor | None, ends: Tensor | None, name: str) -> None:
        self._starts = starts
        self._ends = ends
        self._name = name

    @property
    def batch(self) -> int:
        return max(1 if bound is None else bound.shape[0] for bound in (self._starts, self._ends))

    def intervals(self, lengths: Lengths) -> Intervals:
        first, last = (
            torch.full((1, 1), default, dtype=torch.int32, device=lengths.device)
            if bound is None
            else lengths.key_positions(bound, self._name)
            for bound, default in ((self._starts, 0), (self._ends, lengths.key_length))
        )
        return Intervals(first=first, last=last)

    def __repr__(self) -> str:
        bounds = {"key_lengths": (self._ends,), "key_starts": (self._starts,)}
        return call(self._name, *bounds.get(self._name, (self._starts, self._ends)))


class _Documents(Mask):
    """Keys whose id is the query's; ids (B or 1, length)."""

    def __init__(self, ids: Tensor, query_ids: Tensor | None) -> None:
        self._ids = ids
        self._query_ids = query_ids

    @property
    def batch(self) -> int:
        return max(self._ids.shape[0], 1 if self._query_ids is None else self._query_ids.shape[0])

    def intervals(self, lengths: Lengths) -> Intervals:
        if lengths.keys is None:
            raise ValueError(
                "documents cannot be told apart in a cache that packed queries read: use key_range"
            )
        if self._query_ids is None and lengths.query_length != lengths.keys:
            raise ValueError(
                f"documents needs query_ids where lengths differ ({lengths.query_length} queries, "
                f"{lengths.keys} keys)"
            )
        ids = self._ids.to(lengths.device, torch.int64)
        query_ids = ids if self._query_ids is None else self._query_ids.to(lengths.device, torch.int64)
        for name, tensor, length in (
            ("ids", ids, lengths.keys),
            ("query_ids", query_ids, lengths.query_length),
        ):
            check_size(f"documents: {name}", "batch", tensor.shape[0], lengths.rows)
            if tensor.shape[1] != length:
                raise ValueError(
                    f"documents: {name} must have length {length}, got shape {tuple(tensor.shape)}"
                )
        if lengths.keys == 0:
            nothing = torch.zeros(1, 1, dtype=torch.int32, device=lengths.device)
            return Intervals(first=nothing, last=nothing)
        rows = max(ids.shape[0], query_ids.shape[0])
        # Ids are in runs, so sorting them moves whole runs: an id's place in the sorted order gives its run.
        sorted_ids, origin = ids.expand(rows, -1).sort(dim=1, stable=True)
        wanted = query_ids.expand(rows, -1).contiguous()
        start = torch.searchsorted(sorted_ids, wanted)
        count = torch.searchsorted(sorted_ids, wanted, right=True) - start
        first = origin.gather(1, start.clamp(max=lengths.keys - 1))
        first, last = lengths.own_keys(first), lengths.own_keys(first + count)
        return Intervals(first=first.to(torch.int32), last=last.to(torch.int32))

    def __repr__(self) -> str:
        ids, query_ids = (
            tensor[0] if tensor is not None and tensor.shape[0] == 1 else tensor
            for tensor in (self._ids, self._query_ids)
        )
        return call("documents", ids, query_ids=query_ids)


class _Prefix(Mask):
    """Causal, and the first ``lengths`` keys, (B or 1, 1), visible to all."""

    def __init__(self, lengths: Tensor, alignment: Alignment | None) -> None:
        self._lengths = lengths
        self._alignment = checked_alignment(alignment)

    @property
    def batch(self) -> int:
        return self._lengths.shape[0]

    def intervals(self, lengths: Lengths) -> Intervals:
        prefixes = lengths.key_positions(self._lengths, "prefix")
        after_diagonal = lengths.positions(self._alignment, "prefix") + 1
        last = torch.maximum(lengths.clamp(after_diagonal), prefixes)
        return Intervals(first=torch.zeros_like(last), last=last)

    def __repr__(self) -> str:
        return call("prefix", self._lengths, alignment=self._alignment)


class _Chunks(Mask):
    """Keys of the query's own chunk of ``size`` positions."""

    batch = 1

    def __init__(self, size: int, alignment: Alignment | None) -> None:
        self._size = size
        self._alignment = checked_alignment(alignment)

    def intervals(self, lengths: Lengths) -> Intervals:
        position = lengths.positions(self._alignment, "chunks")
        first = position.div(self._size, rounding_mode="floor") * self._size
        last = first + min(self._size, lengths.key_length)
        return Intervals(first=lengths.clamp(first), last=lengths.clamp(last))

    def __repr__(self) -> str:
        return call("chunks", self._size, alignment=self._alignment)


class _Dense(Mask):
    """Any pattern: bool, 4-D, each dimension full or 1."""

    def __init__(self, visible: Tensor) -> None:
        self._visible = visible

    @property
    def batch(self) -> int:
        return self._visible.shape[0]

    def intervals(self, lengths: Lengths) -> Intervals:
        for name, dim, size in zip(("query", "key"), (2, 3), lengths.longest, strict=True):
            if size is not None:
                check_size("from_dense", name, self._visible.shape[dim], size)
        check_size("from_dense", "batch", self._visible.shape[0], lengths.batch)
        return Intervals(dense=self._visible.to(lengths.device))

    def __repr__(self) -> str:
        return f"from_dense(<bool {tuple(self._visible.shape)}>)"


def causal(*, alignment: Alignment | None = None) -> Mask:
    """A query sees the keys up to its own position.

    ``alignment`` says what the position is where there are more keys than queries, or fewer: ``"top-left"``
    puts query 0 at key 0 (torch's SDPA), ``"bottom-right"`` the last query at the last key (flash-attn, a KV
    cache). Where the lengths are equal both are the same and it may be left out; where they differ, leaving
    it out is a ValueError.
    """
    return _Band(None, 0, alignment, "causal")


def window(left: int | None = None, right: int | None = None, *, alignment: Alignment | None = None) -> Mask:
    """A query sees ``left`` keys before its own position and ``right`` after it, itself always included.

    None is unbounded on that side. ``alignment`` as in :func:`causal`: ``window(None, 0)`` is ``causal()``.
    """
    for name, size in (("left", left), ("right", right)):
        if size is not None and (not is_int(size) or size < 0):
            raise ValueError(f"window: {name} must be an int >= 0, or None for no bound, got {size!r}")
    left, right = (None if size is None else _at_most_longest(size) for size in (left, right))
    return _Band(left, right, alignment, "window")


def key_lengths(lengths: Integers) -> Mask:
    """Keys 0..lengths[b]-1 of batch entry b are visible: padding on the right. ``lengths``: int or (B,)."""
    return _KeyRange(None, per_batch(lengths, "key_lengths"), "key_lengths")


def key_starts(starts: Integers) -> Mask:
    """Keys from starts[b] on are visible in batch entry b: padding on the left. ``starts``: int or (B,)."""
    return _KeyRange(per_batch(starts, "key_starts"), None, "key_starts")


def key_range(starts: Integers, ends: Integers) -> Mask:
    """Keys with ``starts <= j < ends`` are visible; none where ``ends <= starts``.

    Each is an int, (B,) for one range per batch entry, or (B or 1, Sq) for one range per query: the general
    form of every mask here but :func:`from_dense`.
    """
    bounds = [integers(bound, "key_range", max_dims=2) for bound in (starts, ends)]
    first, last = (bound if bound.ndim == 2 else bound.reshape(-1, 1) for bound in bounds)
    return _KeyRange(first, last, "key_range")


def documents(ids: IntegerRows, query_ids: IntegerRows | None = None) -> Mask:
    """A query sees the keys of its own document: packed sequences. Combine with :func:`causal` as needed.

    ``ids`` holds one document id per key, (Sk,) or (B, Sk), any integers, each document one contiguous run;
    an id that comes back after another one is a ValueError. The queries have the same ids unless
    ``query_ids``, (Sq,) or (B, Sq), gives others; a query whose id no key has sees nothing.
    """
    key_documents = per_position(ids, "documents: ids")
    if values_known(key_documents) and key_documents.shape[1] > 0:
        runs = 1 + (key_documents[:, 1:] != key_documents[:, :-1]).sum(dim=1)
        in_order = key_documents.sort(dim=1).values
        distinct = 1 + (in_order[:, 1:] != in_order[:, :-1]).sum(dim=1)
        if bool((runs != distinct).any()):
            raise ValueError(
                "documents: each id must be one contiguous run of keys, got an id that comes back after "
                "another (give padding on the two sides different ids, or use from_dense)"
            )
    return _Documents(
        key_documents, None if query_ids is None else per_position(query_ids, "documents: query_ids")
    )


def prefix(lengths: Integers, *, alignment: Alignment | None = None) -> Mask:
    """Prefix-LM: the first lengths[b] keys are visible to every query, the others causally.

    ``lengths``: int or (B,); ``alignment`` of the causal part as in :func:`causal`.
    """
    return _Prefix(per_batch(lengths, "prefix"), alignment)


def chunks(size: int, *, alignment: Alignment | None = None) -> Mask:
    """A query sees the keys of its own chunk, positions [n * size, (n + 1) * size), before and after itself.

    ``chunks(size) & causal()`` is Llama 4's chunked attention. ``alignment`` gives the query's position where
    the lengths differ, as in :func:`causal`.
    """
    if not is_int(size) or size < 1:
        raise ValueError(f"chunks: size must be an int >= 1, got {size!r}")
    return _Chunks(_at_most_longest(size), alignment)


def _at_most_longest(size: int) -> int:
    # A symbolic size stays one: it is a length, and never that long.
    return min(size, LONGEST) if isinstance(size, int) else size


def from_dense(visible: Tensor) -> Mask:
    """Any pattern, as a boolean tensor that broadcasts to (B, H, Sq, Sk) as torch does; True = attend.

    Kernels read it through its strides, so an expanded tensor costs no memory. Prefer the other masks where
    they say the same: they let whole tiles be skipped.
    """
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        what = f"a tensor of {visible.dtype}" if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"a dense mask must be a boolean tensor (True = attend), got {what}")
    if visible.ndim > 4:
        raise ValueError(
            f"a dense mask must have at most 4 dimensions (B, H, Sq, Sk), got {tuple(visible.shape)}"
        )
    return _Dense(visible[(None,) * (4 - visible.ndim)])
