"""Rows that lie far apart are copied together where that pays, and nothing else is; the bits stay."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashtile.cpu import engine, far
from flashtile.cpu.gemm import COLUMNS
from flashtile.cpu.kinds import FLOAT32
from flashtile.problem import AttentionProblem
from tests.oracle import random_gradients, random_problem, results_of_backend
from tests.packing import packed, packed_problem
from tests.strategies import lay_out, with_layout

MANY = 32 * COLUMNS * FLOAT32.lanes  # queries that pass over the keys


def heads_of_a_model(length: int, heads: int = 16, head_dim: int = 64) -> torch.Tensor:
    return torch.zeros(1, length, heads, head_dim).transpose(1, 2)


def problem_of(keys: torch.Tensor, queries: int, sequences: int = 1) -> AttentionProblem:
    """Queries that follow one another, of one head for each head of the keys."""
    _, heads, length, head_dim = keys.shape
    starts = {}
    if sequences > 1:
        starts = {
            name: torch.arange(sequences + 1) * (count // sequences)
            for name, count in (("query_starts", queries), ("key_starts", length))
        }
    return AttentionProblem(torch.zeros(1, heads, queries, head_dim), keys, keys, 1.0, **starts)


def test_rows_of_a_long_sequence_are_copied():
    tensor = heads_of_a_model(1024)
    found = far.with_keys_together(problem_of(tensor, MANY), FLOAT32)
    for copy in (found.key, found.value):
        assert copy.is_contiguous()
        assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "queries", "sequences"),
    [
        (heads_of_a_model(1024).contiguous(), MANY, 1),
        (heads_of_a_model(1023), MANY, 1),  # less than 4 MiB from the first to the last
        (heads_of_a_model(1024), MANY - 1, 1),
        (heads_of_a_model(1024), 2 * MANY, 2),  # two packed sequences of half of it
        (heads_of_a_model(1024)[:, :1].expand(-1, 16, -1, -1), MANY, 1),  # would grow
    ],
)
def test_nothing_else_is(tensor, queries, sequences):
    problem = problem_of(tensor, queries, sequences)
    assert far.with_keys_together(problem, FLOAT32) is problem


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each tensor was copied, where size and number do not matter."""
    copied: list[bool] = []
    together = far._together

    def noted(tensor, *arguments):
        found = together(tensor, *arguments)
        copied.append(found is not tensor)
        return found

    monkeypatch.setattr(far, "_SPAN", 0)
    monkeypatch.setattr(far, "_PASSES", 0)
    monkeypatch.setattr(far, "_together", noted)
    return copied


def test_the_bits_stay(copies, dtype):
    near = random_problem(query_length=70, key_length=90, head_dim=24, upper=5, dtype=dtype)
    upstream = random_gradients(near)
    expected = results_of_backend(engine, near, *upstream)
    assert copies
    assert not any(copies)
    grad_out = lay_out(upstream[0], "transposed")
    found = results_of_backend(engine, with_layout(near, "transposed"), grad_out, upstream[1])
    assert sum(copies) == 2 + 4  # keys and values forward; queries and upstream gradients too backward
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_packed_sequences_are_copied_and_caches_are_not(copies):
    problem = packed_problem(*packed((40, 30), (50, 20)))
    assert far.with_keys_together(problem, FLOAT32) is not problem
    cache = dataclasses.replace(problem, key_starts=None, key_lengths=torch.tensor([50, 20]))
    assert far.with_keys_together(cache, FLOAT32) is cache
