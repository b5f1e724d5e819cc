"""Standard attention in plain PyTorch: the formula itself, quadratic in memory, differentiable by autograd.

In float64 it is the oracle of the tests; in the inputs' own dtype its error says what that dtype allows.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from flashtile.dropout import dropout_mask, keep_scale
from flashtile.masks import Intervals
from flashtile.problem import AttentionProblem, compute_dtype


def attention(problem: AttentionProblem, *, row_by_row: bool | None = None) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of standard attention, computed in the dtype of ``problem.query`` (see :func:`cast`).

    ``out`` is (B, Hq, Sq, Dv) in that dtype; ``lse`` is (B, Hq, Sq), natural logarithm, in the compute dtype
    (float64 for float64, else float32). A row that sees no key has output 0 and LSE -inf, or the LSE of its
    sink, which is all of its denominator. Both are differentiable in every floating tensor of the problem.

    A NaN or infinity in the query, key or value reaches the rows that see it and no other, forward and
    backward; this takes a copy of the keys and values for every row (``row_by_row``; None = if needed). Where
    a gradient that flows in may itself be NaN or infinite, ask for it.
    """
    batch, heads, query_length, _ = problem.query.shape
    kv_heads, key_length = problem.key.shape[1:3]
    group = heads // max(1, kv_heads)
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (problem.key, problem.value))
    visible = visible_keys(problem)
    if row_by_row is None:
        row_by_row = not all(torch.isfinite(tensor).all() for tensor in (problem.query, key, value))

    products = _matmul(problem.query, key.mT, visible[..., None, :], row_by_row)
    scores = problem.scale * torch.where(visible, products, 0.0)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.bias is not None:
        scores = scores + problem.bias
    if problem.alibi_slopes is not None:
        distance = alibi_distance(query_length, key_length, scores.device)
        scores = scores - problem.alibi_slopes.to(scores.dtype)[:, :, None, None] * distance
    probabilities, lse = _softmax(scores, visible, problem.sinks)
    if problem.dropout_p > 0:
        sizes = (batch, heads, query_length, key_length)
        kept = dropout_mask(problem.seed, problem.dropout_p, *sizes, device=scores.device)
        probabilities = probabilities * kept * keep_scale(problem.dropout_p)
    out = _matmul(probabilities, value, visible[..., None], row_by_row)
    return out, lse.to(compute_dtype(problem.query.dtype))


def visible_keys(problem: AttentionProblem) -> Tensor:
    """Which keys each query sees: bool (B, Hq, Sq, Sk). A bias of -inf hides a key just as False does."""
    batch, heads, query_length, _ = problem.query.shape
    intervals = Intervals(problem.lower, problem.upper, problem.first, problem.last, problem.mask)
    visible = intervals.visible(query_length, problem.key.shape[2], problem.query.device)
    if problem.bias is not None:
        visible = visible & (problem.bias != -math.inf)
    return visible.expand(batch, heads, -1, -1)


def alibi_distance(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """|i + Sk - Sq - j|, (Sq, Sk): the last query stands at the last key."""
    query_index = torch.arange(query_length, device=device)[:, None]
    key_index = torch.arange(key_length, device=device)
    return (query_index + key_length - query_length - key_index).abs()


def cast(problem: AttentionProblem, dtype: torch.dtype) -> AttentionProblem:
    """The same problem with inputs and bias in ``dtype``, and the small arguments in its compute dtype."""

    def to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    return dataclasses.replace(
        problem,
        query=problem.query.to(dtype),
        key=problem.key.to(dtype),
        value=problem.value.to(dtype),
        bias=to(problem.bias, dtype),
        alibi_slopes=to(problem.alibi_slopes, compute_dtype(dtype)),
        sinks=to(problem.sinks, compute_dtype(dtype)),
    )


def _softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities of the visible keys and the LSE of every row; a sink is a key without a value."""
    logits, counted = scores, visible
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        logits, counted = torch.cat([scores, sink], -1), torch.cat([visible, sink != -math.inf], -1)
    some = counted.any(dim=-1, keepdim=True)
    # A row without any key gets zeros, whose softmax is finite, and its result is replaced.
    logits = torch.where(counted, logits, torch.where(some, -math.inf, 0.0).to(logits.dtype))
    probabilities = torch.softmax(logits, dim=-1)[..., : scores.shape[-1]]
    lse = torch.logsumexp(logits, dim=-1)
    # where() also stops gradients: what a row does not see has none, not even 0 x NaN.
    return torch.where(visible, probabilities, 0.0), torch.where(some[..., 0], lse, -math.inf)


def _matmul(left: Tensor, right: Tensor, seen: Tensor, row_by_row: bool) -> Tensor:
    """``left @ right``; row by row, each has a ``right`` of its own, with zeros where not ``seen``."""
    if not row_by_row:
        return left @ right
    return (left[..., None, :] @ torch.where(seen, right[:, :, None], 0.0)).squeeze(-2)
