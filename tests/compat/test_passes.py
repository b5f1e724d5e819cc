"""The forward and backward pass by themselves: what autograd gives, and the parts of a ring of keys."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.compat import InputError, passes
from flashtile.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashtile.compat.passes import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from flashtile.problem import compute_dtype
from tests.compat.standard import standard
from tests.compat.test_varlen import starts

OPTIONS = {
    "plain": {},
    "causal window": {"causal": True, "window_size": (6, 2)},
    "softcap and alibi": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.2])},
    "alibi of the batch": {"alibi_slopes": torch.tensor([[0.5, 0.1, 0.3, 0.2], [0.1, 0.2, 0.0, 0.4]])},
    "dropout": {"dropout_p": 0.3, "softmax_scale": 0.4},
}
CU_Q, CU_K = starts([9, 4]), starts([5, 9])


def spelled_out(q: Tensor, **options: Any) -> dict[str, Any]:
    """The options that both passes share, as they take them."""
    left, right = options.get("window_size", (-1, -1))
    return {
        "dropout_p": options.get("dropout_p", 0.0),
        "softmax_scale": options.get("softmax_scale", q.shape[-1] ** -0.5),
        "causal": options.get("causal", False),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": options.get("softcap", 0.0),
        "alibi_slopes": options.get("alibi_slopes"),
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_both_passes_are_those_of_autograd(name, packed, dtype):
    rows = ((13,), (14,)) if packed else ((2, 9), (2, 12))
    q, k, v = (
        torch.randn(*rows[i], heads, 16).to(dtype).requires_grad_() for i, heads in ((0, 4), (1, 2), (1, 2))
    )
    lengths = (CU_Q, CU_K, 9, 9) if packed else ()
    function, forward, backward = (
        (flash_attn_varlen_func, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
        if packed
        else (flash_attn_func, _flash_attn_forward, _flash_attn_backward)
    )
    torch.manual_seed(3)
    expected = function(q, k, v, *lengths, **OPTIONS[name], return_attn_probs=True)
    dout = torch.randn(q.shape).to(dtype)
    gradients = torch.autograd.grad(expected[0], (q, k, v), dout)

    given = spelled_out(q, **OPTIONS[name])
    torch.manual_seed(3)
    *found, state = forward(q, k, v, *lengths, **given, return_softmax=True)
    assert not any(tensor.requires_grad for tensor in found)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    out, lse, _ = found
    buffers = [torch.full_like(tensor, math.nan) for tensor in (q, k, v)]
    soft = backward(
        dout, q, k, v, out, lse, *buffers, *lengths, **given, deterministic=False, rng_state=state
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(buffers, gradients, strict=True))
    assert (soft.shape, soft.dtype) == (lse.shape, compute_dtype(dtype))
    expected_soft = (dout.double() * out.double()).sum(-1).movedim(-1, -2)
    torch.testing.assert_close(soft.double(), expected_soft, rtol=1e-5, atol=1e-5)


def test_no_probabilities_unless_asked_for():
    q = torch.randn(1, 3, 2, 8)
    assert _flash_attn_forward(q, q, q, **spelled_out(q), return_softmax=False)[2].shape == (0,)
    packed = _flash_attn_varlen_forward(q[0], q[0], q[0], starts([3]), starts([3]), 3, 3, 0.0, None, True)
    assert packed[2].shape == (0,)


def test_parts_of_the_keys_make_up_the_whole():
    """Ring attention: outputs merge by their LSE, gradients add up with the merged output and LSE."""
    q, k, v = (torch.randn(2, 12, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    expected, expected_lse, _ = standard(q, k, v)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    given = spelled_out(q)
    parts = [(k[:, :5], v[:, :5]), (k[:, 5:], v[:, 5:])]
    results = [_flash_attn_forward(q, *part, **given, return_softmax=False) for part in parts]
    lse = torch.logaddexp(results[0][1], results[1][1])
    out = sum(part[0] * (part[1] - lse).exp().transpose(1, 2)[..., None] for part in results)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    found = []
    for part in parts:
        found.append([torch.empty_like(tensor) for tensor in (q, *part)])
        _flash_attn_backward(dout, q, *part, out, lse, *found[-1], **given, deterministic=True)
    torch.testing.assert_close(found[0][0] + found[1][0], gradients[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([found[0][i], found[1][i]], dim=1), gradients[i])


def test_rows_without_a_sequence_have_gradient_zero():
    q = torch.randn(8, 2, 8)
    cu, given = starts([3, 2]), spelled_out(q, causal=True)
    out, lse, *_ = _flash_attn_varlen_forward(q, q, q, cu, cu, 3, 3, **given)
    buffers = [torch.full_like(q, math.nan) for _ in range(3)]
    _flash_attn_varlen_backward(
        torch.randn(8, 2, 8), q, q, q, out, lse, *buffers, cu, cu, 3, 3, **given, deterministic=False
    )
    assert all(buffer[5:].eq(0).all() and buffer[:5].isfinite().all() for buffer in buffers)


def test_gradients_nobody_wants():
    q = torch.randn(1, 3, 2, 8)
    given = spelled_out(q)
    out, lse, *_ = _flash_attn_forward(q, q, q, **given, return_softmax=False)
    dv = torch.empty_like(q)
    _flash_attn_backward(q, q, q, q, out, lse, None, None, dv, **given, deterministic=False)
    assert dv.isfinite().all()


def test_signatures():
    shared = list(spelled_out(torch.zeros(1)))
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    results = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]
    more = ["return_softmax", "block_table", "leftpad_k", "seqused_k", "zero_tensors"]
    for function, expected in (
        (_flash_attn_forward, ["q", "k", "v", *shared, "return_softmax"]),
        (_flash_attn_backward, [*results, *shared, "deterministic", "rng_state"]),
        (_flash_attn_varlen_forward, ["q", "k", "v", *lengths, *shared, *more]),
        (
            _flash_attn_varlen_backward,
            [*results, *lengths, *shared, "deterministic", "rng_state", "zero_tensors"],
        ),
    ):
        assert list(inspect.signature(function).parameters) == expected
        assert getattr(passes, f"_wrapped{function.__name__}") is function


def test_what_is_refused_is_named():
    q = torch.randn(2, 3, 2, 8)
    given = spelled_out(q)
    out, lse, *_ = _flash_attn_forward(q, q, q, **given, return_softmax=False)
    results = {
        "dout": q,
        "q": q,
        "k": q,
        "v": q,
        "out": out,
        "softmax_lse": lse,
        "dq": None,
        "dk": None,
        "dv": None,
    }
    call = {**results, **given, "deterministic": False}
    for name, change in (
        ("dout", q[:1]),
        ("dout", q.double()),
        ("out", q[..., :4]),
        ("softmax_lse", lse.transpose(1, 2)),
        ("k", q[:1]),
        ("alibi_slopes", torch.ones(3)),
        ("dropout_p", 1.5),
    ):
        with pytest.raises(InputError, match=rf"^{name} must .*, got "):
            _flash_attn_backward(**{**call, name: change})
    with pytest.raises(InputError, match="rng_state must"):
        _flash_attn_backward(**{**call, "dropout_p": 0.5})
    for name in ("leftpad_k", "seqused_k"):
        with pytest.raises(InputError, match=f"{name} must be None"):
            _flash_attn_varlen_forward(q[0], q[0], q[0], CU_Q, CU_Q, 3, 3, 0.0, None, True, **{name: CU_Q})


def test_diffusers_finds_what_it_asks_for():
    """Its attention backend "flash" then runs on a CPU as it is; in a process of its own."""
    pytest.importorskip("diffusers")
    code = """
from flashtile.compat import install
install()
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
q, k, v = torch.randn(3, 2, 20, 4, 16).unbind(0)
ours, theirs = (
    dispatch_attention_fn(q, k, v, is_causal=True, backend=AttentionBackendName(name))
    for name in ("flash", "native")
)
torch.testing.assert_close(ours, theirs)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed to import" not in done.stderr
