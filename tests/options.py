"""Every option of an attention call, switched on one at a time, in pairs, or all at once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from flashtile.problem import AttentionProblem, compute_dtype
from tests.oracle import random_problem


def options(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Fields of a problem that switch on one option each."""
    batch, heads, queries, keys = sizes
    generator = torch.Generator().manual_seed(7)
    small = compute_dtype(dtype)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def pattern(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < 0.6

    holes = pattern(1, heads, queries, keys)
    holes[:, 0, 1] = False  # a row that sees nothing
    first = integers(0, keys, batch, queries)
    return {
        "upper": {"upper": keys - queries - 2},
        "lower": {"lower": keys - queries - 20},
        "band": {"lower": keys - queries - 50, "upper": keys - queries + 3},
        "far band": {"lower": keys - 2, "upper": 10**9},
        "first": {"first": integers(-3, keys, batch, 1)},
        "last": {"last": integers(0, keys + 9, 1, queries)},
        "intervals": {"first": first, "last": first + integers(-5, keys, batch, queries)},
        "mask": {"mask": holes},
        "mask of keys": {"mask": pattern(batch, 1, 1, keys)},
        "bias": {"bias": normal(batch, heads, queries, keys).to(dtype)},
        "bias of keys": {"bias": normal(batch, 1, 1, keys).to(dtype)},
        "bias with holes": {"bias": normal(1, heads, queries, keys).masked_fill(~holes, -math.inf).to(dtype)},
        "low bias": {"bias": (normal(1, 1, queries, keys) - 60000.0).to(dtype)},
        "softcap": {"softcap": 0.7},
        "alibi": {"alibi_slopes": normal(batch, heads).abs().to(small) / 8},
        "alibi for all": {"alibi_slopes": normal(1, heads).abs().to(small) / 8},
        "sinks": {"sinks": normal(heads).to(small)},
        "dropout": {"dropout_p": 0.3, "seed": -(2**62) - 12345678901},
        "scale 0": {"scale": 0.0},
        "negative scale": {"scale": -0.3},
        "large scale": {"scale": 30.0},
        "unequal head_dim": {"value_head_dim": 21},
        "no sharing": {"kv_heads": heads},
    }


NAMES = list(options((1, 1, 2, 2), torch.float32))
ALL_AT_ONCE = (
    "band", "intervals", "mask", "bias", "softcap", "alibi", "sinks", "dropout", "unequal head_dim"
)  # fmt: skip


def problem_with(sizes: tuple[int, int, int, int], dtype: torch.dtype, *chosen: str) -> AttentionProblem:
    """A problem of these sizes with the chosen options."""
    batch, heads, queries, keys = sizes
    fields: dict[str, Any] = {"kv_heads": max(1, heads // 2)}
    for name in chosen:
        fields |= options(sizes, dtype)[name]
    generator = torch.Generator().manual_seed(11)
    return random_problem(
        batch=batch,
        heads=heads,
        query_length=queries,
        key_length=keys,
        dtype=dtype,
        generator=generator,
        **fields,
    )


def pairs() -> list[tuple[str, str]]:
    """Pairs of options that do not set the same field."""
    fields = {name: set(given) for name, given in options((1, 1, 2, 2), torch.float32).items()}
    return [(one, two) for one, two in itertools.combinations(NAMES, 2) if not fields[one] & fields[two]]
