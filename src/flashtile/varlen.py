"""``flashtile.attention_varlen``: sequences of different lengths, packed one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from flashtile import torch_ops
from flashtile.arguments import (
    Sizes,
    autocast,
    check_alike,
    check_shapes,
    check_tensor,
    checked_intervals,
    checked_options,
    checked_seed,
    refuse_gradients,
    refuse_unknown,
    shape_of,
)
from flashtile.masks import Intervals, Mask
from flashtile.masks.arguments import is_int, values_known
from flashtile.masks.lengths import Packed
from flashtile.ragged import (
    block_table_rows,
    check_block_table,
    check_range,
    cumulative_lengths,
    page_numbers,
)

Starts = Tensor | Sequence[int]


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    block_table: Tensor | Sequence[Sequence[int]] | None = ...,
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
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    block_table: Tensor | Sequence[Sequence[int]] | None = ...,
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
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | Sequence[Sequence[int]] | None = None,
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
    """``flashtile.attention`` of B packed sequences, each within itself: no padding, no work for it.

    On a CPU every sequence gets the bits that ``attention`` gives it alone. Differentiable in the same
    arguments.

    Args:
        query: (Tq, Hq, D), the sequences one behind the other; dtypes and strides as in ``attention``.
        key: (Tk, Hkv, D). With ``block_table``: pages of a cache, (pages, page_size, Hkv, D).
        value: (Tk, Hkv, Dv), or pages of values.
        cu_seqlens_q: (B + 1,) int32 or int64 tensor, or a list: 0 and the end of every sequence, so that
            sequence b has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``. Rows behind the
            last end belong to no sequence: output 0, LSE -inf, gradient 0.
        cu_seqlens_k: the same for key and value; by default ``cu_seqlens_q``.
        max_seqlen_q, max_seqlen_k: bounds of the lengths, checked; by default the longest sequence.
        block_table: (B, P) integers, the pages of each sequence in order; without gradients. ``cu_seqlens_k``
            says how many keys it has. Autocast leaves pages, and so the other inputs, as they are.
        mask: a ``flashtile.Mask``, resolved for every sequence by its own lengths (values per query or per
            key are packed as query and key are), or a bool tensor that broadcasts to (B, Hq, max_seqlen_q,
            max_seqlen_k), in every sequence's own coordinates.
        bias: query's dtype, broadcasts as a bool mask does.
        alibi_slopes: (Hq,) or (B, Hq).
        scale, softcap, sinks, dropout_p, seed: as in ``attention``. The dropout mask is
            ``flashtile.dropout_mask(seed, dropout_p, B, Hq, max_seqlen_q, max_seqlen_k)``, cut to each.
        return_lse: also return the LSE.

    Returns:
        The output (Tq, Hq, Dv) in query's dtype; with ``return_lse`` also the LSE (Hq, Tq) in float32
        (float64 for float64 inputs). Parts over disjoint keys merge as ``merge(outputs, [lse.mT ...])``.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; cumulative lengths that do not start at 0, decrease or
            exceed the rows there are (values on other devices are not looked at).
        RuntimeError: a gradient would have to be recorded through pages.
        NotImplementedError: no backend serves the device.
    """
    if unknown:
        refuse_unknown(attention_varlen, unknown)
    paged = block_table is not None
    query, key, value, bias = _checked_packed(query, key, value, bias, paged)
    device, rows, keys = query.device, query.shape[2], key.shape[2]
    query_starts = cumulative_lengths("cu_seqlens_q", cu_seqlens_q, rows, device, heads=query.shape[1])
    if cu_seqlens_k is None and paged:
        raise ValueError("cu_seqlens_k must say how many keys of its pages a sequence has, got None")
    if cu_seqlens_k is None and rows != keys:
        raise ValueError(f"key must have as many rows as query, {rows}, without cu_seqlens_k, got {keys}")
    key_starts = query_starts
    if cu_seqlens_k is not None:
        key_starts = cumulative_lengths("cu_seqlens_k", cu_seqlens_k, 2**62 if paged else keys, device)
    if key_starts.shape != query_starts.shape:
        raise ValueError(
            f"cu_seqlens_k must have the length of cu_seqlens_q, {query_starts.shape[0]}, "
            f"got {key_starts.shape[0]}"
        )
    lengths_k = key_starts.diff()
    if block_table is not None:
        differentiable = (query, key, value, bias, alibi_slopes, sinks)
        refuse_gradients("attention_varlen with block_table", *differentiable)
        block_table = _checked_table(block_table, lengths_k, key)
    longest = (
        _longest("max_seqlen_q", max_seqlen_q, query_starts.diff()),
        _longest("max_seqlen_k", max_seqlen_k, lengths_k),
    )
    batch, heads = query_starts.shape[0] - 1, query.shape[1]
    sizes, intervals = Sizes(batch, heads, *longest), Intervals()
    if mask is not None:
        capacity = keys if block_table is None else keys * block_table.shape[1]
        bound = capacity if longest[1] is None else longest[1]
        packed = None if paged else key_starts
        lengths = Packed(
            rows, None if paged else keys, bound, longest, query_starts, packed, lengths_k,
            same=cu_seqlens_k is None,
        )  # fmt: skip
        intervals = checked_intervals(mask, query, sizes, lengths)
    bias, alibi_slopes, sinks = checked_options(
        query, sizes, scale=scale, softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks
    )
    seed_tensor = None if dropout_p == 0.0 and seed is None else checked_seed(dropout_p, seed, device)
    out, lse = torch_ops.attention(
        query, key, value, intervals, scale=scale, softcap=softcap, bias=bias, alibi_slopes=alibi_slopes,
        sinks=sinks, seed=seed_tensor, dropout_p=dropout_p, query_starts=query_starts,
        key_starts=None if paged else key_starts, key_lengths=lengths_k if paged else None,
        block_table=block_table,
    )  # fmt: skip
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _checked_packed(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, paged: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The inputs as the problem takes them: (1, H, T, D), pages as (pages, H, page_size, D).

    Autocast leaves a paged cache, and so the rest, as it is.
    """
    packed = "(total, heads, head_dim)"
    pages = "(pages, page_size, heads, head_dim)" if paged else packed
    for name, tensor, layout in (("query", query, packed), ("key", key, pages), ("value", value, pages)):
        check_tensor(name, tensor)
        if tensor.dim() != layout.count(",") + 1:
            raise ValueError(f"{name} must be {layout}, got {shape_of(tensor)}")
    if not paged:
        query, key, value, bias = autocast(query, key, value, bias)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_alike(name, tensor, query)
    check_shapes(query, key, value, heads_at=(1, -2))
    query = query.transpose(0, 1).unsqueeze(0)
    if paged:
        return query, key.transpose(1, 2), value.transpose(1, 2), bias
    return query, key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0), bias


def _checked_table(block_table: Tensor | Sequence[Sequence[int]], lengths: Tensor, key: Tensor) -> Tensor:
    pages, _, page_size, _ = key.shape
    if page_size < 1:
        raise ValueError(f"key must have a page_size of at least 1, got {shape_of(key.transpose(1, 2))}")
    table = block_table_rows(block_table, lengths.shape[0], lengths.device)
    if values_known(table) and values_known(lengths):
        most = table.shape[1] * page_size
        check_range("cu_seqlens_k", lengths, 0, most, "the places that block_table has, per sequence")
        check_block_table(table, lengths, page_size, pages)
    return page_numbers(table)


def _longest(name: str, bound: object, lengths: Tensor) -> int | None:
    """The bound, or else the longest sequence; None where neither is known."""
    if bound is not None and not is_int(bound):
        raise TypeError(f"{name} must be an int, got {type(bound).__name__}")
    if not values_known(lengths):
        return bound  # type: ignore[return-value]
    longest = int(lengths.max())
    if not isinstance(bound, int):
        return longest
    if bound < longest:
        raise ValueError(f"{name} must be at least the longest sequence, {longest}, got {bound}")
    return bound
