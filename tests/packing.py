"""Sequences packed one behind the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import masks
from flashtile.masks.lengths import Packed
from flashtile.problem import AttentionProblem


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    rest: int = 3,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """query, key, value, and the cumulative lengths; `rest` rows more than the sequences need."""
    query = torch.randn(sum(queries) + rest, heads, head_dim).to(dtype)
    key = torch.randn(sum(keys) + rest, kv_heads, head_dim).to(dtype)
    value = torch.randn(sum(keys) + rest, kv_heads, value_head_dim).to(dtype)
    inputs = (tensor.requires_grad_(requires_grad) for tensor in (query, key, value))
    return (*inputs, starts(queries), starts(keys))  # type: ignore[return-value]


def packed_problem(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, mask: Any = None, **options: Any
) -> AttentionProblem:
    """The call of `attention_varlen` as backends see it; `mask` may be a tensor."""
    longest = int(cu_q.diff().max()), int(cu_k.diff().max())
    lengths = Packed(len(query), len(key), longest[1], longest, cu_q, cu_k, cu_k.diff())
    if mask is None or isinstance(mask, Tensor):
        lower, upper, first, last, dense = masks.Intervals(dense=mask)
    else:
        lower, upper, first, last, dense = mask.intervals(lengths)
    inputs = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return AttentionProblem(
        *inputs, lower=lower, upper=upper, first=first, last=last,
        query_starts=cu_q, key_starts=cu_k, mask=dense, **{"scale": query.shape[-1] ** -0.5, **options},
    )  # fmt: skip
