"""Rotary position embedding (Su et al., "RoFormer", 2021), in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """
    half = cos.shape[1]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table.to(compute)[positions.long()].unsqueeze(1) for table in (cos, sin))  # (B, 1, L, R / 2)
    rotated = x[..., : 2 * half].to(compute)
    pairs = rotated.reshape(*rotated.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((first * c - second * s, first * s + second * c), -1 if interleaved else -2)
    return torch.cat((turned.flatten(-2).to(x.dtype), x[..., 2 * half :]), dim=-1)
