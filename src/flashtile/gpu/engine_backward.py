"""From an AttentionProblem to the launches of the backward pass. Nothing here waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashtile.sinks import gradient_terms

from .backward import key_gradients, query_gradients
from .bias_gradient import bias_gradient
from .deltas import row_numbers, sum_rows
from .gradients import Inputs, RowNumbers
from .operands import (
    Sequences,
    Terms,
    Visible,
    exact_rows_of,
    numbers_of,
    on_device_of,
    sequences_of,
    terms_of,
    tiles_of,
    visible_of,
)
from .target import Target, product_precision, target_of
from .tiles import (
    Tile,
    bias_gradient_tile,
    key_gradient_tile,
    query_gradient_tile,
    row_number_tile,
    width_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flashtile.problem import AttentionProblem, Gradients


class _Pass(NamedTuple):
    """What every kernel of one backward pass is handed."""

    inputs: Inputs
    numbers: RowNumbers
    sequences: Sequences
    visible: Visible
    terms: Terms
    target: Target
    sizes: dict[str, Any]  # those a kernel is compiled for


def backward(
    problem: AttentionProblem,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    gradients: Gradients,
) -> None:
    """Writes every gradient that is wanted, from the saved O and LSE."""
    for starts, tensors in (
        (problem.query_starts, (gradients.query,)),
        (problem.key_starts, (gradients.key, gradients.value)),
    ):
        if starts is not None:  # rows behind the last sequence
            for tensor in tensors:
                tensor.zero_()
    if grad_out.stride(3) != 1:  # that of out.sum(): one number, which tiles would gather one by one
        grad_out = grad_out.contiguous()
    with on_device_of(problem.query):
        launch = _pass_of(problem, lse, grad_out)
        _find_row_numbers(problem, launch, out, lse, grad_lse)
        _find_key_gradients(problem, launch, gradients)
        _find_query_gradients(problem, launch, gradients)
        if gradients.bias is not None:
            _find_bias_gradient(problem, launch, gradients.bias)
    if gradients.sinks is not None and problem.sinks is not None:
        terms = gradient_terms(problem.sinks, lse, launch.numbers.delta)
        torch.sum(terms, (0, 2), out=gradients.sinks)


def _pass_of(problem: AttentionProblem, lse: Tensor, grad_out: Tensor) -> _Pass:
    target = target_of(problem.query.device)
    heads, rows, head_dim = problem.query.shape[1:]
    value_dim = problem.value.shape[3]
    row_max, row_rest, delta = (
        torch.empty_like(lse, memory_format=torch.contiguous_format) for _ in range(3)
    )
    apart = torch.zeros(1, dtype=torch.int32, device=lse.device)
    query, key, value, upstream = map(exact_rows_of, (problem.query, problem.key, problem.value, grad_out))
    return _Pass(
        inputs=Inputs(query, key, value, upstream),
        numbers=RowNumbers(row_max, row_rest, delta, apart, heads * rows, rows),
        sequences=sequences_of(problem),
        visible=visible_of(problem),
        terms=terms_of(problem),
        target=target,
        sizes={
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "HEAD_WIDTH": width_of(head_dim),
            "VALUE_WIDTH": width_of(value_dim),
            "GROUP": heads // problem.key.shape[1],
            "PRECISION": product_precision(target, problem.query.dtype),
        },
    )


def _find_row_numbers(
    problem: AttentionProblem, launch: _Pass, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> None:
    heads, rows = lse.shape[1:]
    tile = row_number_tile(launch.target, problem.query.element_size(), *_dims(problem))
    starts, tiles, programs = tiles_of(problem.query_starts, problem.sequences, rows, tile.queries)
    row_numbers[(tiles * heads * programs,)](
        launch.inputs, exact_rows_of(out), numbers_of(lse),
        None if grad_lse is None else numbers_of(grad_lse), launch.numbers,
        launch.sequences, launch.visible, launch.terms, starts, tiles, heads,
        QUERIES=tile.queries, KEYS=tile.keys, num_warps=tile.warps, enable_fp_fusion=True, **launch.sizes,
    )  # fmt: skip


def _find_key_gradients(problem: AttentionProblem, launch: _Pass, gradients: Gradients) -> None:
    kv_heads, keys = problem.key.shape[1:3]
    tile = key_gradient_tile(launch.target, problem.query.element_size(), *_dims(problem))
    starts, tiles, programs = tiles_of(problem.key_starts, problem.sequences, keys, tile.keys)
    programs *= tiles * kv_heads
    broken = torch.empty(programs, dtype=torch.int8, device=problem.query.device)
    for repair in (False, True):
        key_gradients[(programs,)](
            launch.inputs, exact_rows_of(gradients.key), exact_rows_of(gradients.value), broken,
            launch.numbers, launch.sequences, launch.visible, launch.terms, starts, tiles, kv_heads,
            REPAIR=repair, **_of(tile), **launch.sizes,
        )  # fmt: skip


def _find_query_gradients(problem: AttentionProblem, launch: _Pass, gradients: Gradients) -> None:
    heads, rows = problem.query.shape[1:3]
    tile = query_gradient_tile(launch.target, problem.query.element_size(), *_dims(problem))
    starts, tiles, programs = tiles_of(problem.query_starts, problem.sequences, rows, tile.queries)
    slopes = gradients.alibi_slopes
    slope_terms = None if slopes is None else torch.empty_like(launch.numbers.delta)
    query_gradients[(tiles * heads * programs,)](
        launch.inputs, exact_rows_of(gradients.query), slope_terms, launch.numbers, launch.sequences,
        launch.visible, launch.terms, starts, tiles, heads, **_of(tile), **launch.sizes,
    )  # fmt: skip
    if slopes is not None:
        sums = slopes.new_empty(problem.sequences, heads)
        sum_rows[(sums.numel(),)](
            slope_terms, launch.numbers.batch, launch.numbers.head, sums, launch.sequences, heads,
            QUERIES=1024, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        slopes.copy_(sums.sum_to_size(slopes.shape))


def _find_bias_gradient(problem: AttentionProblem, launch: _Pass, grad_bias: Tensor) -> None:
    heads = problem.query.shape[1]
    rows, columns = grad_bias.shape[2:]
    # Few rows or columns are few programs: each head then has its own, which are summed afterwards.
    apart = 1 in (rows, columns)
    target = grad_bias.new_empty(problem.sequences, heads, rows, columns) if apart else grad_bias
    tile = bias_gradient_tile(launch.target, problem.query.element_size(), *_dims(problem))
    tiles = -(-rows // tile.queries) * -(-columns // tile.keys)
    batch, bias_heads = target.shape[:2]
    bias_gradient[(batch * bias_heads * tiles,)](
        launch.inputs, exact_rows_of(target), bias_heads, rows, columns, launch.numbers, launch.sequences,
        launch.visible, launch.terms, heads, QUERIES=tile.queries, KEYS=tile.keys,
        OVER_BATCH=batch == 1, OVER_HEADS=bias_heads == 1, OVER_QUERIES=rows == 1, OVER_KEYS=columns == 1,
        num_warps=tile.warps, enable_fp_fusion=True, **launch.sizes,
    )  # fmt: skip
    if apart:
        grad_bias.copy_(target.sum_to_size(grad_bias.shape))


def _dims(problem: AttentionProblem) -> tuple[int, int]:
    return problem.query.shape[3], problem.value.shape[3]


def _of(tile: Tile) -> dict[str, int]:
    return {
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "enable_fp_fusion": True,
    }
