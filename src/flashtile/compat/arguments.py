"""Checks and translates the arguments that flash-attn's functions share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flashtile import masks
from flashtile.arguments import check_alike, inputs_agree
from flashtile.compat.errors import InputError, InputTypeError, named
from flashtile.masks import Mask
from flashtile.masks.arguments import is_int
from flashtile.problem import SUPPORTED_DTYPES

WindowSize = Sequence[int | None] | Tensor

_CAUSAL = masks.causal(alignment="bottom-right")
_DENSE = "(batch, length, heads, head_dim)"


def mask_of(causal: bool, window_size: WindowSize) -> Mask | None:
    """The keys a query sees, its position counted from the end: query i stands at key i + sk - sq.

    Both bounds are inclusive; -1 or None is no bound. ``causal`` takes the place of the right one.
    """
    left, right = _bounds(window_size)
    if causal:
        right = 0
        if left is None:
            return _CAUSAL
    return None if left is right is None else masks.window(left, right, alignment="bottom-right")


def _bounds(window_size: WindowSize) -> tuple[int | None, int | None]:
    sizes: object = window_size
    if isinstance(window_size, Tensor):
        if window_size.is_floating_point() or window_size.is_complex() or window_size.dtype == torch.bool:
            _refuse_window(window_size)
        sizes = window_size.tolist()
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
        _refuse_window(window_size)
    return _bound(sizes[0], window_size), _bound(sizes[1], window_size)


def _bound(size: Any, window_size: WindowSize) -> int | None:
    if size is None:
        return None
    if not is_int(size):
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            _refuse_window(window_size)
        size = operator.index(size)  # NumPy's integers
    if size < -1:
        raise InputError(f"window_size must hold sizes >= 0, or -1 for no bound, got {window_size!r}")
    return None if size == -1 else size


def _refuse_window(window_size: object) -> NoReturn:
    raise InputTypeError(
        f"window_size must be two ints (left, right), as a tuple, a list or a tensor, got {window_size!r}"
    )


class Options(NamedTuple):
    """What flash-attn's options are called in ``flashtile.attention`` and its like."""

    mask: Mask | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | Tensor | None = None

    def keywords(self) -> dict[str, Any]:
        """The options by name."""
        return dict(zip(_NAMES, self, strict=True))


# torch.compile before torch 2.9 knows neither _fields nor _asdict nor _replace.
_NAMES = Options._fields


def options_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
) -> Options:
    cap = None if softcap == 0.0 else softcap
    mask = mask_of(causal, window_size)
    return Options(mask, softmax_scale, cap, alibi_slopes, learnable_sink, dropout_p)


def by_heads(
    q: Tensor, k: Tensor, v: Tensor, names: Sequence[str] = ("q", "k", "v")
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs as (batch, heads, length, head_dim) views, once they are known to fit together."""
    for name, tensor in zip(names, (q, k, v), strict=True):
        check_layout(name, tensor, _DENSE)
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not inputs_agree(query, key, value):
        _refuse_inputs(q, k, v, names)
    return query, key, value


def unpacked(name: str, packed: Tensor, parts: int, *, tokens: bool = False) -> tuple[Tensor, ...]:
    """The ``parts`` that lie side by side in ``packed``, along the dimension before the heads."""
    layout = f"({'tokens' if tokens else 'batch, length'}, {parts}, heads, head_dim)"
    check_layout(name, packed, layout)
    if packed.shape[-3] != parts:
        raise InputError(f"{name} must be {layout}, got shape {tuple(packed.shape)}")
    return packed.unbind(-3)


def check_layout(name: str, tensor: object, layout: str) -> None:
    """That ``tensor`` is one, and has the number of dimensions of ``layout`` and a dtype that is served."""
    if not isinstance(tensor, Tensor):
        raise InputTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != layout.count(",") + 1:
        raise InputError(f"{name} must be {layout}, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in SUPPORTED_DTYPES:
        dtypes = ", ".join(map(str, SUPPORTED_DTYPES))
        raise InputTypeError(f"{name} must have one of the dtypes {dtypes}, got {tensor.dtype}")


def _refuse_inputs(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str]) -> NoReturn:
    first = names[0]
    for name, tensor in zip(names, (q, k, v), strict=True):
        shape = f"got shape {tuple(tensor.shape)}"
        named(check_alike, name, tensor, q, names={"query": first})
        if tensor.shape[0] != q.shape[0]:
            raise InputError(f"{name} must have the batch size of {first}, {q.shape[0]}, {shape}")
        if tensor.shape[3] < 1:
            raise InputError(f"{name} must have a head_dim of at least 1, {shape}")
    if k.shape[3] != q.shape[3]:
        raise InputError(
            f"{names[1]} must have the head_dim of {first}, {q.shape[3]}, got shape {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise InputError(
            f"{names[2]} must have batch, length and heads of {names[1]}, {tuple(k.shape[:3])}, "
            f"got shape {tuple(v.shape)}"
        )
    raise InputError(
        f"{names[1]} must have a number of heads that divides {first}'s {q.shape[2]}, "
        f"got shape {tuple(k.shape)}"
    )
