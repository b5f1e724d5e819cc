"""The calls behind flash-attn's functions: flashtile's own, and what flash-attn returns besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashtile.arguments import heads_share
from flashtile.attention import attention
from flashtile.compat.arguments import Options, check_layout
from flashtile.compat.errors import InputError, named
from flashtile.compat.probabilities import packed_probabilities, signed_probabilities
from flashtile.compat.rotation import Rotary, rotated
from flashtile.dropout import draw_seed, dropout_mask
from flashtile.kvcache import attention_kvcache
from flashtile.varlen import attention_varlen

Outputs = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def attend(inputs: Sequence[Tensor], options: Options, return_attn_probs: bool, return_lse: bool) -> Outputs:
    """Attention of inputs (batch, heads, length, head_dim); out is (batch, length, heads, head_dim)."""
    query, key, value = inputs
    if return_attn_probs:
        options = _with_seed(options, query)
    out: Tensor
    lse: Tensor
    out, lse = named(attention, query, key, value, **options.keywords(), return_lse=True)
    out = out.transpose(1, 2)
    if not return_attn_probs:
        return (out, lse) if return_lse else out
    kept = None
    if options.seed is not None:
        batch, heads, query_length, _ = query.shape
        kept = dropout_mask(
            options.seed, options.dropout_p, batch, heads, query_length, key.shape[2], query.device
        )
    query, key = query.to(out.dtype), key.to(out.dtype)  # as autocast left them
    return out, lse, signed_probabilities(query, key, lse, options, kept)


def attend_packed(
    inputs: Sequence[Tensor],
    cu_seqlens: Sequence[Tensor],
    longest: Sequence[int | Tensor],
    options: Options,
    return_attn_probs: bool,
    return_lse: bool,
    *,
    block_table: Tensor | None = None,
    names: Mapping[str, str] | None = None,
) -> Outputs:
    """Attention of packed inputs (tokens, heads, head_dim); ``cu_seqlens`` and ``longest`` of q, and of k."""
    query, key, value = inputs
    if return_attn_probs and isinstance(query, Tensor):
        options = _with_seed(options, query)
    bounds = [
        _bound((names or {}).get(name, name), length)
        for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=False)
    ]
    out: Tensor
    lse: Tensor
    out, lse = named(
        attention_varlen,
        query,
        key,
        value,
        *cu_seqlens,
        max_seqlen_q=bounds[0],
        max_seqlen_k=bounds[-1],
        block_table=block_table,
        **options.keywords(),
        return_lse=True,
        names=names,
    )
    if return_attn_probs:
        starts = (cu_seqlens[0], cu_seqlens[-1])
        sizes = (bounds[0], bounds[-1])
        query, key = query.to(out.dtype), key.to(out.dtype)  # as autocast left them
        return out, lse, packed_probabilities(query, key, lse, starts, sizes, options, block_table)
    return (out, lse) if return_lse else out


def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    options: Options,
    *,
    rotary: Rotary,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` against a cache, all tensors (batch or entries, length, heads, head_dim)."""
    layout = "(batch, length, heads, head_dim)"
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    for name, tensor in given.items():
        if tensor is not None or name not in "kv":
            check_layout(name, tensor, layout)
    _check_heads(q, k_cache, k, v, layout)
    query, keys, values = (tensor.transpose(1, 2) for tensor in (q, k_cache, v_cache))
    if block_table is None and cache_batch_idx is None:  # the first entries of a larger cache
        keys, values = keys[: q.shape[0]], values[: q.shape[0]]
    key, value = (None if tensor is None else tensor.transpose(1, 2) for tensor in (k, v))
    query, key = rotated(query, key, rotary, cache_seqlens, local=options.mask is not None)
    out: Tensor
    lse: Tensor
    out, lse = named(
        attention_kvcache,
        query,
        keys,
        values,
        key=key,
        value=value,
        cache_lengths=cache_seqlens,
        block_table=block_table,
        batch_index=cache_batch_idx,
        left_padding=cache_leftpad,
        mask=options.mask,
        scale=options.scale,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        return_lse=True,
    )
    return out.transpose(1, 2), lse


def _check_heads(q: Tensor, k_cache: Tensor, k: Tensor | None, v: Tensor | None, layout: str) -> None:
    """What fits together in this layout, refused with shapes as they were passed."""
    heads, kv_heads = q.shape[2], k_cache.shape[2]
    if not heads_share(heads, kv_heads):
        raise InputError(
            f"k_cache and v_cache must be {layout}, their number of heads a divisor of q's {heads}, "
            f"got shape {tuple(k_cache.shape)}"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor is not None and (tensor.shape[0] != q.shape[0] or tensor.shape[2] != kv_heads):
            raise InputError(
                f"{name} must be {layout} = ({q.shape[0]}, length, {kv_heads}, head_dim), "
                f"got shape {tuple(tensor.shape)}"
            )


def _with_seed(options: Options, query: Tensor) -> Options:
    """Whoever asks for the dropped entries needs the seed: drawn as attention() would, so out is the same."""
    if not options.dropout_p or options.seed is not None:
        return options
    return Options(**{**options.keywords(), "seed": draw_seed(query.device)})


def _bound(name: str, length: int | Tensor) -> int | None:
    """A bound that is a tensor is read, but not where that would break a graph: it is a mere check."""
    if not isinstance(length, Tensor):
        return length
    if length.numel() != 1:
        raise InputError(f"{name} must be one int, got shape {tuple(length.shape)}")
    return None if torch.compiler.is_compiling() else int(length)
