"""Decoding in every shape of its register tiles: rows of a group by vectors of a value."""

from __future__ import annotations

import itertools

import torch

from flashtile import cpu
from flashtile.cpu.kinds import TARGET
from flashtile.problem import compute_dtype
from tests.oracle import assert_close_to_oracle, random_problem


def check(dtype: torch.dtype) -> int:
    """Compare one query per head with the oracle, groups of 1 to 9 heads; how many calls were compared."""
    checked, lanes = 0, TARGET.vector_bytes // compute_dtype(dtype).itemsize
    for group, vectors, keys in itertools.product(range(1, 10), range(1, 6), (3, 37)):
        problem = random_problem(
            batch=1, heads=group, kv_heads=1, query_length=1, key_length=keys, head_dim=24,
            value_head_dim=vectors * lanes, dtype=dtype,
        )  # fmt: skip
        out = torch.full((1, group, 1, vectors * lanes), torch.nan, dtype=dtype)
        lse = torch.full((1, group, 1), torch.nan, dtype=compute_dtype(dtype))
        cpu.forward(problem, out, lse)
        assert_close_to_oracle({"out": out, "lse": lse}, problem)
        checked += 1
    return checked
