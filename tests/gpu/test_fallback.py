"""PyTorch's attention in place of the kernels: the same meaning, or a refusal that says what differs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import masks
from flashtile.gpu import fallback
from flashtile.problem import AttentionProblem, Gradients
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem, results_of_backend


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Any:
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(3) @ value, scores.logsumexp(3)


def check_layout(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    """What PyTorch's kernel asks of its inputs."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert all(t.is_contiguous() and t.shape[3] % 8 == 0 for t in (query, key, value))
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(3) == 1
        assert all(step % 16 == 0 for step in bias.stride()[:3])


def efficient(query, key, value, bias, compute_lse, dropout_p, causal, *, scale):
    """Stands in for PyTorch's kernel, which CPUs lack; its LSE is as long as a multiple of 32."""
    assert compute_lse
    assert dropout_p == 0.0
    check_layout(query, key, value, bias)
    out, lse = attend(query, key, value, bias, causal, scale)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.nan, dtype=torch.float32)
    padded[..., : lse.shape[2]] = lse
    seed = torch.zeros((), dtype=torch.int64)
    return out, padded, seed, seed


def efficient_backward(
    grad_out, query, key, value, bias, out, lse, seed, offset, dropout_p, wanted, causal, *, scale
):
    assert lse.shape[2] % 32 == 0
    assert grad_out.shape == out.shape
    check_layout(query, key, value, bias)
    leaves = [t.detach().requires_grad_() for t in (query, key, value) if t is not None]
    if bias is not None:
        bias = bias.detach().requires_grad_(wanted[3])
    with torch.enable_grad():
        result, _ = attend(*leaves, bias, causal, scale)
        leaves += [bias] if wanted[3] else []
        found = torch.autograd.grad(result, leaves, grad_out)
    return *found[:3], found[3] if wanted[3] else torch.tensor([])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_EFFICIENT", efficient)
    monkeypatch.setattr(fallback, "_EFFICIENT_BACKWARD", efficient_backward)


PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal(alignment="top-left")},
    "mask": {"mask": torch.rand(2, 1, 33, 47) < 0.7},
    "rows that see nothing": {"mask": torch.rand(2, 4, 33, 47) < 0.03},
    "padding, causal": {
        "mask": masks.causal(alignment="top-left") & (torch.arange(47) < 9),
        "random_bias": (1, 4, 33, 47),
    },
    "bias": {"random_bias": (1, 1, 33, 47)},
    "bias of keys": {"random_bias": (2, 4, 1, 47)},
    "one bias": {"random_bias": (1, 4, 1, 1)},
    "head dims, scale": {"head_dim": 20, "value_head_dim": 9, "scale": -0.3},
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", PROBLEMS)
def test_torchs_kernel_means_the_same(name: str):
    problem = random_problem(**PROBLEMS[name])
    assert fallback.refusal(problem) is None
    grad_out, _ = random_gradients(problem)
    found = results_of_backend(fallback, problem, grad_out, None)
    assert_close_to_oracle(found, problem, grad_out, None)


FLOAT64 = PROBLEMS | {
    "window": {"mask": masks.window(7, 3, alignment="bottom-right")},
    "key lengths": {"mask": masks.key_lengths([40, 0])},
    "softcap": {"softcap": 2.0},
    "ALiBi and sinks": {"random_alibi": True, "random_sinks": True},
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor([5])},
}


@pytest.mark.parametrize("name", FLOAT64)
def test_float64_is_standard_attention(name: str):
    problem = random_problem(**FLOAT64[name], dtype=torch.float64)
    assert fallback.refusal(problem) is None
    grad_out, grad_lse = random_gradients(problem)
    found = results_of_backend(fallback, problem, grad_out, grad_lse)
    assert_close_to_oracle(found, problem, grad_out, grad_lse)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "no softcap"),
        ({"random_alibi": True}, "ALiBi only as a matrix"),
        ({"random_sinks": True}, "no sinks"),
        ({"dropout_p": 0.1}, "other bits"),
        ({"mask": masks.window(3, 0, alignment="top-left")}, "windows only as a matrix"),
        ({"mask": masks.causal(alignment="bottom-right")}, "causal only top-left"),
        ({"mask": masks.key_lengths([3, 4])}, "intervals of keys only as a matrix"),
        ({"key_lengths": torch.tensor([3, 4])}, "no packed sequences and no cache"),
        ({"key_lengths": torch.tensor([3, 4]), "dtype": torch.float64}, "no packed sequences and no cache"),
    ],
)
def test_what_means_something_else_is_refused(options: dict[str, Any], reason: str):
    assert reason in str(fallback.refusal(random_problem(**options)))


def test_bfloat16_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch):
    problem = random_problem(dtype=torch.bfloat16)
    for capability, refused in (((7, 0), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert ("no bfloat16" in str(fallback.refusal(problem))) == refused


@pytest.mark.usefixtures("kernel")
def test_a_gradient_of_the_lse_is_refused():
    problem = random_problem()
    grad_out, grad_lse = random_gradients(problem)
    with pytest.raises(NotImplementedError, match="no gradient of the LSE"):
        results_of_backend(fallback, problem, grad_out, grad_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_keys(dtype: torch.dtype):
    problem = random_problem(key_length=0, dtype=dtype)
    grad_out, _ = random_gradients(problem)
    found = results_of_backend(fallback, problem, grad_out, None)
    assert not found["out"].any()
    assert (found["lse"] == -math.inf).all()
    assert not found["grad_query"].any()


@pytest.mark.parametrize("bias", [False, True])
def test_torchs_operators_take_these_arguments(bias: bool):
    """Its schemas, on tensors without values."""
    given = random_problem(random_bias=(1, 4, 33, 47) if bias else None)
    moved = {name: t.to("meta") for name, t in vars_of(given).items() if isinstance(t, Tensor)}
    problem = dataclasses.replace(given, **moved)
    out, lse = torch.empty_like(problem.query), problem.query.new_empty(2, 4, 33)
    fallback.forward(problem, out, lse)
    bias_gradient = torch.empty_like(problem.bias) if problem.bias is not None else None
    gradients = Gradients(
        *(torch.empty_like(t) for t in (problem.query, problem.key, problem.value)), bias_gradient, None, None
    )
    fallback.backward(problem, out, lse, out, None, gradients)


def vars_of(problem: AttentionProblem) -> dict[str, Any]:
    return {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
