"""Decoding in every shape of its register tiles: rows of a group by vectors of a value, keys in vectors."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from flashtile import cpu
from flashtile.cpu.kinds import TARGET
from flashtile.problem import AttentionProblem, compute_dtype
from tests.oracle import assert_close_to_oracle, random_problem


def check(dtype: torch.dtype) -> int:
    """Compare one query per head with the oracle, groups of 1 to 9 heads; how many calls were compared."""
    checked, lanes = 0, TARGET.vector_bytes // compute_dtype(dtype).itemsize
    for group, vectors, keys in itertools.product(range(1, 10), range(1, 6), (3, 37)):
        problem = random_problem(
            batch=1, heads=group, kv_heads=1, query_length=1, key_length=keys, head_dim=24,
            value_head_dim=vectors * lanes, dtype=dtype,
        )  # fmt: skip
        assert_close_to_oracle(decoded(problem), problem)
        checked += 1
    return checked


def decoded(problem: AttentionProblem) -> dict[str, Tensor]:
    """O and LSE, written over NaN."""
    query, dtype = problem.query, problem.query.dtype
    out = torch.full((*query.shape[:3], problem.value.shape[3]), torch.nan, dtype=dtype)
    lse = torch.full(query.shape[:3], torch.nan, dtype=compute_dtype(dtype))
    cpu.forward(problem, out, lse)
    return {"out": out, "lse": lse}


TWO_QUERIES = "two queries, of which one sees less of the last tile"
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "softcap": {"softcap": 0.5},
    "sinks": {"random_sinks": True},
    "scale below what rows are scaled by": {"scale": 1e-8},
    TWO_QUERIES: {},
}


def check_shared_vectors(dtype: torch.dtype) -> None:
    """Where keys share vectors, rows get the bits of a vector for each key, which a mask asks for."""
    lanes = TARGET.vector_bytes // compute_dtype(dtype).itemsize
    for group, keys, name in itertools.product(range(1, lanes + 2), (1, 6, 37, 1100), OPTIONS):
        queries = 2 if name == TWO_QUERIES else 1
        alone = random_problem(
            batch=1, heads=group, kv_heads=1, query_length=queries, key_length=keys, head_dim=24,
            value_head_dim=8, dtype=dtype, upper=keys - 2 if queries == 2 else None, **OPTIONS[name],
        )  # fmt: skip
        masked = dataclasses.replace(alone, mask=torch.ones(1, 1, 1, keys, dtype=torch.bool))
        expected, found = decoded(masked), decoded(alone)
        assert_close_to_oracle(found, alone)
        for part in ("out", "lse"):
            assert torch.equal(found[part], expected[part]), f"{part}, {group} heads, {keys} keys, {name}"
