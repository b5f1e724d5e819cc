"""Very low finite numbers are no masks, and the caller's default device is not the kernels'."""

from __future__ import annotations

import pytest
import torch

import flashtile

LOW = {"-1e4": -1e4, "-1e10": -1e10, "-1e30": -1e30, "lowest": None}


@pytest.mark.parametrize("query_length", [1, 70], ids=["decode", "tiles"])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_row_whose_keys_all_have_a_low_bias_attends_to_all_of_them(dtype, low, query_length):
    """The LSE of such a row cannot tell 1500 keys from one; its output and gradients must."""
    keys = 1500  # more than one split of decode and of the backward pass
    number = torch.finfo(dtype).min if LOW[low] is None else LOW[low]
    query = torch.zeros(1, 2, query_length, 16, dtype=dtype)
    key = torch.randn(1, 2, keys, 16, dtype=dtype)
    value = torch.randn(1, 2, keys, 16, dtype=dtype, requires_grad=True)
    bias = torch.full((1, 1, query_length, keys), number, dtype=dtype)
    out, lse = flashtile.attention(query, key, value, bias=bias, return_lse=True)
    (grad_value,) = torch.autograd.grad(out.sum(), value)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    mean = value.detach().double().mean(2, keepdim=True).expand(1, 2, query_length, 16)
    torch.testing.assert_close(out.detach().double(), mean, rtol=tolerance, atol=tolerance)
    share = torch.full(value.shape, query_length / keys, dtype=torch.float64)
    # Up to an LSE of 2**13 (float64: 2**20) its rounding is in P: half a step.
    rtol = max(tolerance, {"-1e4": 5e-4 if dtype == torch.float32 else 1e-10}.get(low, 0.0))
    torch.testing.assert_close(grad_value.double(), share, rtol=rtol, atol=0)
    assert bool(lse.isfinite().all())


def test_a_low_bias_hides_beside_an_ordinary_one():
    value = torch.randn(1, 1, 40, 8)
    bias = torch.full((1, 1, 40, 40), torch.finfo(torch.float32).min)
    bias[..., :3] = 0.0
    out = flashtile.attention(torch.zeros(1, 1, 40, 8), torch.randn(1, 1, 40, 8), value, bias=bias)
    torch.testing.assert_close(out, value[:, :, :3].mean(2, keepdim=True).expand_as(out))


def test_the_default_device_does_not_reach_the_kernels():
    tensors = [torch.randn(1, 2, 1100, 16, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(flashtile.attention(*tensors).sum(), tensors)
    few = flashtile.attention(tensors[0][:, :, :1], *tensors[1:])
    with torch.device("meta"):
        again = torch.autograd.grad(flashtile.attention(*tensors).sum(), tensors)
        few_again = flashtile.attention(tensors[0][:, :, :1], *tensors[1:])
    assert all(torch.equal(x, y) for x, y in zip(expected, again, strict=True))
    assert torch.equal(few, few_again)
