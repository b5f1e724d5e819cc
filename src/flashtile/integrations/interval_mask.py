"""An attention mask that is kept as key intervals for as long as nobody asks for its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashtile.masks import Intervals, Mask
from flashtile.masks.lengths import Lengths, Uniform

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


class IntervalMask(Tensor):
    """Additive mask (batch, 1, query_length, key_length) that stores :class:`Intervals` instead of elements.

    For code that handles masks it is a tensor with 0 where a query may attend and the lowest number of its
    dtype elsewhere, the mask of Transformers' eager attention. Shape, dtype and device are there; the first
    operation makes the elements, and from then on they are the mask, so that what writes into a view of it
    is seen. Code that knows this class takes :func:`mask_and_bias` of it, and no element is ever made.
    """

    lower: int | None
    upper: int | None
    first: Tensor | None
    last: Tensor | None
    visible: Tensor | None  # Intervals.dense
    elements: Tensor | None  # instead of all the above

    @staticmethod
    def __new__(
        cls,
        intervals: Intervals,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        elements: Tensor | None = None,
    ) -> IntervalMask:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(
        self,
        intervals: Intervals,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        elements: Tensor | None = None,
    ) -> None:
        """``intervals`` are for exactly this ``shape``; ``elements`` are the mask if there are any."""
        self.lower, self.upper, self.first, self.last, self.visible = intervals
        self.elements = elements

    def _like(self, device: torch.device) -> IntervalMask:
        lower, upper, *tensors = (self.lower, self.upper, self.first, self.last, self.visible, self.elements)
        first, last, visible, elements = (None if tensor is None else tensor.to(device) for tensor in tensors)
        intervals = Intervals(lower, upper, first, last, visible)
        return IntervalMask(intervals, self.shape, self.dtype, device, elements)

    def _made(self) -> Tensor:
        """The elements, (batch, 1, query_length, key_length)."""
        if self.elements is None:
            intervals = Intervals(self.lower, self.upper, self.first, self.last, self.visible)
            visible = intervals.visible(self.shape[2], self.shape[3], self.device)
            attend = torch.zeros((), dtype=self.dtype, device=self.device)
            hidden = torch.full_like(attend, torch.finfo(self.dtype).min)
            self.elements = torch.where(visible.expand(self.shape), attend, hidden)
            self.lower = self.upper = self.first = self.last = self.visible = None
        return self.elements

    def __repr__(self) -> str:  # type: ignore[override]
        if self.elements is not None:
            return f"IntervalMask({self.elements})"
        band = (self.lower, self.upper)
        return f"IntervalMask({tuple(self.shape)}, {Intervals(*band, self.first, self.last, self.visible)})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """What a compiled graph takes for this tensor: tensors only. A number of the band would be a constant
        of the graph, and it changes from step to step."""
        if self.elements is None and (self.first is None or self.lower is not None or self.upper is not None):
            intervals = Intervals(self.lower, self.upper, self.first, self.last)
            self.first, self.last = rows_of(intervals, self.shape[2], self.shape[3], self.device)
            self.lower = self.upper = None
        fields = [
            name for name in ("first", "last", "visible", "elements") if getattr(self, name) is not None
        ]
        return fields, (self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        fields: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> IntervalMask:
        dtype, device = context
        intervals = Intervals(None, None, fields.get("first"), fields.get("last"), fields.get("visible"))
        return IntervalMask(intervals, size, dtype, device, fields.get("elements"))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mask = args[0] if args else None
        if isinstance(mask, cls):
            if operator in _COPIES or _takes_all(operator, args, mask):
                return mask._like(mask.device)
            if operator is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, mask.dtype):
                return mask._like(kwargs.get("device") or mask.device)
        args, kwargs = pytree.tree_map_only(cls, cls._made, (args, kwargs))
        return operator(*args, **kwargs)


def _takes_all(operator: Any, args: tuple[Any, ...], mask: IntervalMask) -> bool:
    """Whether this is a slice of everything, ``mask[:, :, :, :key_length]``: many a model takes one."""
    if operator is not torch.ops.aten.slice.Tensor:
        return False
    dim, start, end, step = args[1:] + (0, None, None, 1)[len(args) - 1 :]
    return start in (None, 0) and (end is None or end >= mask.shape[dim]) and step == 1


def mask_and_bias(mask: IntervalMask) -> tuple[Mask | None, Tensor | None]:
    """The same for :func:`flashtile.attention`, as either one. Not a method: torch.compile takes methods of
    tensors for operations.

    A compiled graph knows no band (see ``__tensor_flatten__``), and nothing in it may depend on one.
    """
    if mask.elements is not None:
        return None, mask.elements
    band = (None, None) if torch.compiler.is_compiling() else (mask.lower, mask.upper)
    return _Resolved(Intervals(*band, mask.first, mask.last, mask.visible), tuple(mask.shape)), None


def rows_of(
    intervals: Intervals, query_length: int, key_length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First and last, int32 (B or 1, Sq), with the band in them; a dense mask stays out."""
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

    def intervals(self, lengths: Lengths) -> Intervals:
        rows, _, queries, keys = self._shape
        batch, query_length, key_length = lengths.batch, lengths.query_length, lengths.key_length
        fits = queries == query_length and keys == key_length and (rows == batch or rows == 1)
        if not (isinstance(lengths, Uniform) and fits):
            raise ValueError(
                f"the attention mask is for (batch, 1, query_length, key_length) = {self._shape}, got "
                f"batch {batch}, {query_length} queries and {key_length} keys"
            )
        return self._intervals

    def __repr__(self) -> str:
        return f"IntervalMask({self._shape}, {self._intervals})"
