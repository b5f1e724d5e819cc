"""NaN and infinities in the input reach the rows that see them and nothing else, forward and backward."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from flashtile import cpu
from tests.nonfinite import (
    MASKS,
    check_infinite_sink,
    check_infinity,
    check_minus_infinity,
    check_nan,
    masked_problem,
)
from tests.oracle import random_gradients, random_problem, results_of_backend

SIZES = {"tiles": (40, 150), "decode": (2, 1040)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias given"])
def test_nan_reaches_what_sees_it(dtype, size, mask, with_bias):
    check_nan(partial(results_of_backend, cpu), masked_problem(*SIZES[size], dtype, mask, with_bias))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_reaches_what_sees_it(dtype, size, mask, value):
    check_infinity(partial(results_of_backend, cpu), masked_problem(*SIZES[size], dtype, mask), value)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "grad_lse"])
def test_nan_in_small_arguments(dtype, size, name):
    """A NaN slope or sink reaches the rows of its head, a NaN dLSE its row; hidden keys get no gradient."""
    queries, keys = SIZES[size]
    problem = random_problem(
        batch=1, heads=2, kv_heads=2, query_length=queries, key_length=keys, head_dim=6, dtype=dtype,
        random_alibi=True, random_sinks=True, upper=11,
    )  # fmt: skip
    grad_out, grad_lse = random_gradients(problem)
    if name == "alibi_slopes":
        problem.alibi_slopes[0, 1] = math.nan
    elif name == "sinks":
        problem.sinks[1] = math.nan
    else:
        grad_lse[0, 1, 0] = math.nan
    results = results_of_backend(cpu, problem, grad_out, grad_lse)
    for result, tensor in results.items():
        if (result.startswith("grad_") and tensor.dim() == 4) or result in ("out", "lse"):
            assert torch.isfinite(tensor[:, 0]).all(), f"{result} of the other head"
    reached = 12 if name == "grad_lse" else queries + 11  # keys that a row with NaN sees
    for result in ("grad_key", "grad_value"):
        nan = torch.isnan(results[result][0, 1])
        assert not nan[reached:].any(), f"{result} of keys that no such row sees"
        assert nan[:reached].all() == (result == "grad_key" or name != "grad_lse"), result
    assert torch.isnan(results["out"][0, 1]).all() == (name != "grad_lse")


def test_a_nan_in_a_split_of_its_own_is_not_lost(dtype):
    """Decoding in splits: the only key of the second split that a row sees is NaN, first of four."""
    first = torch.tensor([[1020]], dtype=torch.int32)
    problem = random_problem(
        batch=1, query_length=1, key_length=2048, dtype=dtype, first=first, last=first + 5
    )
    problem.key[:, :, 1024] = math.nan
    results = results_of_backend(cpu, problem, *random_gradients(problem))
    assert torch.isnan(results["out"]).all()
    assert torch.isnan(results["lse"]).all()


def test_all_rows_hidden_from_nan_everywhere(dtype):
    """Rows that see nothing give 0 and -inf whatever the inputs hold."""
    for queries, keys in SIZES.values():
        problem = random_problem(batch=1, query_length=queries, key_length=keys, dtype=dtype, upper=-queries)
        for tensor in (problem.query, problem.key, problem.value):
            tensor.fill_(math.nan)
        grad_out, grad_lse = (torch.full_like(t, math.nan) for t in random_gradients(problem))
        results = results_of_backend(cpu, problem, grad_out, grad_lse)
        assert (results.pop("lse") == -math.inf).all()
        for name, tensor in results.items():
            assert (tensor == 0).all(), name


@pytest.mark.parametrize("size", SIZES)
def test_a_nan_stays_beside_a_sink_of_infinity(size):
    check_infinite_sink(partial(results_of_backend, cpu), *SIZES[size])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_whose_scores_are_all_minus_infinity(size, sinks):
    check_minus_infinity(partial(results_of_backend, cpu), *SIZES[size], sinks)


def test_sink_that_counts_for_nothing_beside_a_nan():
    problem = random_problem(random_sinks=True)
    assert problem.sinks is not None
    problem.sinks[0] = -math.inf
    problem.query[0, :, 3] = math.nan
    results = results_of_backend(cpu, problem, *random_gradients(problem))
    assert results["grad_sinks"][0] == 0
    assert results["grad_sinks"][1:].isnan().all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_slope_does_not_uncover_what_a_bias_hides(dtype, size):
    """Minus infinity and NaN add up to NaN: the bias has to hide its keys by itself."""
    queries, keys = SIZES[size]
    bias = torch.zeros(1, 1, queries, keys)
    bias[..., keys // 2 :] = -math.inf
    bias[:, :, 0] = -math.inf  # a row that sees nothing
    problem = random_problem(
        batch=1, heads=2, kv_heads=2, query_length=queries, key_length=keys, head_dim=6, dtype=dtype,
        random_alibi=True, bias=bias.to(dtype),
    )  # fmt: skip
    problem.alibi_slopes[0, 1] = math.nan
    results = results_of_backend(cpu, problem, *random_gradients(problem))
    assert torch.isnan(results["out"][0, 1, 1:]).all()
    assert (results["out"][0, :, 0] == 0).all()
    for name in ("grad_key", "grad_value"):
        assert torch.isnan(results[name][0, 1, : keys // 2]).all()
        assert (results[name][0, :, keys // 2 :] == 0).all()
        assert torch.isfinite(results[name][0, 0]).all()
