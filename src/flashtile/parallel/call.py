"""What the front doors share: arguments checked and compared over all ranks, and the call itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from flashtile import dispatch, masks
from flashtile.arguments import (
    Sizes,
    checked_inputs,
    checked_intervals,
    checked_options,
    checked_seed,
    refuse_mask,
    shape_of,
)
from flashtile.masks import Intervals, Mask
from flashtile.masks.lengths import Uniform
from flashtile.parallel.agreement import (
    ABSENT,
    REFUSALS,
    agree,
    agree_everywhere,
    documents_code,
    float_code,
    text_code,
)
from flashtile.parallel.exchange import Group
from flashtile.parallel.grid import Grid, rank_in, size_of
from flashtile.parallel.heads import Swap, share_heads, to_heads, to_positions
from flashtile.parallel.layouts import Chunk, Layout, checked_documents, checked_layout, layout_of
from flashtile.parallel.parts import Whole
from flashtile.parallel.ring import around_the_ring
from flashtile.parallel.sharding import gather_chunks
from flashtile.problem import SUPPORTED_DTYPES, default_scale


class Options(TypedDict, total=False):
    """What every function here takes as ``flashtile.attention`` does, the same on every rank.

    mask: a ``flashtile.Mask`` of the whole sequence (document ids, ranges per query and the like for all
        positions), or a bool tensor that broadcasts to (B, Hq, Sq, Sk). Lengths are those of the whole: an
        alignment is needed only where there are more keys than queries in all.
    scale, softcap: numbers.
    alibi_slopes: (Hq,) or (B, Hq); distances count in the whole sequence.
    sinks: (Hq,); each counts once in a row.
    dropout_p, seed: the mask is that of the whole sequence, ``flashtile.dropout_mask``, bit for bit. Without
        a seed every rank draws one, and that of the first rank counts.

    There is no ``bias``.
    """

    mask: Mask | Tensor | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | Tensor | None


class _Facts(NamedTuple):
    """What the ranks compare before they exchange anything, as integers (see agreement.py)."""

    batch: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    dtype: int = 0
    layout: int = 0
    scale: int = 0
    softcap: int = 0
    dropout_p: int = 0
    cu_seqlens: int = 0
    mask: int = 0
    alibi_slopes: int = 0
    sinks: int = 0
    requires_grad: int = 0
    seed: int = 0
    seed_given: int = 0
    drawn: int = 0
    query_length: int = 0
    key_length: int = 0


class _MaskFacts(NamedTuple):
    mask_first: int = 0
    mask_last: int = 0


_MAY_DIFFER = {"query_length", "key_length", "drawn"}


class _Call(NamedTuple):
    """The arguments of one rank, checked as far as it can tell alone."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | Tensor | None
    scale: float
    softcap: float | None
    slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    facts: _Facts


def _checked(
    operation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    documents: Tensor | Sequence[int] | None,
    options: Options,
) -> _Call:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(
            f"{operation} does not support {', '.join(unknown)}; its options are "
            f"{', '.join(Options.__annotations__)}, return_lse and where it runs"
        )
    query, key, value, _ = checked_inputs(query, key, value, None)
    if query.dim() != 4:
        raise ValueError(f"query must be (batch, heads, length, head_dim), got {shape_of(query)}")
    differentiable = (query, key, value, options.get("alibi_slopes"), options.get("sinks"))
    recorded = [
        torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad
        for tensor in differentiable
    ]
    dispatch.check_part(query.device, query.dtype, query.shape[3], value.shape[3], backward=any(recorded))
    checked_layout(layout)
    mask, softcap, dropout_p = options.get("mask"), options.get("softcap"), options.get("dropout_p", 0.0)
    if mask is not None and not isinstance(mask, (Mask, Tensor)):
        refuse_mask(mask)
    batch, heads, query_length, head_dim = query.shape
    scale, slopes, sinks = options.get("scale"), options.get("alibi_slopes"), options.get("sinks")
    _, slopes, sinks = checked_options(
        query, Sizes(batch, heads, None, None), scale=scale, softcap=softcap, bias=None, alibi_slopes=slopes,
        sinks=sinks,
    )  # fmt: skip
    scale = default_scale(query) if scale is None else float(scale)
    seed = checked_seed(dropout_p, options.get("seed"), query.device)
    given = options.get("seed") is not None and seed is not None
    number = 0 if seed is None else int(seed.item())
    recorded[3:] = [recorded[3] or recorded[4]]
    facts = _Facts(
        batch, heads, key.shape[1], head_dim, value.shape[3],
        dtype=SUPPORTED_DTYPES.index(query.dtype), layout=int(layout == "zigzag"),
        scale=float_code(scale), softcap=float_code(softcap), dropout_p=float_code(dropout_p),
        cu_seqlens=documents_code(documents), mask=_mask_code(mask),
        alibi_slopes=int(slopes is not None), sinks=int(sinks is not None),
        requires_grad=sum(flag << bit for bit, flag in enumerate(recorded)),
        seed=number if given else 0, seed_given=int(given), drawn=0 if given else number,
        query_length=query_length, key_length=key.shape[2],
    )  # fmt: skip
    return _Call(query, key, value, mask, scale, softcap, slopes, sinks, dropout_p, facts)


def _mask_code(mask: Mask | Tensor | None) -> int:
    """A number for what a mask says of itself: its kind, its parameters, the shapes of its tensors."""
    if mask is None:
        return ABSENT
    return text_code(shape_of(mask) if isinstance(mask, Tensor) else repr(mask))


class _Lengths(NamedTuple):
    """The lengths of the shards of all ranks of a group."""

    queries: list[int]
    keys: list[int]


def _compare(
    operation: str, grid: Grid, facts: _Facts, refusal: Exception | None, query: object
) -> tuple[_Facts, dict[Group, _Lengths]]:
    """The facts of the whole call, and the lengths of the shards in each group; or an error on every rank.

    Who learns of a refusal in the first group of a grid passes it on to the second.
    """
    lengths: dict[Group, _Lengths] = {}
    for group in grid.groups:
        try:
            everyone = agree(operation, group, facts, refusal, _MAY_DIFFER, near=query)
        except REFUSALS as error:
            refusal = error
            continue
        found = _Lengths([one.query_length for one in everyone], [one.key_length for one in everyone])
        lengths[group] = found
        facts = facts._replace(
            query_length=sum(found.queries), key_length=sum(found.keys), drawn=everyone[0].drawn
        )
    if refusal is not None:
        raise refusal
    return facts, lengths


def _intervals(
    operation: str, grid: Grid, call: _Call, facts: _Facts, documents: tuple[int, ...] | None
) -> Intervals:
    """The mask of the whole sequence, which must be the same on every rank."""
    if documents is not None:
        starts = torch.tensor(documents)
        bounds = [starts[:-1], starts[1:]]
        apart = masks.key_range(*(bound.repeat_interleave(starts.diff())[None] for bound in bounds))
        call = call._replace(mask=apart if call.mask is None else apart & call.mask)
    if call.mask is None:
        return Intervals()
    batch, device = call.query.shape[0], call.query.device
    sizes = Sizes(batch, call.query.shape[1], facts.query_length, facts.key_length)
    intervals, refusal = Intervals(), None
    try:
        lengths = Uniform(batch, facts.query_length, facts.key_length, device)
        intervals = checked_intervals(call.mask, call.query, sizes, lengths)
    except REFUSALS as error:
        refusal = error
    if refusal is not None or intervals.first is not None:
        told = _MaskFacts(_digest(intervals.first), _digest(intervals.last))
        agree_everywhere(operation, grid.groups, told, refusal, near=call.query)
    return intervals


def _digest(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    numbers = tensor.flatten().long()
    return int((numbers * torch.arange(1, 2 * len(numbers), 2, device=tensor.device)).sum())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    operation: str,
    grid: Grid,
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    *,
    gathering: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    refusal: Exception | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries.

    Args:
        gathering: keys are gathered instead of sent around.
        cu_seqlens: packed documents that are cut for the ring one by one, and see only themselves.
        refusal: why the caller refuses its arguments on this rank; it is raised when the others know.
    """
    call = None
    try:
        call = _checked(operation, query, key, value, layout, cu_seqlens, options)
    except REFUSALS as error:
        refusal = error if refusal is None else refusal
    facts, lengths = _compare(operation, grid, _Facts() if call is None else call.facts, refusal, query)
    assert call is not None
    documents = checked_documents(cu_seqlens, facts.query_length)
    if documents is not None and facts.key_length != facts.query_length:
        raise ValueError(
            f"{operation}: cu_seqlens needs as many keys as queries, got {facts.query_length} queries and "
            f"{facts.key_length} keys in all"
        )
    intervals = _intervals(operation, grid, call, facts, documents)
    ring = _Lengths([facts.query_length], [facts.key_length]) if grid.ring is None else lengths[grid.ring]
    queries, keys = (
        layout_of(lengths, layout, name, documents)
        for lengths, name in zip(ring, ("query", "key"), strict=True)
    )
    heads, swap, group = Chunk(0, facts.heads), None, grid.ring
    if grid.heads is not None:
        call, intervals, heads, swap = _take_heads(
            operation, grid.heads, lengths[grid.heads], call, intervals
        )
    key, value = call.key, call.value
    if gathering and group is not None:
        key, value = (
            gather_chunks(tensor.movedim(2, 0), group, keys, f"{operation}: gathering {what}").movedim(0, 2)
            for tensor, what in ((key, "keys"), (value, "values"))
        )
        queries, keys, group = [queries[rank_in(group)]], [[Chunk(0, facts.key_length)]], None
    whole = Whole(
        queries, keys, (facts.query_length, facts.key_length), intervals, scale=call.scale,
        softcap=call.softcap, dropout_p=call.dropout_p, seed=facts.seed if facts.seed_given else facts.drawn,
        head=heads.start, heads=facts.heads,
    )  # fmt: skip
    out, lse = around_the_ring(operation, group, whole, call.query, key, value, call.slopes, call.sinks)
    return (out, lse) if swap is None else to_positions(out, lse, swap)


def _take_heads(
    operation: str, group: Group, lengths: _Lengths, call: _Call, intervals: Intervals
) -> tuple[_Call, Intervals, Chunk, Swap]:
    """This rank's share of the heads, with all positions of the group; and the way back of the output."""
    shares = share_heads(call.query.shape[1], call.key.shape[1], size_of(group))
    heads = shares[rank_in(group)].heads
    to_queries = Swap(operation, group, [share.heads for share in shares], lengths.queries)
    to_keys = Swap(operation, group, [share.kv_heads for share in shares], lengths.keys)
    call = call._replace(
        query=to_heads(call.query, to_queries, "the queries"),
        key=to_heads(call.key, to_keys, "the keys"),
        value=to_heads(call.value, to_keys, "the values"),
        slopes=None if call.slopes is None else call.slopes[:, heads.span],
        sinks=None if call.sinks is None else call.sinks[heads.span],
    )
    if intervals.dense is not None and intervals.dense.shape[1] != 1:
        intervals = intervals._replace(dense=intervals.dense[:, heads.span])
    return call, intervals, heads, to_queries
