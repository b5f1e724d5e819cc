"""Transformers' mask functions as key intervals in closed form.

Transformers composes a mask of closures that a handful of factories build. They are recognised by their code
object, their arguments are read from their cells, and a rule turns each into the interval of keys of every
query. When this module is imported every rule is compared with the closure it stands for; a rule that
disagrees, with a version of Transformers where the closure means something else, is not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from flashtile import masks
from flashtile.integrations.interval_mask import rows_of
from flashtile.masks import Intervals

MaskFunction = Callable[..., Any]
CAUSAL: MaskFunction = masking_utils.causal_mask_function
BIDIRECTIONAL: MaskFunction = masking_utils.bidirectional_mask_function


class UnknownMaskError(Exception):
    """No rule gives the intervals of a mask function."""


class Sizes(NamedTuple):
    """What a mask is made for: query i stands at position ``i + q_offset``, key j at ``j + kv_offset``."""

    batch: int
    queries: int
    keys: int
    q_offset: int | Tensor  # a tensor with a static cache
    kv_offset: int
    device: torch.device


class _Packing(NamedTuple):
    """Several documents in each row of a batch, without a cache."""

    documents: Tensor  # (B, Sq), the number of every token's document
    position_ids: Tensor | None = None  # (B, Sq), where tokens stand in their documents


def intervals_of(mask_function: MaskFunction, sizes: Sizes) -> Intervals:
    """The intervals of a function that Transformers' factories built; UnknownMaskError for any other."""
    return _evaluate(mask_function, sizes, None)


def _evaluate(mask_function: MaskFunction, sizes: Sizes, packing: _Packing | None) -> Intervals:
    if mask_function is CAUSAL:
        return _around(sizes, None, 0)
    if mask_function is BIDIRECTIONAL:
        return Intervals()
    rule = _RULES.get(_code(mask_function))
    if rule is None:
        raise UnknownMaskError
    return rule(sizes, packing, **_arguments(mask_function))


def conjuncts(mask_function: MaskFunction) -> tuple[list[MaskFunction], list[Tensor]]:
    """The functions that must all hold where a mask does; and apart from them what tells documents apart, for
    every token (B, S) the number of its document.
    """
    rule = _RULES.get(_code(mask_function))
    if rule is _documents:
        return [], [_arguments(mask_function)["packed_sequence_mask"]]
    if rule is _within_documents:
        return conjuncts(_arguments(mask_function)["mask_function"])
    if rule is not _and:
        return [mask_function], []
    found = [conjuncts(one) for one in _arguments(mask_function)["mask_functions"]]
    return [one for some, _ in found for one in some], [one for _, some in found for one in some]


def is_about_positions(mask_function: MaskFunction) -> bool:
    """Whether what is visible depends on positions only, and is known in closed form."""
    rules = (_window, _window_of_both_sides, _chunk)
    return mask_function in (CAUSAL, BIDIRECTIONAL) or _RULES.get(_code(mask_function)) in rules


def left_padding_of(mask_function: MaskFunction) -> Tensor | None:
    """(B,) where the chunks begin, of a function that is about chunks."""
    chunked = _RULES.get(_code(mask_function)) is _chunk
    return _arguments(mask_function)["left_padding"] if chunked else None


def _arguments(closure: MaskFunction) -> dict[str, Any]:
    """What the factory was called with, by the factory's own names."""
    cells = closure.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(closure.__code__.co_freevars, cells, strict=True)}


def _around(sizes: Sizes, before: int | Tensor | None, after: int | Tensor | None) -> Intervals:
    """Keys from ``before`` left of the query to ``after`` right of it: numbers, or integers (B or 1, Sq)."""
    shift = sizes.q_offset - sizes.kv_offset
    # In a compiled graph a number would be a constant, and this one changes from step to step.
    if not (isinstance(shift, Tensor) or isinstance(before, Tensor) or isinstance(after, Tensor)) and (
        not torch.compiler.is_compiling()
    ):
        return Intervals(
            lower=None if before is None else shift - before, upper=None if after is None else shift + after
        )
    place = (torch.arange(sizes.queries, device=sizes.device) + shift)[None]
    first = torch.zeros_like(place) if before is None else (place - before).clamp(0, sizes.keys)
    last = torch.full_like(place, sizes.keys) if after is None else (place + after + 1).clamp(0, sizes.keys)
    return Intervals(first=first.to(torch.int32), last=last.to(torch.int32))


def _and(sizes: Sizes, packing: _Packing | None, mask_functions: tuple[MaskFunction, ...]) -> Intervals:
    packed = [function for function in mask_functions if _RULES.get(_code(function)) is _documents]
    if packed:
        packing = _Packing(_arguments(packed[0])["packed_sequence_mask"])
    intervals = Intervals()
    for function in mask_functions:
        intervals = intervals.intersect(_evaluate(function, sizes, packing))
    return intervals


def _or(sizes: Sizes, packing: _Packing | None, mask_functions: tuple[MaskFunction, ...]) -> Intervals:
    first, *others = (
        rows_of(_evaluate(function, sizes, packing), sizes.queries, sizes.keys, sizes.device)
        for function in mask_functions
    )
    for other in others:
        first = _union(first, other)
    return Intervals(first=first[0], last=first[1])


def _union(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Row by row; with a gap between the two a row is no interval."""
    empty, other_empty = one[0] >= one[1], other[0] >= other[1]
    apart = torch.maximum(one[0], other[0]) > torch.minimum(one[1], other[1])
    if bool((apart & ~empty & ~other_empty).any()):
        raise UnknownMaskError
    first = torch.where(other_empty, one[0], torch.minimum(one[0], other[0]))
    last = torch.where(other_empty, one[1], torch.maximum(one[1], other[1]))
    return torch.where(empty, other[0], first), torch.where(empty, other[1], last)


def _window(sizes: Sizes, packing: _Packing | None, sliding_window: int) -> Intervals:
    return _around(sizes, sliding_window - 1, None)


def _window_of_both_sides(sizes: Sizes, packing: _Packing | None, sliding_window: int) -> Intervals:
    return _around(sizes, sliding_window, sliding_window)


def _chunk(sizes: Sizes, packing: _Packing | None, chunk_size: int, left_padding: Tensor) -> Intervals:
    """Chunks begin at the first token that is no padding."""
    if packing is not None and packing.position_ids is not None:
        position = packing.position_ids
    else:
        position = (torch.arange(sizes.queries, device=sizes.device) + sizes.q_offset)[None]
    within = (position - left_padding[:, None]) % chunk_size
    return _around(sizes, within, chunk_size - 1 - within)


def _documents(sizes: Sizes, packing: _Packing | None, packed_sequence_mask: Tensor) -> Intervals:
    in_order = bool((packed_sequence_mask[:, 1:] >= packed_sequence_mask[:, :-1]).all())
    if not (in_order and _covers(packed_sequence_mask, sizes)):
        raise UnknownMaskError
    ids = packed_sequence_mask.contiguous()
    first, last = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
    return Intervals(first=first.to(torch.int32), last=last.to(torch.int32))


def _covers(tensor: Tensor, sizes: Sizes) -> bool:
    """Whether ``tensor`` (B, S) has one element for each token, and they are the queries and the keys."""
    return (
        isinstance(sizes.q_offset, int)
        and sizes.q_offset == sizes.kv_offset == 0
        and tensor.shape == (sizes.batch, sizes.queries)
        and sizes.queries == sizes.keys
    )


def _within_documents(
    sizes: Sizes, packing: _Packing | None, mask_function: MaskFunction, position_ids: Tensor
) -> Intervals:
    """A function of positions in the document, of use for keys of the same document only."""
    if packing is None or not (_covers(position_ids, sizes) and _covers(packing.documents, sizes)):
        raise UnknownMaskError
    # In a document positions count up as indices do, so that what is left and right of a query is the same.
    step = position_ids[:, 1:] - position_ids[:, :-1]
    if not bool(((step == 1) | (packing.documents[:, 1:] != packing.documents[:, :-1])).all()):
        raise UnknownMaskError
    return _evaluate(mask_function, sizes, _Packing(packing.documents, position_ids))


def _block(sizes: Sizes, packing: _Packing | None, block_sequence_ids: Tensor) -> Intervals:
    """Keys of the query's own block; id -1 is no block."""
    start, end = int(sizes.q_offset), int(sizes.q_offset) + sizes.queries
    query_ids = block_sequence_ids[:, start:end]
    key_ids = block_sequence_ids[:, sizes.kv_offset : sizes.kv_offset + sizes.keys]
    if query_ids.shape[1] != sizes.queries or key_ids.shape[1] != sizes.keys:
        raise UnknownMaskError
    apart = -2 - torch.arange(sizes.keys, device=key_ids.device)  # keys of no block are none of one block
    try:
        mask = masks.documents(torch.where(key_ids < 0, apart, key_ids), query_ids.clamp(min=-1))
    except ValueError as error:  # a block that is not one run
        raise UnknownMaskError from error
    return mask.resolve(sizes.batch, sizes.queries, sizes.keys, sizes.device)


def _code(function: object) -> CodeType | None:
    return getattr(function, "__code__", None)


def dense(sizes: Sizes, mask_function: MaskFunction, use_vmap: bool = False) -> Tensor:
    """The function evaluated everywhere: bool (B, 1, Sq, Sk)."""
    visible: Tensor = masking_utils.sdpa_mask(
        sizes.batch,
        sizes.queries,
        sizes.keys,
        sizes.q_offset,
        sizes.kv_offset,
        mask_function,
        use_vmap=use_vmap,
        allow_is_causal_skip=False,
        device=sizes.device,
    )
    return visible


_Rule = Callable[..., Intervals]
_RULES: dict[CodeType | None, _Rule] = {}


def _add(factory: str, rule: _Rule, *arguments: object, documents: Tensor | None = None) -> None:
    """Use ``rule`` for the closures of one of Transformers' factories, if it agrees with an example."""
    if not hasattr(masking_utils, factory):
        return
    example = getattr(masking_utils, factory)(*arguments)
    code = example.__code__
    if set(code.co_freevars) != set(list(inspect.signature(rule).parameters)[2:]):
        return
    _RULES[code] = rule
    if documents is not None:
        example = masking_utils.and_masks(example, masking_utils.packed_sequence_mask_function(documents))
    if not _agrees(example):
        del _RULES[code]


def _agrees(function: MaskFunction) -> bool:
    """Whether the intervals are what the function says: in a square, with a cache, with a sliding cache."""
    for queries, keys, q_offset, kv_offset in ((5, 5, 0, 0), (2, 7, 5, 0), (3, 6, 7, 4)):
        sizes = Sizes(2, queries, keys, q_offset, kv_offset, torch.device("cpu"))
        try:
            intervals = intervals_of(function, sizes)
        except UnknownMaskError:
            continue
        visible = intervals.visible(queries, keys, sizes.device).expand(2, 1, -1, -1)
        if not torch.equal(visible, dense(sizes, function)):
            return False
    return True


def _add_all() -> None:
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1]]).expand(2, -1)
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    position_ids = torch.tensor([[0, 1, 0, 1, 2], [4, 5, 6, 7, 0]])
    _add("and_masks", _and, CAUSAL, BIDIRECTIONAL)
    _add("or_masks", _or, CAUSAL, BIDIRECTIONAL)
    _add("sliding_window_overlay", _window, 3)
    _add("sliding_window_bidirectional_overlay", _window_of_both_sides, 2)
    _add("chunked_overlay", _chunk, 3, torch.tensor([0, 2]))
    _add("blockwise_overlay", _block, blocks)
    _add("packed_sequence_mask_function", _documents, documents)
    chunks = masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 0]))
    _add("remap_positions_for_packed_sequence", _within_documents, chunks, position_ids, documents=documents)


_add_all()
