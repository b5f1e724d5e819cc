"""Rows that lie far apart, copied together before every tile passes over them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .gemm import COLUMNS
from .kinds import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import AttentionProblem

# Measured with AVX2: a copy pays from about so many passes over so many bytes on.
_PASSES = 32
_SPAN = 4 * 2**20


def with_keys_together(problem: AttentionProblem, kind: Kind) -> AttentionProblem:
    """The problem, its keys and values copied if that pays; never those of a cache."""
    _, heads, queries, _ = problem.query.shape
    if _few(heads * queries, kind):  # in a small call the checks below would cost noticeable time
        return problem
    if problem.key_lengths is not None or problem.block_table is not None:
        return problem
    rows = queries * (heads // max(1, problem.key.shape[1]))
    key, value = (_together(x, problem, rows, kind) for x in (problem.key, problem.value))
    if key is problem.key and value is problem.value:
        return problem
    return replace(problem, key=key, value=value)


def with_all_together(
    problem: AttentionProblem, grad_out: Tensor, kind: Kind
) -> tuple[AttentionProblem, Tensor]:
    """The problem and dO, everything copied that the backward pass reads again and again, if that pays."""
    keys = problem.key.shape[2]
    query, grad_out = (_together(x, problem, keys, kind) for x in (problem.query, grad_out))
    problem = with_keys_together(problem, kind)
    return (problem if query is problem.query else replace(problem, query=query)), grad_out


def _few(rows: int, kind: Kind) -> bool:
    return rows < _PASSES * COLUMNS * kind.lanes


def _together(tensor: Tensor, problem: AttentionProblem, others: int, kind: Kind) -> Tensor:
    """A tensor (B, H, S, D), or a copy of it in which the rows of a head follow one another.

    The heads of a model are a view of (batch, length, heads x head_dim): from one row of a head to the next
    is a whole token. Those of a long sequence then lie on more pages of memory than the processor has
    addresses of at hand, and in few sets of its caches, while all of them are read again for every tile of
    the ``others``: queries for keys, keys for queries.
    """
    sequences = 1 if problem.query_starts is None else max(1, problem.sequences)
    sizes, strides = tensor.shape, tensor.stride()
    span = sizes[2] * strides[2] * tensor.element_size() // sequences
    repeats = any(stride == 0 and size > 1 for stride, size in zip(strides, sizes, strict=True))
    if _few(others // sequences, kind) or span < _SPAN or strides[2] <= sizes[3] or repeats:
        return tensor
    return tensor.contiguous()
