"""The description of a call, and what describing one costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashtile.problem import SUPPORTED_DTYPES, AttentionProblem, Gradients, compute_dtype


def test_defaults_ask_for_nothing():
    query = torch.zeros(1, 1, 2, 4)
    problem = AttentionProblem(query, query, query, 0.5)
    optional = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)[4:]}
    assert optional.pop("dropout_p") == 0.0
    assert optional.pop("seed") == 0
    assert set(optional.values()) == {None}


def test_a_problem_can_be_copied_with_changes_and_has_no_other_fields():
    query = torch.zeros(1, 1, 2, 4)
    problem = AttentionProblem(query, query, query, 0.5, upper=0)
    assert dataclasses.replace(problem, scale=2.0).scale == 2.0
    assert dataclasses.replace(problem, scale=2.0).upper == 0
    with pytest.raises(AttributeError):
        problem.causal = True


def test_gradients_are_in_the_order_of_the_differentiable_inputs():
    names = [field.name for field in dataclasses.fields(Gradients)]
    assert names == ["query", "key", "value", "bias", "alibi_slopes", "sinks"]


def test_compute_dtype():
    assert {dtype: compute_dtype(dtype) for dtype in SUPPORTED_DTYPES} == {
        torch.float64: torch.float64,
        torch.float32: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
    }
