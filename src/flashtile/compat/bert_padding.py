"""Takes padding out of a batch and puts it back, with the names and results of ``flash_attn.bert_padding``.

Plain PyTorch, differentiable. Unlike the original, the functions need no einops, take a mask of any dtype
(what is not 0 is a token), and an empty batch; wrong shapes raise an error that is both a ValueError and a
RuntimeError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.compat.errors import InputError, InputTypeError

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one sequence after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), nonzero for a token.
        unused_mask: (batch, seqlen), nonzero for a place that is kept although it holds no token.

    Returns:
        The kept places (total, ...); their indices in the flattened batch, int64 (total,); cu_seqlens, int32
        (batch + 1,); the longest sequence, an int; and the number of tokens of each sequence, int32 (batch,).
        All but the last count unused places too.

    Raises:
        InputError: a mask whose shape is not (batch, seqlen).
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    tokens = attention_mask != 0
    kept = tokens
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = tokens | (unused_mask != 0)
    lengths = kept.sum(dim=1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    unpadded = index_first_axis(hidden_states.flatten(0, 1), indices)
    return unpadded, indices, _cumulative(lengths), _longest(lengths), tokens.sum(dim=1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of rows that each hold several short sequences one after the other, then padding.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: int (batch, seqlen); its nonzero entries are the lengths of a row's
            sequences, in order: [2, 3, 0, 0, 0, 0] are two tokens, three tokens and a place of padding.

    Returns:
        The tokens (total, ...); their indices in the flattened batch, int64 (total,); cu_seqlens, int32
        (sequences + 1,); and the longest sequence, an int.

    Raises:
        InputError: lengths whose shape is not (batch, seqlen).
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    filled = attention_mask_in_length.sum(dim=1, keepdim=True)
    indices = (places < filled).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0].to(torch.int32)
    unpadded = index_first_axis(hidden_states.flatten(0, 1), indices)
    return unpadded, indices, _cumulative(lengths), _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The tokens (total, ...) at ``indices`` of the flattened batch (batch, seqlen, ...); the rest is 0."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: rows of (n, ...) at integer ``indices`` (total,)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``values`` (total, ...) at rows ``indices`` of (first_axis_dim, ...); the other rows are 0."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices.to(torch.int64), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``(input[indices], input)``; the gradients of both reach ``input``."""
    return index_first_axis(input, indices), input


def __getattr__(name: str) -> Any:
    if name == "rearrange":  # the original imports it from einops, and others import it from the original
        from einops import rearrange

        return rearrange
    raise AttributeError(f"{__name__} has no {name}; it has {', '.join(__all__)}")


def _check_mask(name: str, mask: object, hidden_states: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise InputTypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise InputError(
            f"{name} must have the (batch, seqlen) of hidden_states, {tuple(hidden_states.shape[:2])}, "
            f"got shape {tuple(mask.shape)}"
        )


def _cumulative(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
