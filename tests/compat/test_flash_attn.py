"""flash-attn's dense functions: meanings against its own description, numbers against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.compat import InputError
from flashtile.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from flashtile.problem import compute_dtype
from tests.compat.standard import CALLS, LEAVES, inputs_of, leaves_of, problem_of, standard
from tests.oracle import assert_close_to_oracle


def exactly(found: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of float64."""
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def small(**options: Any) -> dict[str, Any]:
    """Arguments of a call that is to be refused, or looked at."""
    return {
        "q": torch.randn(2, 5, 4, 8),
        "k": torch.randn(2, 7, 2, 8),
        "v": torch.randn(2, 7, 2, 8),
        **options,
    }


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_by_the_rule(name, dtype):
    arguments = inputs_of(name, dtype)
    leaves = leaves_of(arguments)
    out, lse = flash_attn_func(**arguments, return_lse=True)
    grad_out, grad_lse = torch.randn(out.shape).to(dtype), torch.randn(lse.shape).to(lse.dtype)
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out, grad_lse))
    found = {"out": out.transpose(1, 2).detach(), "lse": lse.detach()}
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if leaf in "qkv":
            gradient = gradient.transpose(1, 2)
        elif leaf == "alibi_slopes":
            gradient = gradient.reshape(-1, out.shape[2])
        found[f"grad_{LEAVES[leaf]}"] = gradient
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert lse.dtype == compute_dtype(dtype)
    assert_close_to_oracle(found, problem_of(arguments), grad_out.transpose(1, 2), grad_lse)


@pytest.mark.parametrize("name", CALLS)
def test_meaning_of_every_option(name):
    arguments = inputs_of(name, torch.float64)
    leaves = list(leaves_of(arguments).values())
    expected = standard(**arguments)
    found = flash_attn_func(**arguments, return_attn_probs=True)
    for ours, theirs in zip(found, expected, strict=True):
        exactly(ours, theirs)
    grad_out = torch.randn_like(found[0])
    for ours, theirs in zip(
        torch.autograd.grad(found[0], leaves, grad_out),
        torch.autograd.grad(expected[0], leaves, grad_out),
        strict=True,
    ):
        exactly(ours, theirs)


def test_causal_is_aligned_to_the_bottom_right():
    visible = {(2, 5): ["11110", "11111"], (5, 2): ["00", "00", "00", "10", "11"]}
    for (sq, sk), rows in visible.items():
        q, k, v = torch.randn(1, sq, 1, 4), torch.randn(1, sk, 1, 4), torch.randn(1, sk, 1, 4)
        out, lse, probabilities = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        pattern = torch.tensor([[int(cell) for cell in row] for row in rows]).bool()
        assert torch.equal(probabilities[0, 0] > 0, pattern)
        empty = ~pattern.any(1)
        assert out[0, empty].eq(0).all()
        assert torch.equal(lse[0, 0] == -math.inf, empty)


@pytest.mark.parametrize("window", [(3, 1), [3, 1], torch.tensor([3, 1]), tuple(np.array([3, 1]))])
def test_windows_come_as_tuples_lists_and_tensors(window):
    call = small()
    assert torch.equal(
        flash_attn_func(**call, window_size=window), flash_attn_func(**call, window_size=(3, 1))
    )


def test_no_bound_is_minus_one_or_none():
    call = small()
    for none, minus_one in (((None, None), (-1, -1)), ((2, None), (2, -1)), ((None, 0), (-1, 0))):
        assert torch.equal(
            flash_attn_func(**call, window_size=none), flash_attn_func(**call, window_size=minus_one)
        )
    assert torch.equal(
        flash_attn_func(**call, window_size=(-1, 0)), flash_attn_func(**call, causal=True)
    )  # right 0 is causal
    assert torch.equal(
        flash_attn_func(**call, causal=True, window_size=(2, 4)), flash_attn_func(**call, window_size=(2, 0))
    )  # and causal sets it


def test_dropout_is_the_mask_of_the_seed_and_the_probabilities_show_it():
    arguments = {**small(causal=True), "dropout_p": 0.3}
    arguments = {name: v.double() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    for name in "qkv":
        arguments[name].requires_grad_()
    torch.manual_seed(7)
    out, lse, signed = flash_attn_func(**arguments, return_attn_probs=True)
    torch.manual_seed(7)
    assert torch.equal(out, flash_attn_func(**arguments))
    seen = signed != 0
    kept = signed >= 0
    expected, expected_lse, probabilities = standard(**arguments, kept=kept)
    exactly(out, expected)
    exactly(lse, expected_lse)
    exactly(signed.abs(), probabilities)
    torch.manual_seed(7)
    seed = int(torch.randint(-(2**63), 2**63 - 1, (1,)))
    mask = flashtile.dropout_mask(seed, 0.3, 2, 4, 5, 7)
    assert torch.equal(kept, mask | ~seen)
    grad_out = torch.randn_like(out)
    leaves = [arguments[name] for name in "qkv"]
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad_out),
        torch.autograd.grad(expected, leaves, grad_out),
        strict=True,
    ):
        exactly(ours, theirs)


@pytest.mark.parametrize("dropout_p", [0.05, 0.17, 0.6])
def test_the_dropped_fraction(dropout_p):
    q, k, v = torch.randn(3, 2, 128, 4, 8).unbind(0)
    _, _, signed = flash_attn_func(q, k, v, dropout_p=dropout_p, return_attn_probs=True)
    dropped = (signed < 0).double().mean().item()
    deviation = math.sqrt(dropout_p * (1 - dropout_p) / signed.numel())
    assert abs(dropped - dropout_p) < 5 * deviation


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_asking_for_probabilities_changes_nothing_else(dropout_p, dtype):
    q, k, v = torch.randn(3, 2, 33, 4, 16).to(dtype).unbind(0)
    outputs = []
    for option in ({"return_lse": True}, {"return_attn_probs": True}, {}):
        torch.manual_seed(3)
        outputs.append(flash_attn_func(q, k, v, dropout_p, causal=True, **option))
    (out, lse), (same_out, same_lse, probabilities), alone = outputs
    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)
    assert torch.equal(out, alone)
    assert probabilities.dtype == dtype
    assert probabilities.shape == (2, 4, 33, 33)
    assert not probabilities.requires_grad


def test_probabilities_under_autocast_are_those_of_the_call():
    call = small()
    expected = flash_attn_func(**{name: t.bfloat16() for name, t in call.items()}, return_attn_probs=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = flash_attn_func(**call, return_attn_probs=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_deterministic_is_how_it_always_is():
    call = small()
    q = call["q"].requires_grad_()
    gradients = [
        torch.autograd.grad(flash_attn_func(**call, deterministic=flag).square().sum(), q)[0]
        for flag in (True, False)
    ]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.2}])
def test_packed_gradients_lie_in_the_packed_tensor(options, dtype):
    """Every element: the packed functions are the plain one, and so is what flows back."""
    qkv = torch.randn(2, 13, 3, 4, 24).to(dtype).requires_grad_()
    q = torch.randn(2, 9, 4, 24).to(dtype).requires_grad_()
    kv = torch.randn(2, 13, 2, 2, 24).to(dtype).requires_grad_()
    for packed, call, parts in (
        (qkv, lambda: flash_attn_qkvpacked_func(qkv, **options), lambda: qkv.unbind(2)),
        (kv, lambda: flash_attn_kvpacked_func(q, kv, **options), lambda: (q, *kv.unbind(2))),
    ):
        torch.manual_seed(1)
        out = call()
        torch.manual_seed(1)
        expected = flash_attn_func(*parts(), **options)
        assert torch.equal(out, expected)
        grad_out = torch.randn(out.shape).to(dtype)
        leaves = [packed] if packed is qkv else [packed, q]
        for ours, theirs in zip(
            torch.autograd.grad(out, leaves, grad_out),
            torch.autograd.grad(expected, leaves, grad_out),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


def test_packed_functions_return_what_is_asked_for():
    qkv, q, kv = torch.randn(1, 6, 3, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 6, 2, 1, 8)
    for call in (
        lambda **options: flash_attn_qkvpacked_func(qkv, **options),
        lambda **options: flash_attn_kvpacked_func(q, kv, **options),
    ):
        out, lse = call(return_lse=True)
        assert torch.equal(out, call())
        assert torch.equal(lse, call(return_attn_probs=True)[1])


def test_any_strides_and_no_copies():
    wide = torch.randn(2, 10, 8, 32, dtype=torch.float64)
    q, k = wide[:, ::2, ::2, 1::2], wide.transpose(1, 2)[:, :, 1:3, ::2]
    v = torch.randn(2, 1, 2, 16, dtype=torch.float64).expand(2, 8, 2, 16)
    exactly(flash_attn_func(q, k, v), standard(q, k, v)[0])


def test_values_may_have_a_head_dim_of_their_own():
    q, k = torch.randn(2, 1, 9, 2, 24, dtype=torch.float64).unbind(0)
    v = torch.randn(1, 9, 2, 7, dtype=torch.float64)
    out = flash_attn_func(q, k, v, causal=True)
    assert out.is_contiguous()
    exactly(out, standard(q, k, v, causal=True)[0])


def test_the_lse_has_a_gradient():
    call = {name: tensor.double().requires_grad_() for name, tensor in small().items()}
    _, lse = flash_attn_func(**call, causal=True, return_lse=True)
    _, expected, _ = standard(**call, causal=True)
    leaves = [call["q"], call["k"]]
    for ours, theirs in zip(
        torch.autograd.grad(lse.sin().sum(), leaves),
        torch.autograd.grad(expected.sin().sum(), leaves),
        strict=True,
    ):
        exactly(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "return_lse": True},
        {"window_size": (3, 2), "softcap": 2.0, "dropout_p": 0.2},
        {"dropout_p": 0.2, "return_attn_probs": True},
        {"alibi_slopes": torch.rand(4), "learnable_sink": torch.rand(4), "return_attn_probs": True},
    ],
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_compiles_into_one_graph(options):
    torch._dynamo.reset()
    call = small()
    call["q"].requires_grad_()
    compiled = torch.compile(
        lambda **tensors: flash_attn_func(**tensors, **options), fullgraph=True, backend="aot_eager"
    )
    results = []
    for function in (compiled, lambda **tensors: flash_attn_func(**tensors, **options)):
        torch.manual_seed(5)
        found = function(**call)
        out = found[0] if isinstance(found, tuple) else found
        results.append(
            [*(found if isinstance(found, tuple) else (found,)), torch.autograd.grad(out.sum(), call["q"])[0]]
        )
    if "dropout_p" in options:  # a compiled graph draws its own numbers
        assert results[0][0].shape == results[1][0].shape
    else:
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_second_derivatives():
    q, k, v = (torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradgradcheck(lambda *inputs: flash_attn_func(*inputs, causal=True), (q, k, v))


REFUSED = {
    "q": [
        small(q=None),
        small(q=torch.randn(2, 5, 8)),
        small(q=torch.randn(2, 5, 4, 8).int()),
        small(q=torch.randn(2, 5, 4, 0)),
    ],
    "k": [
        small(k=torch.randn(2, 7, 3, 8), v=torch.randn(2, 7, 3, 8)),
        small(k=torch.randn(2, 7, 2, 9)),
        small(k=torch.randn(1, 7, 2, 8)),
        small(k=torch.randn(2, 7, 2, 8).double()),
        small(k=torch.randn(2, 7, 16)),
    ],
    "v": [
        small(v=torch.randn(2, 6, 2, 8)),
        small(v=torch.randn(2, 7, 1, 8)),
        small(v=torch.randn(2, 7, 2, 8).half()),
        small(v=[1.0]),
        small(v=torch.randn(2, 7, 2, 0)),
    ],
    "dropout_p": [small(dropout_p=-0.1), small(dropout_p=1.5), small(dropout_p="0.1")],
    "softmax_scale": [small(softmax_scale=math.nan), small(softmax_scale="1")],
    "window_size": [
        small(window_size=3),
        small(window_size=(3,)),
        small(window_size=(1, -2)),
        small(window_size=(1.0, 2)),
        small(window_size=(True, 2)),
        small(window_size="ab"),
        small(window_size=torch.ones(2)),
        small(window_size=torch.ones(2, 1, dtype=torch.int64)),
    ],
    "softcap": [small(softcap=-1.0), small(softcap=math.inf)],
    "alibi_slopes": [
        small(alibi_slopes=torch.zeros(3)),
        small(alibi_slopes=torch.zeros(4, dtype=torch.int32)),
    ],
    "learnable_sink": [small(learnable_sink=torch.zeros(2)), small(learnable_sink=0.0)],
}


@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name, calls in REFUSED.items() for call in calls]
)
def test_what_is_refused_is_named(name, call):
    with pytest.raises(InputError, match=rf"^{name} must .*, got ") as refusal:
        flash_attn_func(**call)
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, RuntimeError)


def test_what_the_packed_functions_refuse_is_named():
    qkv, q, kv = torch.randn(2, 5, 3, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 2, 8)
    for name, call in (
        ("qkv", lambda: flash_attn_qkvpacked_func(qkv[:, :, :2])),
        ("qkv", lambda: flash_attn_qkvpacked_func(q)),
        ("qkv", lambda: flash_attn_qkvpacked_func(qkv.long())),
        ("kv", lambda: flash_attn_kvpacked_func(q, qkv)),
        ("kv", lambda: flash_attn_kvpacked_func(q, None)),
        (r"kv\[:, :, 0\]", lambda: flash_attn_kvpacked_func(q, kv[:1])),
        ("q", lambda: flash_attn_kvpacked_func(qkv, kv)),
    ):
        with pytest.raises(InputError, match=rf"^{name} must .*, got "):
            call()


def test_other_devices_are_refused_with_the_reason():
    with pytest.raises(InputError, match="k must be on the device of q"):
        flash_attn_func(**small(k=torch.randn(2, 7, 2, 8, device="meta")))
