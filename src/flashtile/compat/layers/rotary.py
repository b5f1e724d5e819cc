"""Rotary embedding with the names and layouts of ``flash_attn.layers.rotary``, in plain PyTorch.

Unlike the original's, the functions run anywhere, and their second derivatives exist; the module
RotaryEmbedding is not here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import rotary
from flashtile.compat.errors import InputError, InputTypeError
from flashtile.compat.rotation import checked_positions, checked_starts, checked_tables

__all__ = [
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first rotary_dim numbers of every row by the angles of its position.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``.
        cos, sin: (positions, rotary_dim / 2), rotary_dim <= head_dim.
        interleaved: numbers 2i and 2i + 1 are a pair (GPT-J), otherwise i and i + rotary_dim / 2 (GPT-NeoX).
        inplace: write the result into x, and return x.
        seqlen_offsets: int or (batch,), the position of each sequence's first row.
        cu_seqlens: (batch + 1,), where each sequence begins in x, and where the last one ends.
        max_seqlen: accepted as the original needs it; the lengths are known without.

    Returns:
        A tensor of x's shape and dtype; computed in float32 (float64 for float64).

    Raises:
        InputError: shapes that do not fit, or a position without a row in cos.
    """
    layout = "(batch, seqlen, heads, head_dim)" if cu_seqlens is None else "(total, heads, head_dim)"
    if not isinstance(x, Tensor):
        raise InputTypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise InputError(f"x must be {layout}, got shape {tuple(x.shape)}")
    cos, sin = checked_tables(x, cos, sin)
    if cu_seqlens is None:
        start = checked_starts("seqlen_offsets", seqlen_offsets, x.shape[0], x.device)
        positions = start + torch.arange(x.shape[1], device=x.device)
    else:
        positions = _packed_positions(x.shape[0], cu_seqlens, seqlen_offsets)
    positions = checked_positions(positions.reshape(-1, 1), cos, "cos")
    # One sequence of one row per token, so that the result lies in memory as x does.
    rows = x.reshape(-1, x.shape[-2], 1, x.shape[-1])
    turned = rotary.turn(rows, cos, sin, positions, interleaved).reshape(x.shape)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """:func:`apply_rotary_emb` of x (batch, seqlen, heads, head_dim) at the positions 0, 1, 2, ..."""
    return apply_rotary_emb(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and the keys in ``qkv``, in place; returns it.

    ``qkv`` is (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 * heads_k, head_dim) with
    ``num_heads_q``. ``cos_k`` and ``sin_k`` are for the keys, by default as for the queries.
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        queries, keys = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None and (kv_heads := qkv.shape[2] - num_heads_q) % 2 == 0:
        queries, keys = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + kv_heads // 2]
    else:
        raise InputError(
            "qkv must be (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 * heads_k, "
            f"head_dim) with num_heads_q, got shape {tuple(qkv.shape)} and num_heads_q {num_heads_q}"
        )
    apply_rotary_emb(queries, cos, sin, interleaved, True, seqlen_offsets)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(keys, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys in ``kv`` (batch, seqlen, 2, heads, head_dim), in place; returns it."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise InputError(f"kv must be (batch, seqlen, 2, heads, head_dim), got shape {tuple(kv.shape)}")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def _packed_positions(total: int, cu_seqlens: Tensor, seqlen_offsets: int | Tensor) -> Tensor:
    """The position of every row in its own sequence; 0 for rows behind the last one."""
    rows = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1].contiguous(), rows, right=True)
    start = checked_starts("seqlen_offsets", seqlen_offsets, cu_seqlens.shape[0] - 1, rows.device)
    return torch.where(rows < cu_seqlens[-1], rows - cu_seqlens[sequence] + start[sequence, 0], 0)
