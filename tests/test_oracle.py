"""The yardstick itself: its parts agree, it accepts what is right and refuses what is slightly wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flashtile.masks import causal, key_lengths
from tests.oracle import (
    assert_close_to_oracle,
    random_gradients,
    random_problem,
    results_by_autograd,
)
from tests.rounding import Rounding, rounded_attention

OPTIONS = {"softcap": 4.0, "dropout_p": 0.2, "seed": 3}
MASK = causal(alignment="bottom-right") & key_lengths([0, 40])


def everything(**sizes):
    return random_problem(
        mask=MASK, random_bias=(2, 1, 33, 47), random_alibi=True, random_sinks=True, **OPTIONS, **sizes
    )


@pytest.mark.parametrize("make", [random_problem, everything])
def test_two_derivations_of_the_gradients_agree(make):
    """Autograd through the formula, and the paper's backward: the same numbers without rounding."""
    problem = make(dtype=torch.float64)
    grad_out, grad_lse = random_gradients(problem)
    exact = results_by_autograd(problem, grad_out, grad_lse, torch.float64)
    written_out = rounded_attention(problem, grad_out, grad_lse, Rounding(0.0, 0.0))
    assert written_out.keys() == exact.keys()
    for name, expected in exact.items():
        torch.testing.assert_close(written_out[name], expected)


@pytest.mark.parametrize("make", [random_problem, everything])
def test_accepts_the_exact_result_rounded_to_the_dtype(make, dtype):
    problem = make(dtype=dtype)
    grads = random_gradients(problem)
    exact = results_by_autograd(problem, *grads, torch.float64)
    stored = ("out", "grad_query", "grad_key", "grad_value")
    small = torch.float64 if dtype == torch.float64 else torch.float32
    rounded = {name: tensor.to(dtype if name in stored else small) for name, tensor in exact.items()}
    assert_close_to_oracle(rounded, problem, *grads)


@pytest.mark.parametrize("make", [random_problem, everything])
def test_refuses_each_result_many_roundings_off(make, dtype):
    problem = make(dtype=dtype)
    grads = random_gradients(problem)
    exact = results_by_autograd(problem, *grads, torch.float64)
    # In float32 and float64 long sums that cancel, as ALiBi's, set the number.
    off = (20 if dtype.itemsize == 2 else 5000) * torch.finfo(dtype).eps
    for name, tensor in exact.items():
        wrong = tensor.clone()
        place = tuple(int(i) for i in torch.isfinite(tensor).nonzero()[-1])
        wrong[place] += off * tensor[torch.isfinite(tensor)].abs().max()
        with pytest.raises(AssertionError, match=f"{name} .*largest error"):
            assert_close_to_oracle({name: wrong}, problem, *grads)


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan, -1e30])
def test_refuses_another_lse_where_nothing_is_seen(wrong):
    problem = random_problem(mask=MASK)
    lse = results_by_autograd(problem, *random_gradients(problem), torch.float32)["lse"]
    assert lse[0, 0, 0] == -math.inf
    assert_close_to_oracle({"lse": lse}, problem)
    lse[0, 0, 0] = wrong
    with pytest.raises(AssertionError, match="lse: is"):
        assert_close_to_oracle({"lse": lse}, problem)


def test_tells_nan_from_infinity_unless_told_not_to():
    problem = random_problem()
    problem.value[0, 0, 3, 0] = math.inf
    out = results_by_autograd(problem, *random_gradients(problem), torch.float32)["out"]
    assert_close_to_oracle({"out": out}, problem)
    out[0, 0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="out: isnan differs"):
        assert_close_to_oracle({"out": out}, problem)
    assert_close_to_oracle({"out": out}, problem, tell_infinities=False)


def test_a_single_key_leaves_only_rounding():
    """dP - delta is 0; that an order of summation leaves 1e-7 there is no error, that 1e-4 is left is one."""
    problem = random_problem(key_length=1)
    grad_out, _ = random_gradients(problem)
    gradient = torch.full_like(problem.query, 1e-7)
    assert_close_to_oracle({"grad_query": gradient}, problem, grad_out)
    with pytest.raises(AssertionError, match="grad_query"):
        assert_close_to_oracle({"grad_query": gradient * 1000}, problem, grad_out)


def test_a_wrong_scale_dropout_or_mask_is_seen():
    problem = random_problem(dtype=torch.bfloat16, mask=causal(alignment="bottom-right"), dropout_p=0.5)
    grads = random_gradients(problem)
    for change in ({"scale": problem.scale * 1.1}, {"seed": 1}, {"upper": problem.upper - 1}):
        changed = dataclasses.replace(problem, **change)
        for name, found in results_by_autograd(changed, *grads, torch.bfloat16).items():
            if name == "lse" and "seed" in change:
                continue
            with pytest.raises(AssertionError, match=name):
                assert_close_to_oracle({name: found}, problem, *grads)
