"""The provider's CUDA operators without a GPU: registered and removed, and called with CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks
from flashtile.gpu import target
from flashtile.integrations import sdpa, sdpa_cuda

OPERATORS = [f"aten::_scaled_dot_product_flash_attention{suffix}" for suffix in ("", "_backward")]
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU that the kernels serve; the CPU's answer in their place."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(target, "triton_reason", lambda: None)
    monkeypatch.setattr(target, "unsupported_reason", lambda *sizes, backward=False: None)
    yield
    flashtile.deactivate()


def registered() -> list[bool]:
    return [torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in OPERATORS]


without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has kernels of its own there")


@without_cuda
def test_registered_while_active():
    assert registered() == [False, False]
    with flashtile.activated():
        assert registered() == [True, True]
    assert registered() == [False, False]


@without_cuda
@pytest.mark.parametrize(
    ("name", "value"), [("is_built", lambda: False), ("triton_reason", lambda: "Triton is not installed")]
)
def test_not_registered_without_cuda_or_triton(name: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cuda if name == "is_built" else target, name, value)
    with flashtile.activated():
        assert sdpa.is_active()
        assert registered() == [False, False]


@without_cuda
def test_another_provider_keeps_its_gpu(monkeypatch: pytest.MonkeyPatch):
    if sdpa._registry is None:
        pytest.skip("this torch has no provider registry")
    monkeypatch.setattr(sdpa._registry, "current_flash_attention_impl", lambda: "other")
    with flashtile.activated():
        assert sdpa.is_active()
        assert registered() == [False, False]


def inputs(queries: int = 9, keys: int = 9, kv_heads: int = 2, dtype: torch.dtype = torch.float16) -> Any:
    """query as models have it, (batch, length, heads, head_dim) in memory; keys and values contiguous."""
    query = torch.randn(2, queries, 4, 8).to(dtype).transpose(1, 2)
    return query, *(torch.randn(2, kv_heads, keys, 8).to(dtype) for _ in range(2))


def standard(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Any:
    """PyTorch's quadratic path in float64, and the LSE."""
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    key, value = (tensor.repeat_interleave(2, 1) for tensor in leaves[1:])
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(
        leaves[0], key, value, None, 0.0, causal, scale=scale
    )
    scores = leaves[0] @ key.mT * (8**-0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return out, scores.logsumexp(3), leaves


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_those_of_standard_attention(dtype: torch.dtype, causal: bool, scale: float | None):
    given = inputs(dtype=dtype, keys=9 if causal else 7)
    found = sdpa_cuda.flash_forward(*given, is_causal=causal, scale=scale)
    out, lse, *rest = found
    exact, exact_lse, leaves = standard(*given, causal, scale)
    grad_out = torch.randn(out.shape).to(dtype)
    gradients = sdpa_cuda.flash_backward(
        grad_out, *given, out, lse, *rest[:4], 0.0, causal, *rest[4:6], scale=scale
    )
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    for found, expected in zip(gradients, torch.autograd.grad(exact, leaves, grad_out.double()), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_results_have_the_form_that_compiled_code_expects(dropout_p: float):
    given = inputs()
    found = sdpa_cuda.flash_forward(*given, dropout_p=dropout_p)
    promised = FLASH(*(tensor.to("meta") for tensor in given), dropout_p=dropout_p)
    for ours, theirs in zip(found, promised, strict=True):
        if isinstance(theirs, Tensor):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        else:
            assert ours == theirs
    out, lse, *rest = found
    gradients = sdpa_cuda.flash_backward(
        torch.ones_like(out), *given, out, lse, *rest[:4], dropout_p, False, *rest[4:6]
    )
    for gradient, tensor in zip(gradients, given, strict=True):
        assert gradient.stride() == torch.empty_like(tensor).stride()


def test_dropout_is_the_same_in_both_passes_and_follows_torchs_generator():
    given = inputs(dtype=torch.float32, kv_heads=4)
    torch.manual_seed(3)
    out, lse, *rest = sdpa_cuda.flash_forward(*given, dropout_p=0.5)
    gradients = sdpa_cuda.flash_backward(
        torch.ones_like(out), *given, out, lse, *rest[:4], 0.5, False, *rest[4:6]
    )
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    seed = rest[4].view(torch.int64)[:1]
    expected = flashtile.attention(*leaves, dropout_p=0.5, seed=seed)
    torch.testing.assert_close(out, expected)
    for found, exact in zip(gradients, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(found, exact)
    torch.manual_seed(3)
    assert torch.equal(sdpa_cuda.flash_forward(*given, dropout_p=0.5)[0], out)
    assert not torch.equal(sdpa_cuda.flash_forward(*given, dropout_p=0.5)[0], out)


def test_nothing_to_do():
    query, key, value = inputs(queries=0)
    out, lse, *rest = sdpa_cuda.flash_forward(query, key, value)
    assert out.shape == (2, 4, 0, 8)
    gradients = sdpa_cuda.flash_backward(out, query, key, value, out, lse, *rest[:4], 0.0, False, *rest[4:6])
    assert not gradients[1].any()
    assert not gradients[2].any()


def test_what_cannot_be_served_says_so(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError, match=r"flashtile\.dropout_mask"):
        sdpa_cuda.flash_forward(*inputs(), return_debug_mask=True)
    monkeypatch.setattr(target, "unsupported_reason", lambda *sizes, backward=False: "sm70 is too old")
    with pytest.raises(RuntimeError, match=r"sm70 is too old; flashtile\.deactivate\(\)"):
        sdpa_cuda.flash_forward(*inputs())


def test_causal_is_the_mask_of_the_front_door():
    given = inputs(dtype=torch.float32, kv_heads=4)
    out = sdpa_cuda.flash_forward(*given, is_causal=True)[0]
    torch.testing.assert_close(out, flashtile.attention(*given, mask=masks.causal()))
