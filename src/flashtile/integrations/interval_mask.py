"""A boolean attention mask that is kept as key intervals for as long as nobody asks for its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashtile.masks import Intervals, Mask

_FIELDS = ("first", "last", "dense")
_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


class IntervalMask(Tensor):
    """Boolean tensor (batch, 1, query_length, key_length), True = attend, that stores :class:`Intervals`.

    For code that handles masks it is the dense tensor: shape, dtype and device are there, and the first
    operation on it turns it into the dense tensor for good (so that what writes into a view of it is seen).
    Code that knows it takes :func:`as_mask` of it instead, and no element is ever made.
    """

    lower: int | None
    upper: int | None
    first: Tensor | None
    last: Tensor | None
    dense: Tensor | None
    plain_causal: bool

    @staticmethod
    def __new__(
        cls, intervals: Intervals, shape: tuple[int, ...], device: torch.device, plain_causal: bool = False
    ) -> IntervalMask:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(
        self, intervals: Intervals, shape: tuple[int, ...], device: torch.device, plain_causal: bool = False
    ) -> None:
        """``intervals`` for exactly this ``shape``; ``plain_causal``: it is causal, and that is all of it."""
        self.lower, self.upper, self.first, self.last, self.dense = intervals
        self.plain_causal = plain_causal

    def intervals(self) -> Intervals:
        return Intervals(self.lower, self.upper, self.first, self.last, self.dense)

    def _become_dense(self) -> Tensor:
        """The elements, (batch, 1, query_length, key_length) in memory of their own; kept from now on."""
        visible = self.intervals()
        if visible[:4] != (None,) * 4 or self.dense is None or self.dense.shape != self.shape:
            elements = visible.visible(self.shape[2], self.shape[3], self.device)
            self.lower, self.upper, self.first, self.last = None, None, None, None
            self.dense = elements.expand(self.shape).contiguous()
            self.plain_causal = False
        return self.dense

    def __repr__(self) -> str:  # type: ignore[override]
        return f"IntervalMask({tuple(self.shape)}, {self.intervals()})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """What a compiled graph takes for this tensor: tensors only. A number of the band would be a constant
        of the graph, and it changes from step to step."""
        if self.first is None or self.lower is not None or self.upper is not None:
            self.first, self.last = rows_of(self.intervals(), self.shape[2], self.shape[3], self.device)
            self.lower = self.upper = None
        return [name for name in _FIELDS if getattr(self, name) is not None], (self.plain_causal, self.device)

    @staticmethod
    def __tensor_unflatten__(
        fields: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> IntervalMask:
        plain_causal, device = context
        intervals = Intervals(None, None, *(fields.get(name) for name in _FIELDS))
        return IntervalMask(intervals, size, device, plain_causal)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(args[0], cls):
            mask: IntervalMask = args[0]
            if operator in _COPIES or _takes_all(operator, args, mask):
                return IntervalMask(mask.intervals(), mask.shape, mask.device, mask.plain_causal)
            if operator is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
                return mask._moved(kwargs.get("device") or mask.device)
        args, kwargs = pytree.tree_map_only(cls, cls._become_dense, (args, kwargs))
        return operator(*args, **kwargs)

    def _moved(self, device: torch.device) -> IntervalMask:
        tensors = [None if (tensor := getattr(self, name)) is None else tensor.to(device) for name in _FIELDS]
        intervals = Intervals(self.lower, self.upper, *tensors)
        return IntervalMask(intervals, self.shape, device, self.plain_causal)


def _takes_all(operator: Any, args: tuple[Any, ...], mask: IntervalMask) -> bool:
    """Whether this is a slice of everything, ``mask[:, :, :, :key_length]``: many a model takes one."""
    if operator is not torch.ops.aten.slice.Tensor:
        return False
    dim, start, end, step = args[1:] + (0, None, None, 1)[len(args) - 1 :]
    return start in (None, 0) and (end is None or end >= mask.shape[dim]) and step == 1


def as_mask(mask: IntervalMask) -> Mask:
    """The same for :func:`flashtile.attention`. Not a method: torch.compile takes methods for operations.

    In a compiled graph there is no band (see ``__tensor_flatten__``), and nothing may depend on one.
    """
    band = (None, None) if torch.compiler.is_compiling() else (mask.lower, mask.upper)
    return _Resolved(Intervals(*band, mask.first, mask.last, mask.dense), tuple(mask.shape))


def rows_of(
    intervals: Intervals, query_length: int, key_length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First and last, int32 (B or 1, Sq), of intervals with the band in them."""
    lower, upper, first, last, _ = intervals
    row = torch.arange(query_length, device=device)[None]
    start = torch.zeros_like(row) if lower is None else row + lower
    end = torch.full_like(row, key_length) if upper is None else row + upper + 1
    if first is not None and last is not None:
        start, end = torch.maximum(start, first), torch.minimum(end, last)
    start, end = (bound.clamp(0, key_length).to(torch.int32) for bound in (start, end))
    return start, end


class _Resolved(Mask):
    """Intervals that belong to one shape."""

    def __init__(self, intervals: Intervals, shape: tuple[int, ...]) -> None:
        self._intervals = intervals
        self._shape = shape

    @property
    def batch(self) -> int:
        return self._shape[0]

    def resolve(self, batch: int, query_length: int, key_length: int, device: torch.device) -> Intervals:
        rows, _, queries, keys = self._shape
        if queries != query_length or keys != key_length or (rows != batch and rows != 1):
            raise ValueError(
                f"the attention mask is for (batch, 1, query_length, key_length) = {self._shape}, got "
                f"batch {batch}, {query_length} queries and {key_length} keys"
            )
        return self._intervals

    def __repr__(self) -> str:
        return f"IntervalMask({self._shape}, {self._intervals})"
