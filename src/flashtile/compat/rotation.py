"""Rotary embedding as flash-attn applies it: at which positions, and what is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import rotary
from flashtile.arguments import check_together
from flashtile.compat.errors import InputError, InputTypeError, named
from flashtile.masks.arguments import is_int, values_known

Rotary = tuple[Tensor | None, Tensor | None, bool]  # cos, sin, interleaved


def rotated(
    query: Tensor, key: Tensor | None, tables: Rotary, cache_seqlens: int | Tensor | None, local: bool
) -> tuple[Tensor, Tensor | None]:
    """Query and new keys, (batch, heads, length, head_dim), rotated from the ends of their sequences on.

    Not ``local``, all queries stand at the first new position.
    """
    cos, sin, interleaved = tables
    if cos is None and sin is None:
        return query, key
    named(check_together, rotary_cos=cos, rotary_sin=sin)
    if key is None:
        raise InputError("k must be given together with rotary_cos and rotary_sin, got None")
    if cache_seqlens is None:
        raise InputError("cache_seqlens must say at which positions k is rotated, got None")
    cos, sin = checked_tables(query, cos, sin, ("rotary_cos", "rotary_sin"))
    start = checked_starts("cache_seqlens", cache_seqlens, query.shape[0], query.device)
    steps = torch.arange(max(query.shape[2], key.shape[2]), device=query.device)
    query_steps = steps[: query.shape[2]] if local else steps.new_zeros(query.shape[2])
    turned = [
        rotary.turn(tensor, cos, sin, checked_positions(start + offsets, cos, "rotary_cos"), interleaved)
        for tensor, offsets in ((query, query_steps), (key, steps[: key.shape[2]]))
    ]
    return turned[0], turned[1]


def checked_tables(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, names: tuple[str, str] = ("cos", "sin")
) -> tuple[Tensor, Tensor]:
    named(rotary.check_tables, x, cos, sin, names)
    assert cos is not None
    assert sin is not None
    return cos, sin


def checked_starts(name: str, starts: int | Tensor, batch: int, device: torch.device) -> Tensor:
    """The position of each sequence's first row, int64 (batch, 1)."""
    if not isinstance(starts, Tensor):
        if not is_int(starts):
            raise InputTypeError(f"{name} must be an int or a tensor, got {type(starts).__name__}")
        return torch.full((batch, 1), starts, device=device)
    if starts.is_floating_point() or starts.dtype == torch.bool:
        raise InputTypeError(f"{name} must hold integers, got {starts.dtype}")
    if starts.shape not in ((), (batch,)):
        raise InputError(f"{name} must be an int or (batch,) = ({batch},), got shape {tuple(starts.shape)}")
    return starts.to(device, torch.int64).expand(batch)[:, None]


def checked_positions(positions: Tensor, cos: Tensor, name: str) -> Tensor:
    """Integers, each with a row in ``cos``."""
    if values_known(positions) and positions.numel():
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= cos.shape[0]:
            raise InputError(
                f"{name} must have a row for each position, {first} to {last}, got shape {tuple(cos.shape)}"
            )
    return positions
