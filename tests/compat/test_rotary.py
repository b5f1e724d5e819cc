"""flash_attn.layers.rotary: against multiplication of complex numbers, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtile.compat import InputError
from flashtile.compat.layers.rotary import (
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from tests.compat.test_kvcache import rotate, tables


def angles(rotary_dim: int = 6, positions: int = 12) -> tuple[Tensor, Tensor]:
    cos, sin = tables(rotary_dim, positions).values()
    return cos, sin


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([4, 0]), torch.tensor([1, 5], dtype=torch.int32)])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_a_batch(interleaved, offsets, rotary_dim):
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64)
    before = x.clone()
    cos, sin = angles(rotary_dim)
    found = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    first = torch.as_tensor(offsets).expand(2).tolist()
    for b in range(2):
        expected = rotate(x[b], first[b] + torch.arange(7), cos, sin, interleaved)
        torch.testing.assert_close(found[b], expected)
    assert found.is_contiguous()
    assert torch.equal(x, before)
    assert apply_rotary_emb(x, cos, sin, interleaved, inplace=True, seqlen_offsets=offsets) is x
    assert torch.equal(x, found)


@pytest.mark.parametrize("offsets", [0, torch.tensor([4, 1, 0, 2])])
def test_packed_sequences(offsets):
    x = torch.randn(11, 3, 8, dtype=torch.float64)
    cos, sin = angles()
    cu_seqlens = torch.tensor([0, 4, 4, 5, 11], dtype=torch.int32)
    found = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=6)
    for b, first in enumerate(torch.as_tensor(offsets).expand(4).tolist()):
        rows = x[cu_seqlens[b] : cu_seqlens[b + 1]]
        expected = rotate(rows, first + torch.arange(len(rows)), cos, sin, False)
        torch.testing.assert_close(found[cu_seqlens[b] : cu_seqlens[b + 1]], expected)


def test_other_names():
    x, (cos, sin) = torch.randn(2, 7, 3, 8), angles()
    assert torch.equal(apply_rotary_emb_func(x, cos, sin, True), apply_rotary_emb_torch(x, cos, sin, True))


def test_computed_in_float32(dtype):
    x, (cos, sin) = torch.randn(2, 7, 3, 8).to(dtype), angles()
    found = apply_rotary_emb(x, cos, sin)
    assert found.dtype == dtype
    exact = apply_rotary_emb(x.double(), cos, sin)
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_packed_tensors_in_place():
    cos, sin = angles()
    other = angles()
    qkv = torch.randn(2, 7, 3, 4, 8, dtype=torch.float64)
    for keys in ((None, None), other):
        q, k, v = qkv.clone().unbind(2)
        rotated = qkv.clone()
        assert apply_rotary_emb_qkv_(rotated, cos, sin, *keys, seqlen_offsets=2) is rotated
        assert torch.equal(rotated[:, :, 0], apply_rotary_emb(q, cos, sin, seqlen_offsets=2))
        tables = (cos, sin) if keys[0] is None else keys
        assert torch.equal(rotated[:, :, 1], apply_rotary_emb(k, *tables, seqlen_offsets=2))
        assert torch.equal(rotated[:, :, 2], v)
    kv = qkv[:, :, 1:].clone()
    assert torch.equal(
        apply_rotary_emb_kv_(kv, cos, sin, True)[:, :, 0], apply_rotary_emb(qkv[:, :, 1], cos, sin, True)
    )
    assert torch.equal(kv[:, :, 1], qkv[:, :, 2])
    grouped = torch.randn(
        2, 7, 8, 8, dtype=torch.float64
    )  # four heads of queries, two of keys, two of values
    rotated = apply_rotary_emb_qkv_(grouped.clone(), cos, sin, num_heads_q=4)
    assert torch.equal(rotated[:, :, :6], apply_rotary_emb(grouped[:, :, :6], cos, sin))
    assert torch.equal(rotated[:, :, 6:], grouped[:, :, 6:])


def test_gradients():
    cos, sin = angles(6, 4)
    x = torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb(x, cos, sin), x)
    qkv = torch.randn(1, 4, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda qkv: apply_rotary_emb_qkv_(1 * qkv, cos, sin, interleaved=True), qkv
    )
    kv = qkv.detach()[:, :, 1:].requires_grad_()
    assert torch.autograd.gradcheck(lambda kv: apply_rotary_emb_kv_(1 * kv, cos, sin), kv)


def test_what_is_refused_is_named():
    x, (cos, sin) = torch.randn(2, 7, 3, 8), angles()
    for name, call in (
        ("x", lambda: apply_rotary_emb(x[0], cos, sin)),
        ("x", lambda: apply_rotary_emb(x, cos, sin, cu_seqlens=torch.tensor([0, 7]))),
        ("x", lambda: apply_rotary_emb(None, cos, sin)),
        ("cos", lambda: apply_rotary_emb(x, cos[:6], sin[:6])),
        ("cos", lambda: apply_rotary_emb(x, cos, sin, seqlen_offsets=-1)),
        ("cos", lambda: apply_rotary_emb(x[..., :5], cos, sin)),
        ("cos", lambda: apply_rotary_emb(x, cos[0], sin)),
        ("sin", lambda: apply_rotary_emb(x, cos, sin[:, :2])),
        ("sin", lambda: apply_rotary_emb(x, cos, sin.int())),
        ("qkv", lambda: apply_rotary_emb_qkv_(x, cos, sin)),
        ("qkv", lambda: apply_rotary_emb_qkv_(x, cos, sin, num_heads_q=2)),
        ("kv", lambda: apply_rotary_emb_kv_(x, cos, sin)),
        ("seqlen_offsets", lambda: apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([1, 2, 3]))),
        ("seqlen_offsets", lambda: apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([0.5, 1.0]))),
    ):
        with pytest.raises(InputError, match=rf"^{name} must .*, got "):
            call()
