"""Forward and backward with every intermediate rounded at random: what rounding does to each result."""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from torch import Tensor

from flashtile.dropout import keep_scale
from flashtile.problem import AttentionProblem
from flashtile.reference import alibi_distance, kept_entries_of, visible_keys


class Rounding:
    """Moves numbers by one unit in the last place, up or down at random."""

    def __init__(self, stored: float, summed: float, seed: int = 0) -> None:
        self.stored = stored
        self.summed = summed
        self._generator = random.Random(seed)

    def store(self, exact: Tensor) -> Tensor:
        return exact + self.stored * exact.abs() * self._signs(exact)

    def compute(self, exact: Tensor) -> Tensor:
        return self.sum(exact, exact.abs())

    def sum(self, exact: Tensor, magnitude: Tensor, terms: int = 1) -> Tensor:
        """A sum of so many terms. Each addition rounds a partial sum by up to half an epsilon
        of `magnitude`: epsilon x sqrt(terms) / 6 in the mean, and three times that is taken here."""
        return exact + self.summed * max(1.0, math.sqrt(terms) / 2) * magnitude * self._signs(exact)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        return self.sum(left @ right, left.abs() @ right.abs(), left.shape[-1])

    def sum_to(self, like: Tensor, terms: Tensor) -> Tensor:
        count = terms.numel() // max(1, like.numel())
        return self.sum(terms.sum_to_size(like.shape), terms.abs().sum_to_size(like.shape), count)

    def _signs(self, like: Tensor) -> Tensor:
        # Drawing millions of signs is slow; a random place in a pool of them is not.
        size = like.numel()
        pool = _SIGNS if size < _SIGNS.numel() else _SIGNS.repeat(1 + size // _SIGNS.numel())
        start = self._generator.randrange(pool.numel() - size)
        return pool[start : start + size].view(like.shape)


_SIGNS = torch.randint(2, (2**20,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1


def rounded_attention(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, rounding: Rounding
) -> dict[str, Tensor]:
    """FlashAttention-2's forward and backward (Algorithms 1 and 2) with whole matrices, every step rounded.

    NaN and infinite inputs count as 0, and so does what a row cannot see: this is about rounding only.
    """
    visible = visible_keys(problem)
    group = problem.query.shape[1] // max(1, problem.key.shape[1])
    finite = {
        name: tensor.nan_to_num(0.0, 0.0, 0.0)
        for name in ("query", "key", "value", "bias", "alibi_slopes")
        if (tensor := getattr(problem, name)) is not None
    }
    for name in ("key", "value"):
        finite[name] = finite[name].repeat_interleave(group, dim=1)
    problem = dataclasses.replace(problem, **finite)
    kept = torch.ones(visible.shape, dtype=torch.float64)
    if problem.dropout_p > 0:
        kept = kept_entries_of(problem) * keep_scale(problem.dropout_p)
    out, lse = _forward(problem, visible, kept, rounding)
    grad_out = grad_out.nan_to_num(0.0, 0.0, 0.0)
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse[..., None].nan_to_num(0.0, 0.0, 0.0)
    gradients = _backward(problem, visible, kept, out, lse, grad_out, grad_lse, group, rounding)
    return {"out": out, "lse": lse[..., 0], **gradients}


def _scores(problem: AttentionProblem, visible: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The scores, -inf where hidden, and their derivative by the scaled product of query and key."""
    scores = problem.scale * rounding.matmul(problem.query, problem.key.mT)
    slope = torch.ones_like(scores)
    if problem.softcap is not None:
        capped = rounding.compute(torch.tanh(scores / problem.softcap))
        scores, slope = problem.softcap * capped, 1 - capped**2
    magnitude = scores.abs()
    if problem.bias is not None:
        scores, magnitude = scores + problem.bias, magnitude + problem.bias.abs()
    if problem.alibi_slopes is not None:
        alibi = problem.alibi_slopes[:, :, None, None] * _distance(problem)
        scores, magnitude = scores - alibi, magnitude + alibi.abs()
    return rounding.sum(scores, magnitude).masked_fill(~visible, -math.inf), slope


def _distance(problem: AttentionProblem) -> Tensor:
    lengths = problem.query.shape[2], problem.key.shape[2]
    return alibi_distance(*lengths, problem.query.device, problem.part)


def _sink(problem: AttentionProblem) -> Tensor:
    """The sink of every row, (B, Hq, Sq, 1); -inf, which counts for nothing, without sinks."""
    rows = problem.query.shape[:3]
    if problem.sinks is None:
        return torch.full((*rows, 1), -math.inf, dtype=torch.float64)
    return problem.sinks[:, None, None].expand(*rows, 1)


def _forward(
    problem: AttentionProblem, visible: Tensor, kept: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(problem, visible, rounding)
    sink = _sink(problem)
    taken = sink == math.inf  # by a sink that leaves nothing to the keys
    logits = torch.cat([scores, sink], dim=-1).masked_fill(taken, -math.inf)
    row_max = logits.amax(dim=-1, keepdim=True)
    nothing = row_max == -math.inf
    row_max = row_max.masked_fill(nothing, 0.0)
    exponentials = rounding.store(torch.exp(logits - row_max))
    row_sum = rounding.sum_to(row_max, exponentials).masked_fill(nothing, 1.0)
    dropped = exponentials[..., :-1] * kept
    out = rounding.store(rounding.matmul(dropped, problem.value) / row_sum)
    lse = row_max + torch.log(row_sum)
    # An error in the sum is a relative one, so an absolute one of its logarithm.
    lse = rounding.sum(lse, 1 + lse.abs()).masked_fill(nothing, -math.inf)
    return out, lse.masked_fill(taken, math.inf)


def _backward(
    problem: AttentionProblem,
    visible: Tensor,
    kept: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    group: int,
    rounding: Rounding,
) -> dict[str, Tensor]:
    # The scores are computed anew and may be rounded otherwise than they were in the LSE.
    scores, slope = _scores(problem, visible, rounding)
    base = lse.masked_fill(lse == -math.inf, 0.0)
    probabilities = rounding.compute(torch.exp(scores - base))
    dropped = rounding.store(probabilities * kept)
    delta = rounding.matmul(grad_out[..., None, :], out[..., None])[..., 0]
    delta = rounding.sum(delta - grad_lse, grad_lse.abs())
    grad_probabilities = rounding.compute(rounding.matmul(grad_out, problem.value.mT) * kept - delta)
    grad_scores = rounding.compute(probabilities * grad_probabilities)
    grad_products = rounding.store(grad_scores * slope)

    def over_queries(weights: Tensor, rows: Tensor) -> Tensor:
        weights, rows = (t.unflatten(1, (-1, group)).flatten(2, 3) for t in (weights, rows))
        return rounding.matmul(weights.mT, rows)

    gradients = {
        "grad_query": rounding.store(problem.scale * rounding.matmul(grad_products, problem.key)),
        "grad_key": rounding.store(problem.scale * over_queries(grad_products, problem.query)),
        "grad_value": rounding.store(over_queries(dropped, grad_out)),
    }
    if problem.bias is not None:
        gradients["grad_bias"] = rounding.sum_to(problem.bias, grad_scores)
    if problem.alibi_slopes is not None:
        slopes = problem.alibi_slopes[:, :, None, None]
        terms = -grad_scores * _distance(problem)
        gradients["grad_alibi_slopes"] = rounding.sum_to(slopes, terms)[:, :, 0, 0]
    if problem.sinks is not None:
        sinks = problem.sinks[None, :, None, None]
        terms = -torch.where(sinks == math.inf, 1.0, torch.exp(_sink(problem) - base)) * delta
        gradients["grad_sinks"] = rounding.sum_to(sinks, terms).flatten()
    return gradients
