"""The mask function of the Transformers integration: the model's mask as key intervals wherever it is one.

Transformers describes a mask by a function of (batch, head, query, key). Those that its own factories compose
become intervals in closed form (``transformers_rules``). Any other is evaluated, a block of rows at a time,
and becomes intervals if every row is one run of keys; if one is not, the mask is dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from flashtile.integrations.interval_mask import IntervalMask, rows_of
from flashtile.integrations.transformers_rules import (
    BIDIRECTIONAL,
    CAUSAL,
    MaskFunction,
    Sizes,
    UnknownMaskError,
    dense,
    intervals_of,
)
from flashtile.masks import Intervals

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
        not say whether it is causal.
    """
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
