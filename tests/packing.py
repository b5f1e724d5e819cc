"""Sequences packed one behind the other, and caches in pages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile import masks
from flashtile.masks.lengths import Packed
from flashtile.problem import AttentionProblem

# Few rows and many, nothing on either side.
QUERIES = (5, 0, 70, 1, 33, 9)
KEYS = (7, 3, 65, 0, 40, 90)
_LONGEST = (len(QUERIES), 4, max(QUERIES), max(KEYS))
_DRAWN = torch.Generator().manual_seed(1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal(alignment="bottom-right")},
    "window": {"mask": masks.window(20, 4, alignment="top-left")},
    "softcap and scale": {"softcap": 3.0, "scale": -0.7},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 4.0, 0.0])},
    "slopes": {"alibi_slopes": torch.rand(_LONGEST[:2], generator=_DRAWN)},
    "bias": {"bias": torch.randn(1, *_LONGEST[1:], generator=_DRAWN)},
    "dense": {"mask": torch.rand(_LONGEST, generator=_DRAWN) < 0.7},
}
# What matters to gradients alone: who shares a plane.
PLANES: dict[str, dict[str, Any]] = {
    "slopes for all": {"alibi_slopes": torch.rand(1, 4, generator=_DRAWN)},
    "bias of each": {"bias": torch.randn(_LONGEST, generator=_DRAWN)},
    "bias of keys": {"bias": torch.randn(1, 4, 1, _LONGEST[3], generator=_DRAWN)},
    "bias beyond the longest": {
        "bias": torch.randn(1, 1, _LONGEST[2] + 40, _LONGEST[3] + 9, generator=_DRAWN)
    },
}


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


def packed_problem_with(options: dict[str, Any], dtype: torch.dtype) -> AttentionProblem:
    """Sequences of QUERIES and KEYS, with NaN behind the last one, where nobody sees it."""
    options = {name: value.to(dtype) if name == "bias" else value for name, value in options.items()}
    problem = packed_problem(*packed(QUERIES, KEYS, dtype=dtype, value_head_dim=24), **options)
    for tensor, end in ((problem.query, sum(QUERIES)), (problem.key, sum(KEYS)), (problem.value, sum(KEYS))):
        tensor[:, :, end:] = math.nan
    return problem


def into_pages(size: int, *caches: Tensor) -> tuple[Tensor, ...]:
    """Caches (B, H, S, D) in pages of this size, in random order beside pages full of NaN; then the table."""
    batch, _, capacity, _ = caches[0].shape
    count = -(-capacity // size)
    table = torch.randperm(batch * count + 2)[: batch * count].view(batch, count).int()
    held = []
    for cache in caches:
        rest = cache.new_full((batch, cache.shape[1], count * size - capacity, cache.shape[3]), math.nan)
        parts = torch.cat((cache, rest), 2).unflatten(2, (count, size)).transpose(1, 2)
        pages = cache.new_full((batch * count + 2, *parts.shape[2:]), math.nan)
        pages[table.long()] = parts
        held.append(pages)
    return (*held, table)
