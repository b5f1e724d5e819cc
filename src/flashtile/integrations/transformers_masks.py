"""The mask function of the Transformers integration: the model's mask as key intervals wherever it is one.

Transformers describes a mask by a function of (batch, head, query, key). Those that its own factories compose
become intervals in closed form (``transformers_rules``). Any other is evaluated, a block of rows at a time,
and becomes intervals if every row is one run of keys; if one is not, the mask is dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from flashtile.integrations import active
from flashtile.integrations.interval_mask import IntervalMask, rows_of
from flashtile.integrations.transformers_rules import (
    BIDIRECTIONAL,
    CAUSAL,
    MaskFunction,
    Sizes,
    UnknownMaskError,
    conjuncts,
    dense,
    intervals_of,
    is_about_positions,
    left_padding_of,
)
from flashtile.masks import Intervals

if TYPE_CHECKING:
    from flashtile.parallel.context import ContextParallel

_PROBED = 2**20  # elements of a mask function that are evaluated at once


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = CAUSAL,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The mask of one forward pass; the signature is that of Transformers' own mask functions.

    Args:
        q_length, kv_length: sizes of the attention that follows.
        q_offset, kv_offset: positions of query 0 and of key 0 in the sequence.
        mask_function: True where (batch, head, query position, key position) is visible.
        attention_mask: bool (batch, length), False at padding; positions behind its end are padding too.

    Returns:
        An IntervalMask (batch, 1, q_length, kv_length) of ``dtype``, or in a graph of plain tensors what it
        stands for. Never None, though Transformers would allow it for many a mask: a model may drop queries
        on the way to its attention, which then could not tell where the others stand, and a module need
        not say whether it is causal. In a block of ``flashtile.parallel.context_parallel`` the lengths are
        those of this rank's part, and the mask is that of the whole sequence.
    """
    if (context := active.current()) is not None:
        sizes = Sizes(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
        whole: Tensor = _mask_of_whole(context, sizes, mask_function, attention_mask, dtype)
        return whole
    tracing = is_tracing() or (attention_mask is not None and is_tracing(attention_mask))
    if tracing and not torch.compiler.is_compiling():  # a graph of plain tensors
        return masking_utils.eager_mask(  # type: ignore[no-any-return]
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            dtype,
            use_vmap=use_vmap,
            device=device,
        )
    device = torch.device(device)
    if isinstance(q_offset, Tensor) and q_offset.is_cpu and not tracing:
        q_offset = int(q_offset)
    sizes = Sizes(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    padding = Intervals() if attention_mask is None else _padding(attention_mask, sizes, tracing)
    structure = _structure(mask_function, sizes, use_vmap, tracing)
    intervals = structure.intersect(padding)
    if tracing:
        intervals = Intervals(None, None, *rows_of(intervals, q_length, kv_length, device), intervals.dense)
    else:
        intervals = _simplified(intervals, sizes)
    shape = (batch_size, 1, q_length, kv_length)
    return IntervalMask(intervals, shape, dtype, device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask_of_whole(
    context: ContextParallel,
    sizes: Sizes,
    mask_function: MaskFunction,
    attention_mask: Tensor | None,
    dtype: torch.dtype,
) -> IntervalMask:
    """The mask (batch, 1, length, length) of a sequence of which this rank has a part."""
    if sizes.queries != sizes.keys or not (sizes.q_offset == sizes.kv_offset == 0):
        raise ValueError(
            "context_parallel needs the keys of the queries' own part: no cache (generation; "
            f"use_cache=False) and no cross-attention, got {sizes.queries} queries from position "
            f"{sizes.q_offset} and {sizes.keys} keys from {sizes.kv_offset}"
        )
    functions, packings = conjuncts(mask_function)
    if not all(map(is_about_positions, functions)):
        raise ValueError(
            "context_parallel does not know this model's mask, which depends on more than positions"
        )
    # Without a mask of the padding this tells the length alone.
    there = attention_mask
    if there is None:
        there = torch.empty(sizes.batch, sizes.queries, 0, device=sizes.device)
    there = context.unshard(there)
    whole = sizes._replace(queries=there.shape[1], keys=there.shape[1])
    refusal = None
    try:
        _check_part(context, whole.queries, sizes.queries, packings)
        for left_padding in map(left_padding_of, functions):
            if left_padding is not None and (context.cu_seqlens is not None or bool(left_padding.any())):
                raise ValueError(
                    "context_parallel does not support chunked attention with padding on the left or packed "
                    "documents, where chunks do not begin at multiples of their size"
                )
    except ValueError as error:
        refusal = error
    context.agree(refusal, there)
    intervals = Intervals() if attention_mask is None else _padding(there, whole, False)
    for function in functions:
        intervals = intervals.intersect(intervals_of(function, whole))
    shape = (sizes.batch, 1, whole.queries, whole.keys)
    return IntervalMask(_simplified(intervals, whole), shape, dtype, sizes.device)


def _check_part(context: ContextParallel, length: int, own: int, packings: list[Tensor]) -> None:
    """Whether the tokens can be this rank's, as far as their number and what packs them say."""
    positions = context.positions(length)
    if len(positions) != own:
        raise ValueError(
            f"this rank's part of {length} tokens must have the {len(positions)} that context.shard gives, "
            f"got {own}"
        )
    # Transformers begins a document wherever position ids do not go on; a part has such places by itself.
    expected = (positions.diff(prepend=positions[:1] - 1) != 1).cumsum(0)
    if not all(one.shape[1] == own and bool((one.cpu() == expected).all()) for one in packings):
        raise ValueError(
            "position_ids must be those of this rank's part of the whole sequence (context.shard_batch gives "
            "them); packed documents are told to context_parallel as cu_seqlens"
        )


def _structure(mask_function: MaskFunction, sizes: Sizes, use_vmap: bool, tracing: bool) -> Intervals:
    """What a mask function says: intervals if it can be done, else a dense mask."""
    if mask_function is CAUSAL or mask_function is BIDIRECTIONAL or not tracing:
        try:
            return intervals_of(mask_function, sizes)
        except UnknownMaskError:
            if (found := _probe(mask_function, sizes, use_vmap)) is not None:
                return found
    # Neither closures nor values can be looked at while a graph is traced.
    return Intervals(dense=dense(sizes, mask_function, use_vmap))


def _probe(mask_function: MaskFunction, sizes: Sizes, use_vmap: bool) -> Intervals | None:
    """The intervals of any function, found by evaluating all of it; None if some row is no interval."""
    rows = max(1, _PROBED // max(1, sizes.batch * sizes.keys))
    blocks = []
    for start in range(0, sizes.queries, rows):
        block = sizes._replace(queries=min(rows, sizes.queries - start), q_offset=sizes.q_offset + start)
        runs = _runs(dense(block, mask_function, use_vmap)[:, 0])
        if runs is None:
            return None
        blocks.append(runs)
    first, last = (torch.cat(bounds, dim=1) for bounds in zip(*blocks, strict=True))
    return Intervals(first=first, last=last)


def _padding(attention_mask: Tensor, sizes: Sizes, tracing: bool) -> Intervals:
    """The keys that are no padding: one run per row of the batch, or a dense mask if one has holes."""
    visible = attention_mask[:, sizes.kv_offset : sizes.kv_offset + sizes.keys]
    if (missing := sizes.keys - visible.shape[1]) > 0:
        visible = torch.nn.functional.pad(visible, (0, missing))
    if not tracing:
        if bool(visible.all()):
            return Intervals()
        runs = _runs(visible[:, None, :])
        if runs is not None:
            return Intervals(first=runs[0], last=runs[1])
    return Intervals(dense=visible[:, None, None, :].clone())  # not the caller's memory


def _runs(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """First and last, int32 (B, Sq), of the True in every row of (B, Sq, Sk); None if a row is no run."""
    keys = visible.shape[2]
    behind = torch.arange(1, keys + 1, dtype=torch.int32, device=visible.device)
    last = (visible * behind).amax(dim=2)
    first = keys - (visible * behind.flip(0)).amax(dim=2)
    count = visible.sum(dim=2)
    if not bool(((last - first == count) | (count == 0)).all()):
        return None
    return first, last


def _simplified(intervals: Intervals, sizes: Sizes) -> Intervals:
    """Without the bounds of the band that bound nothing, like the diagonal of a query that sees all keys."""
    lower, upper, *rest = intervals
    if lower is not None and lower + sizes.queries <= 1:
        lower = None
    if upper is not None and upper >= sizes.keys - 1:
        upper = None
    return Intervals(lower, upper, *rest)
