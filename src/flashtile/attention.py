"""``flashtile.attention``: validates a call once and hands it to the kernels."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from flashtile import torch_ops
from flashtile.arguments import (
    Sizes,
    checked_inputs,
    checked_intervals,
    checked_options,
    checked_seed,
    refuse_unknown,
)
from flashtile.masks import Intervals, Mask
from flashtile.masks.lengths import Uniform
from flashtile.problem import AttentionProblem, default_scale

_NO_MASK = Intervals()


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention in tiles, forward and backward, with memory linear in the lengths.

    Computes ``dropout(softmax(softcap(scale * query @ key^T) + bias - alibi)) @ value``, the softmax over the
    keys a query sees (FlashAttention-2, algorithms 1 and 2). A query that sees none gets output 0, LSE -inf
    and gradients 0.
    Differentiable in query, key, value, bias, alibi_slopes and sinks, through the output and the LSE. A
    second derivative is exact too, but standard attention computes it, with memory quadratic in the lengths.

    Args:
        query: (B, Hq, Sq, D), or (N, L, D) for N sequences of one head; float64, float32, bfloat16 or
            float16, any strides.
        key: (B, Hkv, Sk, D), query's dtype. Hkv divides Hq: query head h reads key head ``h // (Hq // Hkv)``.
        value: (B, Hkv, Sk, Dv), query's dtype.
        mask: a ``flashtile.Mask`` (``flashtile.masks``; costs no memory), or a bool tensor that broadcasts to
            (B, Hq, Sq, Sk), True where the query may see the key.
        bias: query's dtype, broadcasts to (B, Hq, Sq, Sk); added to the scores; -inf hides a key.
        scale: factor of the scores; D ** -0.5 by default.
        softcap: bounds the scaled scores smoothly: ``softcap * tanh(score / softcap)``.
        alibi_slopes: (Hq,) or (B, Hq), any floating dtype; subtracts ``slope * |i + Sk - Sq - j|`` from score
            (i, j).
        sinks: (Hq,), any floating dtype; one more logit per head in the softmax's denominator, with no value.
            -inf counts for nothing, infinity takes everything: output 0, LSE infinity.
        dropout_p: probability with which an entry of the softmax is dropped; the kept ones are divided by
            ``1 - dropout_p``.
        seed: 64-bit seed of the dropout mask (see ``flashtile.dropout_mask``), an int or an int64 tensor of
            one element. By default drawn from PyTorch's generator, so torch.manual_seed and
            torch.utils.checkpoint govern it. Without dropout (in evaluation, say) it changes nothing.
        return_lse: also return the LSE, the natural log of the sum of exponentials of every row of scores.

    Returns:
        The output (B, Hq, Sq, Dv) in query's dtype and memory order; with ``return_lse`` also the LSE
        (B, Hq, Sq) in float32 (float64 for float64 inputs). Both lose the head dimension for 3-D inputs.

    Under autocast query, key, value and bias take the autocast dtype.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value.
        NotImplementedError: no backend serves the device.
    """
    if unknown:
        refuse_unknown(attention, unknown)
    query, key, value, bias = checked_inputs(query, key, value, bias)
    three_dims = query.dim() == 3
    if three_dims:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    batch, heads, query_length, _ = query.shape
    sizes, intervals = Sizes(batch, heads, query_length, key.shape[2]), _NO_MASK
    if mask is not None:
        lengths = Uniform(batch, query_length, key.shape[2], query.device)
        intervals = checked_intervals(mask, query, sizes, lengths, three_dims)
    bias, alibi_slopes, sinks = checked_options(
        query, sizes, scale=scale, softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks,
        three_dims=three_dims,
    )  # fmt: skip
    seed_tensor = None
    if dropout_p != 0.0 or seed is not None:
        seed_tensor = checked_seed(dropout_p, seed, query.device)

    lower, upper, first, last, dense = intervals
    plain = bias is None and alibi_slopes is None and sinks is None and dense is None and seed_tensor is None
    if plain and torch_ops.undisturbed(query, key, value):
        scale = default_scale(query) if scale is None else scale
        out, lse = torch_ops.forward(
            AttentionProblem(query, key, value, scale, softcap, lower, upper, first, last)
        )
    else:
        out, lse = torch_ops.attention(
            query, key, value, intervals, scale=scale, softcap=softcap, bias=bias, alibi_slopes=alibi_slopes,
            sinks=sinks, seed=seed_tensor, dropout_p=dropout_p,
        )  # fmt: skip
    if three_dims:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out
