"""flash-attn's functions on flashtile's kernels: the same names, signatures, layouts, defaults and meanings.

Signatures are flash-attn 2's; two keyword-only arguments come from flash-attn 4. In all functions:

- Tensors are (batch, length, heads, head_dim), or (tokens, heads, head_dim) for the varlen functions, with
  any strides; nothing is copied. Query head h reads key head ``h // (heads // kv_heads)``.
- ``causal`` and ``window_size`` are aligned to the bottom right: query i stands at key ``i + sk - sq``.
  ``window_size`` is (left, right), both inclusive, as a tuple, a list or a tensor; -1 (or None) is no bound.
  ``causal`` sets right to 0.
- ``softmax_scale`` is head_dim ** -0.5 by default. ``softcap`` 0.0 is none; otherwise scores become
  ``softcap * tanh(score / softcap)``. ``alibi_slopes``, (heads,) or (batch, heads), subtracts
  ``slope * |i + sk - sq - j|``.
- ``dropout_p``: entries of the softmax are dropped and the others divided by ``1 - dropout_p``. The seed is
  drawn from PyTorch's generator, the mask is ``flashtile.dropout_mask``'s.
- ``deterministic`` changes nothing: the backward pass always is.
- ``learnable_sink`` (heads,): one more logit in every row's denominator. ``return_lse``: return (out, lse).
- ``return_attn_probs``: return (out, lse, S_dmask). ``lse`` is (batch, heads, sq), or (heads, tokens) for
  varlen, the natural logarithm of the sum of exponentials of every row, float32 (float64 for float64).
  ``S_dmask`` (batch, heads, sq, sk) holds the probabilities, negative where an entry was dropped; varlen
  puts each sequence at [0, 0]. It takes quadratic memory and has no gradient; ``out`` stays the same. For
  varlen it breaks a graph of torch.compile, as a ``window_size`` in a tensor does; everything else makes one
  full graph.
- Everything is differentiable, the LSE included, but for ``flash_attn_with_kvcache`` and paged keys.
- What an input is refused with is a ValueError and a RuntimeError at once, and names the argument.

Differences from flash-attn 2:

- CPU tensors, too; float32 and float64; any head_dim (on a GPU up to 512, 256 with gradients); values may
  have a head_dim of their own; batch 0.
- The LSE of a row without keys is -inf, not +inf, and has its true value under ``causal`` with
  ``alibi_slopes``, where flash-attn's is off by a constant of the row. It and the slopes have gradients.
- ``S_dmask`` is there without dropout too, has the sizes of the problem, and is right.
- A window with right >= sk counts as it stands where sq > sk; flash-attn 2 takes it for no bound. A negative
  size other than -1 is refused.
- A negative softcap is refused, not ignored.
- Dropout has another random mask than flash-attn's for the same generator state.
- Autocast applies, except to caches.
- Varlen: int64 offsets are fine, as is a tensor for a largest length; rows behind the last offset are 0, and
  so are their gradients.
- ``flash_attn_with_kvcache`` takes pages of any size, any even rotary dimension and int64 integers;
  ``num_splits`` is accepted and does not change a bit of the result. Two sequences that would append to one
  place (equal ``cache_batch_idx``) are refused. Where a gradient would be recorded through it, it raises a
  RuntimeError; flash-attn does without the gradient. Use ``torch.no_grad()``.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.compat.arguments import WindowSize, by_heads, options_of, unpacked
from flashtile.compat.calls import Outputs, attend, attend_cache, attend_packed

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Outputs:
    """Attention of q (batch, sq, heads, head_dim) to k and v (batch, sk, kv_heads, head_dim).

    Returns out (batch, sq, heads, head_dim). The options are explained at the top of this module.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    return attend(by_heads(q, k, v), options, return_attn_probs, return_lse)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Outputs:
    """:func:`flash_attn_func` with keys and values in one tensor kv (batch, sk, 2, kv_heads, head_dim)."""
    k, v = unpacked("kv", kv, 2)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    inputs = by_heads(q, k, v, ("q", "kv[:, :, 0]", "kv[:, :, 1]"))
    return attend(inputs, options, return_attn_probs, return_lse)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Outputs:
    """:func:`flash_attn_func` with all inputs in one tensor qkv (batch, length, 3, heads, head_dim)."""
    q, k, v = unpacked("qkv", qkv, 3)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    return attend(by_heads(q, k, v, ("qkv", "qkv", "qkv")), options, return_attn_probs, return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Outputs:
    """Attention of sequences packed one behind the other, each to its own keys.

    q is (total_q, heads, head_dim), k and v are (total_k, kv_heads, head_dim); sequence b has the rows
    ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` of q. With ``block_table`` (batch, pages), k and v are
    pages of a cache, (pages, page_size, kv_heads, head_dim), and there are no gradients. Returns out
    (total_q, heads, head_dim). The options are explained at the top of this module.
    """
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    longest = (max_seqlen_q, max_seqlen_k)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    return attend_packed(
        (q, k, v), cu_seqlens, longest, options, return_attn_probs, return_lse, block_table=block_table
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Outputs:
    """:func:`flash_attn_varlen_func` with keys and values in kv (total_k, 2, kv_heads, head_dim)."""
    k, v = unpacked("kv", kv, 2, tokens=True)
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    longest = (max_seqlen_q, max_seqlen_k)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    names = {"key": "kv[:, 0]", "value": "kv[:, 1]"}
    return attend_packed((q, k, v), cu_seqlens, longest, options, return_attn_probs, return_lse, names=names)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Outputs:
    """:func:`flash_attn_varlen_func` with all inputs in one tensor qkv (total, 3, heads, head_dim)."""
    q, k, v = unpacked("qkv", qkv, 3, tokens=True)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    names = dict.fromkeys(("query", "key", "value"), "qkv")
    names |= {"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"}
    return attend_packed(
        (q, k, v), (cu_seqlens,), (max_seqlen,), options, return_attn_probs, return_lse, names=names
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Outputs:
    """Attention of q (batch, sq, heads, head_dim) to a cache of keys and values; without gradients.

    Args:
        k_cache, v_cache: (cache entries, places, kv_heads, head_dim), or with ``block_table`` (batch, pages)
            pages of it, (pages, page_size, kv_heads, head_dim).
        k, v: (batch, new, kv_heads, head_dim), written into the cache in place, behind ``cache_seqlens``.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotates k at ``cache_seqlens + t`` before it is
            written, and q at ``cache_seqlens + t`` too under ``causal`` or a window, otherwise all of q at
            ``cache_seqlens``. Only together with k and v.
        cache_seqlens: int or (batch,), the keys that are in the cache before k; by default it is full.
        cache_batch_idx: (batch,), the cache entry of each sequence; by default 0, 1, 2, ...
        cache_leftpad: (batch,), the first key of each sequence.
        rotary_interleaved: rotate neighbours (GPT-J), or else halves (GPT-NeoX).
        num_splits: has no influence on the result.

    Returns out (batch, sq, heads, head_dim), with ``return_softmax_lse`` also the LSE (batch, heads, sq). The
    other options are explained at the top of this module.
    """
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink)
    out, lse = attend_cache(
        q, k_cache, v_cache, k, v, options,
        rotary=(rotary_cos, rotary_sin, rotary_interleaved),
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
