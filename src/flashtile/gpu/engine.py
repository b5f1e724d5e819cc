"""From an AttentionProblem to kernel launches, forward and backward. Nothing here waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .engine_backward import backward
from .forward import attention_forward
from .merge import merge_splits
from .operands import (
    Sequences,
    exact_rows_of,
    on_device_of,
    sequences_of,
    terms_of,
    tile_starts_of,
    visible_of,
)
from .target import product_precision, target_of
from .tiles import Tile, decode_tile, forward_tile, width_of

if TYPE_CHECKING:
    from torch import Tensor

    from flashtile.problem import AttentionProblem

__all__ = ["backward", "forward"]

# Rows of a tile that decoding packs: the queries of all heads that share a key head.
_PACKED_ROWS = 64
_MOST_SPLITS = 32


def forward(problem: AttentionProblem, out: Tensor, lse: Tensor) -> None:
    """Writes O (B, Hq, Sq, Dv) and LSE (B, Hq, Sq) of one problem."""
    if problem.query_starts is not None:  # rows behind the last sequence
        out.zero_()
        lse.fill_(-torch.inf)
    heads, queries = problem.query.shape[1:3]
    group = heads // problem.key.shape[1]
    sequences = sequences_of(problem)
    with on_device_of(problem.query):
        if problem.query_starts is None and group * queries <= _PACKED_ROWS:
            _decode(problem, sequences, group, out, lse)
        else:
            tile = forward_tile(
                target_of(problem.query.device),
                problem.query.element_size(),
                problem.query.shape[3],
                problem.value.shape[3],
            )
            _launch(problem, sequences, tile, out, lse, group=group, packed=False, splits=1, split_keys=0)


def _decode(problem: AttentionProblem, sequences: Sequences, group: int, out: Tensor, lse: Tensor) -> None:
    """Few queries: the heads of a group share a tile, and the keys are split so that every core has some.

    The splits depend on the sizes of one sequence alone, so its bits do not depend on the batch.
    """
    heads, queries = problem.query.shape[1:3]
    value_dim = problem.value.shape[3]
    tile = decode_tile(
        target_of(problem.query.device),
        problem.query.element_size(),
        problem.query.shape[3],
        value_dim,
        group * queries,
    )
    tiles_of_keys = -(-sequences.keys // tile.keys)
    split_keys = tile.keys * max(1, -(-tiles_of_keys // _MOST_SPLITS))
    splits = -(-sequences.keys // split_keys)
    if splits <= 1:
        _launch(problem, sequences, tile, out, lse, group=group, packed=True, splits=1, split_keys=0)
        return
    parts = problem.query.new_empty(splits * sequences.number, heads, queries, value_dim, dtype=torch.float32)
    part_lses = parts.new_empty(parts.shape[:3])
    _launch(
        problem,
        sequences,
        tile,
        parts,
        part_lses,
        group=group,
        packed=True,
        splits=splits,
        split_keys=split_keys,
    )
    merge_splits[(sequences.number * heads * queries,)](
        exact_rows_of(parts), exact_rows_of(part_lses.unsqueeze(3)), exact_rows_of(out),
        exact_rows_of(lse.unsqueeze(3)), terms_of(problem), sequences, heads, queries, splits,
        VALUE_DIM=value_dim, VALUE_WIDTH=width_of(value_dim), num_warps=4,
    )  # fmt: skip


def _launch(
    problem: AttentionProblem,
    sequences: Sequences,
    tile: Tile,
    out: Tensor,
    lse: Tensor,
    *,
    group: int,
    packed: bool,
    splits: int,
    split_keys: int,
) -> None:
    heads, queries, head_dim = problem.query.shape[1:]
    value_dim = problem.value.shape[3]
    if packed:
        heads, queries = problem.key.shape[1], queries * group
    tiles, tile_starts, programs = -(-queries // tile.queries), None, sequences.number
    if problem.query_starts is not None:
        tile_starts = tile_starts_of(problem.query_starts, tile.queries)
        tiles, programs = tiles + sequences.number, 1
    folded = (
        problem.softcap is None
        and problem.bias is None
        and problem.alibi_slopes is None
        and problem.scale > 0
    )
    attention_forward[(tiles * programs * heads * splits,)](
        exact_rows_of(problem.query), exact_rows_of(problem.key), exact_rows_of(problem.value),
        exact_rows_of(out), exact_rows_of(lse.unsqueeze(3)), sequences, visible_of(problem),
        terms_of(problem), tile_starts, tiles, heads, splits, split_keys,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        HEAD_WIDTH=width_of(head_dim), VALUE_WIDTH=width_of(value_dim),
        QUERIES=tile.queries, KEYS=tile.keys, GROUP=group, PACKED=packed, FOLDED=folded, SPLIT=splits > 1,
        PRECISION=product_precision(target_of(problem.query.device), problem.query.dtype), STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
