"""Online softmax of one row, step by step: the recurrence that all of it rests on.

The state of a row after some keys is its running maximum m, running sum l = sum exp(s - m) and unnormalised
output u = sum exp(s - m) v; the answer is u / l. A new maximum rescales l and u by exp(old m - new m). So
softmax needs no second look at the scores (Milakov and Gimelshein, 2018), and a block of keys is as good as a
single one (FlashAttention, section 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.arguments import check_tensor, shape_of
from flashtile.checks import check_sizes
from flashtile.lab.setting import parts


@dataclass(frozen=True)
class Step:
    """The state of a row after a block of keys, and how it came about. Numbers are 0-dim tensors."""

    keys: slice
    scores: Tensor  # (keys,): those of the block
    weights: Tensor  # (keys,): exp(scores - row_max)
    rescale: Tensor  # exp(old row_max - row_max): what l and u of the step before are multiplied by
    row_max: Tensor  # m
    row_sum: Tensor  # l
    unnormalised: Tensor  # u, (head_dim,)
    answer: Tensor  # u / l, (head_dim,): exact attention over all keys so far; 0 where none is visible


def elementwise(scores: Tensor, values: Tensor) -> Tensor:
    """softmax(scores) @ values, one key at a time, normalised after each: (head_dim,).

    ``scores`` is (keys,), -inf hides a key; ``values`` is (keys, head_dim).
    """
    _check(scores, values)
    row_max, row_sum = scores.new_tensor(-math.inf), scores.new_zeros(())
    out = torch.zeros_like(values[0])
    for score, value in zip(scores, values, strict=True):
        if score == -math.inf:
            continue
        new_max = torch.maximum(row_max, score)
        old, weight = row_sum * torch.exp(row_max - new_max), torch.exp(score - new_max)
        new_sum = old + weight
        out = out * (old / new_sum) + value * (weight / new_sum)
        row_max, row_sum = new_max, new_sum
    return out


def blocked(scores: Tensor, values: Tensor, block: int) -> Tensor:
    """The same, ``block`` keys at a time, normalised once at the end."""
    return steps(scores, values, block)[-1].answer


def steps(scores: Tensor, values: Tensor, block: int) -> list[Step]:
    """The state of one row after each block of keys; the last answer is that of attention.

    Args:
        scores: (keys,), at least one, any floating dtype; -inf hides a key.
        values: (keys, head_dim), the same dtype.
        block: keys in a block; the last one may be shorter.

    Raises TypeError or ValueError for inputs that do not fit together.
    """
    _check(scores, values)
    check_sizes(block=block)
    row_max, row_sum = scores.new_tensor(-math.inf), scores.new_zeros(())
    unnormalised = torch.zeros_like(values[0])
    found = []
    for keys in parts(len(scores), block):
        new_max = torch.maximum(row_max, scores[keys].max())
        reference = new_max if new_max > -math.inf else torch.zeros_like(new_max)
        rescale, weights = torch.exp(row_max - reference), torch.exp(scores[keys] - reference)
        row_sum = rescale * row_sum + weights.sum()
        unnormalised = rescale * unnormalised + weights @ values[keys]
        row_max = new_max
        answer = unnormalised / row_sum if row_sum > 0 else torch.zeros_like(unnormalised)
        found.append(Step(keys, scores[keys], weights, rescale, row_max, row_sum, unnormalised, answer))
    return found


def mean_of_blocks(scores: Tensor, values: Tensor, block: int) -> Tensor:
    """The mean of the results of the blocks, which is wrong: low scores count as much as high ones.

    For scores [0, 0, ln 3, ln 3], values [0, 0, 1, 1] and blocks of two it is 0.5; attention gives 0.75.
    """
    _check(scores, values)
    results = [steps(scores[keys], values[keys], block)[-1].answer for keys in parts(len(scores), block)]
    return torch.stack(results).mean(0)


def _check(scores: Tensor, values: Tensor) -> None:
    check_tensor("scores", scores)
    check_tensor("values", values)
    if scores.dim() != 1 or len(scores) == 0:
        raise ValueError(f"scores must be (keys,) with at least one key, got {shape_of(scores)}")
    if values.dim() != 2 or len(values) != len(scores):
        raise ValueError(f"values must be (keys, head_dim) with {len(scores)} keys, got {shape_of(values)}")
    if not scores.is_floating_point() or values.dtype != scores.dtype:
        raise TypeError(
            f"scores and values must have one floating-point dtype, got {scores.dtype} and {values.dtype}"
        )
