"""From an AttentionProblem to kernel launches, forward and backward. Nothing here waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from . import autotune
from .engine_backward import backward
from .forward import attention_forward
from .merge import merge_splits
from .operands import (
    Sequences,
    Terms,
    exact_rows_of,
    numbers_of,
    on_device_of,
    sequences_of,
    terms_of,
    tiles_of,
    visible_of,
)
from .target import Target, product_precision, target_of
from .tiles import Tile, decode_tile, forward_tiles, width_of

if TYPE_CHECKING:
    from torch import Tensor

    from flashtile.problem import AttentionProblem

__all__ = ["backward", "forward"]

# Rows of a tile that decoding packs: the queries of all heads that share a key head.
_PACKED_ROWS = 64
_FEWEST_KEYS, _MOST_SPLITS = 256, 128  # of a split; of a sequence


class _Part(NamedTuple):
    """How a launch divides a problem: whether heads of a group share tiles, and the splits of the keys."""

    tile: Tile
    packed: bool = False
    splits: int = 1
    split_keys: int = 0


def forward(problem: AttentionProblem, out: Tensor, lse: Tensor) -> None:
    """Writes O (B, Hq, Sq, Dv) and LSE (B, Hq, Sq) of one problem."""
    query, value_dim = problem.query, problem.value.shape[3]
    queries, head_dim = query.shape[2:]
    if problem.query_starts is not None:  # rows behind the last sequence
        out.zero_()
        lse.fill_(-torch.inf)
    target, sequences = target_of(query.device), sequences_of(problem)
    with on_device_of(query):
        terms = terms_of(problem)
        if problem.query_starts is None and _group(problem) * queries <= _PACKED_ROWS:
            _decode(problem, target, sequences, terms, out, lse)
            return
        rich = not is_folded(problem) or problem.dropout_p > 0 or problem.mask is not None
        masked = problem.upper is not None or problem.last is not None
        features = "rich" if rich else "masked" if masked else "plain"
        tile = autotune.chosen(
            forward_tiles(target, query.element_size(), head_dim, value_dim, rich),
            ("forward", query.dtype, head_dim, value_dim, features),
            query.device,
            lambda tile: _launch(problem, target, sequences, terms, _Part(tile), out, lse),
        )
        _launch(problem, target, sequences, terms, _Part(tile), out, lse)


def _decode(
    problem: AttentionProblem, target: Target, sequences: Sequences, terms: Terms, out: Tensor, lse: Tensor
) -> None:
    """Few queries: the heads of a group share a tile, and the keys are split so that every core has some.

    The splits depend on the sizes of one sequence alone, so its bits do not depend on the batch.
    """
    heads, queries, head_dim = problem.query.shape[1:]
    value_dim = problem.value.shape[3]
    rows = _group(problem) * queries
    tile = decode_tile(target, problem.query.element_size(), head_dim, value_dim, rows)
    wanted = min(_MOST_SPLITS, -(-2 * target.multiprocessors // max(1, problem.key.shape[1])))
    split_keys = max(_FEWEST_KEYS, -(-sequences.keys // wanted))
    split_keys = -(-split_keys // tile.keys) * tile.keys
    splits = -(-sequences.keys // split_keys)
    if splits <= 1:
        _launch(problem, target, sequences, terms, _Part(tile, packed=True), out, lse)
        return
    parts = problem.query.new_empty(splits * sequences.number, heads, queries, value_dim, dtype=torch.float32)
    part_lses = parts.new_empty(parts.shape[:3])
    _launch(problem, target, sequences, terms, _Part(tile, True, splits, split_keys), parts, part_lses)
    merge_splits[(sequences.number * heads * queries,)](
        exact_rows_of(parts), numbers_of(part_lses), exact_rows_of(out),
        numbers_of(lse), terms, sequences, heads, queries, splits,
        VALUE_DIM=value_dim, VALUE_WIDTH=width_of(value_dim), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _launch(
    problem: AttentionProblem,
    target: Target,
    sequences: Sequences,
    terms: Terms,
    part: _Part,
    out: Tensor,
    lse: Tensor,
) -> None:
    heads, queries, head_dim = problem.query.shape[1:]
    value_dim, group, tile = problem.value.shape[3], _group(problem), part.tile
    if part.packed:
        heads, queries = problem.key.shape[1], queries * group
    tile_starts, tiles, programs = tiles_of(problem.query_starts, sequences.number, queries, tile.queries)
    attention_forward[(tiles * programs * heads * part.splits,)](
        exact_rows_of(problem.query), exact_rows_of(problem.key), exact_rows_of(problem.value),
        exact_rows_of(out), numbers_of(lse), sequences, visible_of(problem), terms,
        tile_starts, tiles, heads, part.splits, part.split_keys,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        HEAD_WIDTH=width_of(head_dim), VALUE_WIDTH=width_of(value_dim),
        QUERIES=tile.queries, KEYS=tile.keys, GROUP=group, PACKED=part.packed, FOLDED=is_folded(problem),
        SPLIT=part.splits > 1, PRECISION=product_precision(target, problem.query.dtype), STAGES=tile.stages,
        num_warps=tile.warps, enable_fp_fusion=True,
    )  # fmt: skip


def is_folded(problem: AttentionProblem) -> bool:
    """Whether the scores are products times a positive scale, which the exponential then takes along."""
    return (
        problem.softcap is None
        and problem.bias is None
        and problem.alibi_slopes is None
        and problem.scale > 0
    )


def _group(problem: AttentionProblem) -> int:
    """How many query heads share a key head."""
    return problem.query.shape[1] // max(1, problem.key.shape[1])
