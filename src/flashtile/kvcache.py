"""``flashtile.attention_kvcache``: new queries against a cache of keys and values, contiguous or paged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from flashtile import dispatch, rotary, torch_ops
from flashtile.arguments import (
    Sizes,
    check_alike,
    check_shapes,
    check_tensor,
    check_together,
    checked_intervals,
    checked_options,
    refuse_gradients,
    refuse_unknown,
    shape_of,
)
from flashtile.masks import Intervals, Mask, key_starts
from flashtile.masks.arguments import is_int, values_known
from flashtile.masks.lengths import Cached
from flashtile.problem import AttentionProblem, default_scale
from flashtile.ragged import (
    block_table_rows,
    check_block_table,
    check_range,
    integer_tensor,
    page_numbers,
)

Integers = Tensor | Sequence[int] | int


@overload
def attention_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key: Tensor | None = ...,
    value: Tensor | None = ...,
    cache_lengths: Integers | None = ...,
    block_table: Tensor | None = ...,
    batch_index: Tensor | Sequence[int] | None = ...,
    left_padding: Integers | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    rotary_interleaved: bool = ...,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key: Tensor | None = ...,
    value: Tensor | None = ...,
    cache_lengths: Integers | None = ...,
    block_table: Tensor | None = ...,
    batch_index: Tensor | Sequence[int] | None = ...,
    left_padding: Integers | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    rotary_interleaved: bool = ...,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    cache_lengths: Integers | None = None,
    block_table: Tensor | None = None,
    batch_index: Tensor | Sequence[int] | None = None,
    left_padding: Integers | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries over a preallocated cache: decoding, and prefill in chunks.

    First rotates the query and the new keys (with ``rotary_cos``), then writes the new keys and values into
    the cache in place (with ``key``), then attends over each sequence's part of the cache. Everything is
    checked before anything is written, but for the values of lengths, entries and pages that are not in host
    memory or that a compiled graph computes: there the write itself fails (on a GPU not where sequences share
    a place to append to). Few queries are split over the keys, so that one sequence uses every core; the
    split depends on the sequence alone, so its bits do not depend on the rest of the batch.
    For inference: it has no gradient. Autocast does not touch it, since the cache has the dtype it has.

    Args:
        query: (B, Hq, Sq, D), the cache's dtype. Query i stands at position ``length - Sq + i``, length being
            that of the sequence after the append.
        key_cache: (Bc, Hkv, Sc, D), any strides; or pages of it, (pages, Hkv, page_size, D).
        value_cache: the same with head_dim Dv.
        key, value: (B, Hkv, Snew, D) and (B, Hkv, Snew, Dv), appended at ``cache_lengths``. Where value_cache
            is a view of key_cache, value has to be the same view of key.
        cache_lengths: int or (B,): keys already in the cache. By default it is full.
        block_table: (B, P) integers: the pages of each sequence in order, of any size >= 1. Entries beyond
            its length are not looked at.
        batch_index: (B,) integers: the entry of the cache that belongs to each sequence; its own by default.
        left_padding: int or (B,): keys before this one are hidden.
        rotary_cos, rotary_sin: (positions, R / 2), see ``flashtile.rotary.apply``.
        rotary_interleaved: pairs are neighbours (GPT-J); False: halves (GPT-NeoX, Llama).
        mask: a ``flashtile.Mask``, whose alignment here is "bottom-right" unless it says otherwise, or a bool
            tensor that broadcasts to (B, Hq, Sq, Sc), Sc being all places of the cache.
        bias: query's dtype, broadcasts as a bool mask does.
        scale, softcap, alibi_slopes, sinks: as in ``flashtile.attention``.
        return_lse: also return the LSE.

    Returns:
        The output (B, Hq, Sq, Dv) in query's dtype; with ``return_lse`` also the LSE (B, Hq, Sq) in float32
        (float64 for float64).

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; a cache too small for the append; pages, entries or
            lengths out of range (as far as values are in host memory).
        RuntimeError: a gradient would have to be recorded.
        NotImplementedError: no backend serves the device.
    """
    if unknown:
        refuse_unknown(attention_kvcache, unknown)
    _check_caches(query, key_cache, value_cache)
    dispatch.check_device(query.device)
    refuse_gradients(
        "attention_kvcache", query, key_cache, value_cache, key, value, bias, alibi_slopes, sinks,
        rotary_cos, rotary_sin,
    )  # fmt: skip
    place = _checked_place(query, key_cache, cache_lengths, block_table, batch_index)
    places = _checked_append(query, key_cache, value_cache, key, value, place, cache_lengths is None)
    batch, heads, query_length, _ = query.shape
    total = place.lengths if key is None else place.lengths + key.shape[2]
    lengths = Cached(batch, query_length, place.capacity, total, query.device)
    sizes, intervals = Sizes(batch, heads, query_length, place.capacity), Intervals()
    if left_padding is not None:
        padding = _per_sequence("left_padding", left_padding, batch, query.device)
        if values_known(padding):
            check_range("left_padding", padding, 0, place.capacity, "the places of the cache")
        intervals = key_starts(padding).intervals(lengths)
    if mask is not None:
        intervals = intervals.intersect(checked_intervals(mask, query, sizes, lengths))
    bias, alibi_slopes, sinks = checked_options(
        query, sizes, scale=scale, softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks
    )
    if rotary_cos is not None or rotary_sin is not None:
        cos, sin = _checked_rotary(query, rotary_cos, rotary_sin, total)
        steps = torch.arange(query_length, device=query.device)
        query = rotary.turn(query, cos, sin, (total - query_length)[:, None] + steps, rotary_interleaved)
        if key is not None:
            steps = torch.arange(key.shape[2], device=query.device)
            key = rotary.turn(key, cos, sin, place.lengths[:, None] + steps, rotary_interleaved)
    if key is not None and value is not None and places is not None:
        _append(key_cache, value_cache, key, value, places)
    out, lse = _attend(
        query, key_cache, value_cache, intervals, bias, alibi_slopes, sinks, total, place, scale, softcap
    )
    return (out, lse) if return_lse else out


class _Place(NamedTuple):
    """Where the sequences lie in the cache."""

    lengths: Tensor  # int64 (B,), before the append
    capacity: int  # places of a sequence
    batch_index: Tensor | None  # int64 (B,)
    block_table: Tensor | None  # int32 (B, P)


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    intervals: Intervals,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    total: Tensor,
    place: _Place,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    inputs = [t for t in (bias, alibi_slopes, sinks, intervals.dense) if t is not None]
    if values_known(total) and torch_ops.undisturbed(query, key_cache, value_cache, *inputs):
        lower, upper, first, last, dense = intervals
        factor = default_scale(query) if scale is None else scale
        return torch_ops.forward(
            AttentionProblem(
                query, key_cache, value_cache, factor, softcap, lower, upper, first, last, dense, bias,
                alibi_slopes, sinks, key_lengths=total, batch_index=place.batch_index,
                block_table=place.block_table,
            )
        )  # fmt: skip
    return torch_ops.attention(
        query, key_cache, value_cache, intervals, scale=scale, softcap=softcap, bias=bias,
        alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=total, batch_index=place.batch_index,
        block_table=place.block_table,
    )  # fmt: skip


def _check_caches(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    layouts = {"query": "(batch, heads, length, head_dim)"}
    layouts |= dict.fromkeys(
        ("key_cache", "value_cache"),
        "(batch, heads, length, head_dim) or, with block_table, (pages, heads, page_size, head_dim)",
    )
    for (name, layout), tensor in zip(layouts.items(), (query, key_cache, value_cache), strict=True):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be {layout}, got {shape_of(tensor)}")
        check_alike(name, tensor, query)
    check_shapes(query, key_cache, value_cache, heads_at=(1, 1), names=("key_cache", "value_cache"))


def _per_sequence(name: str, values: Integers, batch: int, device: torch.device) -> Tensor:
    """int64 (B,)"""
    if isinstance(values, Tensor) and values.dim() == 0:
        return integer_tensor(name, values, 0, device).expand(batch)
    number: Any = values.__index__() if isinstance(values, np.integer) else values
    if is_int(number):
        return torch.full((batch,), number, dtype=torch.int64, device=device)
    tensor = integer_tensor(name, values, 1, device)
    if tensor.shape[0] != batch:
        raise ValueError(f"{name} must have one number per sequence, {batch}, got {shape_of(tensor)}")
    return tensor


def _checked_place(
    query: Tensor,
    key_cache: Tensor,
    cache_lengths: Integers | None,
    block_table: Tensor | None,
    batch_index: Tensor | Sequence[int] | None,
) -> _Place:
    batch, device = query.shape[0], query.device
    entries, _, rows, _ = key_cache.shape
    table, index, capacity = None, None, rows
    if block_table is not None:
        if batch_index is not None:
            raise ValueError("batch_index must be None with block_table, whose rows are the sequences' own")
        if rows < 1:
            raise ValueError(f"key_cache must have a page_size of at least 1, got {shape_of(key_cache)}")
        table = page_numbers(block_table_rows(block_table, batch, device))
        capacity = rows * table.shape[1]
    elif batch_index is not None:
        index = _per_sequence("batch_index", batch_index, batch, device)
        if values_known(index):
            check_range("batch_index", index, 0, entries - 1, "the entries of the cache")
    elif entries != batch:
        raise ValueError(
            f"key_cache must have the batch size of query, {batch}, without batch_index or block_table, "
            f"got {shape_of(key_cache)}"
        )
    full = capacity if cache_lengths is None else cache_lengths
    lengths = _per_sequence("cache_lengths", full, batch, device)
    return _Place(lengths, capacity, index, table)


def _checked_append(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    place: _Place,
    full: bool,
) -> tuple[Tensor, Tensor] | None:
    """Entry (or page) and row of every new key, (B, Snew or 1) each; None where nothing is appended.

    Checks the new rows, and that the cache has the places that are read and written.
    """
    check_together(key=key, value=value)
    new = 0
    if key is not None and value is not None:
        if full:
            raise ValueError("cache_lengths must say where key and value are to be written, got None")
        _check_new("key", key, query, key_cache)
        new = key.shape[2]
        _check_new("value", value, query, value_cache, new)
    if values_known(place.lengths):
        what = f"the {place.capacity} places of the cache" + (f" less {new} to append" if new else "")
        check_range("cache_lengths", place.lengths, 0, place.capacity - new, what)
        if place.block_table is not None and values_known(place.block_table):
            check_block_table(place.block_table, place.lengths + new, key_cache.shape[2], key_cache.shape[0])
    if not new:
        return None
    entries, rows = _new_places(place, new, key_cache)
    return _kept_apart(place, entries, rows, key_cache), rows


def _check_new(name: str, tensor: Tensor, query: Tensor, cache: Tensor, length: int | None = None) -> None:
    """New keys or values: (B, Hkv, length, head_dim of the cache)."""
    check_tensor(name, tensor)
    check_alike(name, tensor, query)
    batch, heads, head_dim = query.shape[0], cache.shape[1], cache.shape[3]
    wanted = "length" if length is None else length
    if tensor.dim() == 4 and length is None:
        length = tensor.shape[2]
    if tensor.shape != (batch, heads, length, head_dim):
        beside = tensor.dim() == 4 and tensor.shape[2] == heads != tensor.shape[1]
        hint = "; pass tensor.transpose(1, 2) of (batch, length, heads, head_dim)" if beside else ""
        raise ValueError(
            f"{name} must be (batch, heads, length, head_dim) = ({batch}, {heads}, {wanted}, {head_dim}), "
            f"got {shape_of(tensor)}{hint}"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(cache.shape, cache.stride(), strict=True)):
        raise ValueError(f"{name}_cache must not be expanded where {name} is appended, got stride 0")


def _new_places(place: _Place, new: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Entry (or page) and row of every new key, (B, Snew or 1) each.

    A negative length, page or entry would count from the end; it becomes one that does not exist, which no
    write accepts. It gets this far only where nobody could look at it: on a GPU or in a compiled graph.
    """
    device = place.lengths.device
    lengths = torch.where(place.lengths < 0, place.capacity, place.lengths)
    positions = lengths[:, None] + torch.arange(new, device=device)
    if place.block_table is not None:
        page = place.block_table.long().gather(1, positions // cache.shape[2])
        return torch.where(page < 0, cache.shape[0], page), positions % cache.shape[2]
    index = place.batch_index
    if index is None:
        return torch.arange(lengths.shape[0], device=device)[:, None], positions
    return torch.where(index < 0, cache.shape[0], index)[:, None], positions


def _kept_apart(place: _Place, entries: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    """The entries, after a check that no two sequences write to the same place.

    A compiled graph cannot look at them: where some are shared, on a CPU all become ones that do not exist.
    """
    if place.batch_index is not None:
        name, places = "batch_index", entries
    elif place.block_table is not None:
        name, places = "block_table", entries * cache.shape[2] + rows
    else:
        return entries
    if values_known(places):
        if torch.unique(places).numel() != places.numel():
            raise ValueError(
                f"{name} must give each sequence places of its own to append to, got shared ones"
            )
    elif places.is_cpu:  # elsewhere this would cost every step of a generation
        ordered = places.flatten().sort().values
        entries = torch.where((ordered[1:] == ordered[:-1]).any(), cache.shape[0], entries)
    return entries


def _checked_rotary(
    query: Tensor, cos: Tensor | None, sin: Tensor | None, total: Tensor
) -> tuple[Tensor, Tensor]:
    check_together(rotary_cos=cos, rotary_sin=sin)
    assert cos is not None
    assert sin is not None
    rotary.check_tables(query, cos, sin, ("rotary_cos", "rotary_sin"))
    length = query.shape[2]
    if values_known(total) and total.numel():
        longest = int(total.max())
        if longest > cos.shape[0]:
            raise ValueError(
                f"rotary_cos must have a row for each of {longest} positions, got {shape_of(cos)}"
            )
        if int(total.min()) < length:
            raise ValueError(
                f"query must have a position for each of its {length} rows where it is rotated, "
                f"got a sequence of {int(total.min())} keys"
            )
    return cos, sin


@torch.no_grad()
def _append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, places: tuple[Tensor, Tensor]
) -> None:
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:
        if key.numel() and _begin_together(key_cache, value_cache):
            alike = key_cache.stride() == value_cache.stride() and key.stride() == value.stride()
            if not alike or not _begin_together(key, value):
                raise ValueError(
                    "value must be a view of key, such as key[..., :head_dim], where value_cache is one of "
                    "key_cache: both are written to the same memory"
                )
        # Rows of the caches themselves must not change while they are copied.
        stored = [cache.untyped_storage()._cdata for cache in (key_cache, value_cache)]
        key, value = (t.clone() if t.untyped_storage()._cdata in stored else t for t in (key, value))
    # Indices side by side, because vmap gets those with a slice between them wrong.
    key_cache.transpose(1, 2)[places] = key.transpose(1, 2)
    value_cache.transpose(1, 2)[places] = value.transpose(1, 2)


def _begin_together(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same first element."""
    same_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same_storage and one.storage_offset() == other.storage_offset()
