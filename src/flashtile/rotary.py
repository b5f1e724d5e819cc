"""Rotary position embedding (Su et al., "RoFormer", 2021), in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.arguments import shape_of
from flashtile.masks.arguments import values_known


def apply(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = True) -> Tensor:
    """``x`` with the pairs of its first numbers rotated by the angles of their positions.

    Args:
        x: (B, H, L, D), any floating dtype.
        cos, sin: (positions, R / 2) cosines and sines of the angles, R <= D; row p belongs to position p.
            What stands behind the first R numbers of x is left as it is.
        positions: (B or 1, L) integers, the rows of ``cos`` and ``sin`` to take.
        interleaved: numbers 2i and 2i + 1 are a pair (GPT-J); otherwise i and i + R / 2 (GPT-NeoX, Llama).

    Returns:
        A new tensor of x's shape and dtype; the rotation is computed in float32 (float64 for float64).

    Raises:
        TypeError: cos or sin is no floating-point tensor.
        ValueError: shapes that do not fit, another device, or a position without a row.
    """
    check_tables(x, cos, sin)
    if values_known(positions) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(
                f"positions must be in 0..{cos.shape[0] - 1}, the rows of cos and sin, got {low}..{high}"
            )
    return turn(x, cos, sin, positions, interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """:func:`apply` of what has been checked."""
    half = cos.shape[1]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[positions.long()].to(compute).unsqueeze(1) for table in (cos, sin))  # (B, 1, L, R / 2)
    rotated = x[..., : 2 * half].to(compute)
    pairs = rotated.reshape(*rotated.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((first * c - second * s, first * s + second * c), -1 if interleaved else -2)
    return torch.cat((turned.flatten(-2).to(x.dtype), x[..., 2 * half :]), dim=-1)


def check_tables(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, names: tuple[str, str] = ("cos", "sin")
) -> None:
    """Refuses tables of cosines and sines that do not fit x (..., D)."""
    head_dim, shape = x.shape[-1], cos.shape if isinstance(cos, Tensor) else None
    for name, table in zip(names, (cos, sin), strict=True):
        if not isinstance(table, Tensor) or not table.is_floating_point():
            kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
        if table.device != x.device:
            raise ValueError(f"{name} must be on the device of what it turns, {x.device}, got {table.device}")
        if table.dim() != 2 or 2 * table.shape[1] > head_dim or table.shape != shape:
            raise ValueError(
                f"{name} must be (positions, at most head_dim / 2 = {head_dim // 2}), the same for both, "
                f"got {shape_of(table)}"
            )
