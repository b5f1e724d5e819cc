"""The public calls on the kernels: against the reference, and without waiting for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import dispatch, masks, reference, torch_ops
from flashtile.compat import passes
from flashtile.integrations import sdpa_cuda
from flashtile.problem import AttentionProblem
from tests.gpu.running import DEVICE, INTERPRETED
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem

from flashtile.gpu import engine  # isort: skip (tests.gpu.running skips this file where there is no Triton)

aten = torch.ops.aten
# What reads a value back, and so waits for the device.
WAITING = (aten._local_scalar_dense, aten.item, aten.nonzero, aten.equal, aten.is_nonzero, aten.unique_dim)
INSIDE = {
    torch_ops.attention_forward: torch_ops._forward,
    torch_ops.attention_backward: torch_ops._backward,
}


class ReadError(Exception):
    """A value was read back."""


class NoReading(TorchDispatchMode):
    """Refuses what would wait for a device, on CPU tensors, too."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        if operator.overloadpacket in WAITING:
            raise ReadError(str(operator))
        if operator in INSIDE:
            with self:  # what the kernels' host code does is looked at, too
                return INSIDE[operator](*arguments)
        return operator(*arguments, **(options or {}))


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    if INTERPRETED:
        with NoReading():
            yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go to the kernels, too, where Triton interprets them."""
    if INTERPRETED:
        monkeypatch.setitem(dispatch._loaded, "cpu", engine)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


def numbers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def qkv() -> list[Tensor]:
    return [normal(2, heads, 9, 16).requires_grad_() for heads in (4, 2, 2)]


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": masks.causal()},
    "padding": lambda: {"mask": masks.key_lengths(numbers([9, 4])) & masks.causal()},
    "documents": lambda: {"mask": masks.documents(numbers([0, 0, 0, 1, 1, 1, 1, 2, 2]))},
    "dense": lambda: {"mask": normal(2, 1, 9, 9) > 0},
    "bias, softcap": lambda: {"bias": normal(1, 4, 9, 9).requires_grad_(), "softcap": 3.0},
    "slopes, sinks": lambda: {"alibi_slopes": normal(4).abs(), "sinks": normal(4).requires_grad_()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_waits_for_nothing(name: str):
    inputs, options = qkv(), OPTIONS[name]()
    flashtile.attention(*inputs, **options)  # compiles
    with nothing_waits():
        out, lse = flashtile.attention(*inputs, **options, return_lse=True)
        (out.square().sum() + lse.sum()).backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in inputs)


def test_packed_sequences_wait_for_nothing():
    inputs = [normal(20, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    starts = numbers([0, 3, 3, 17])
    flashtile.attention_varlen(*inputs, starts, mask=masks.causal())
    with nothing_waits():
        out = flashtile.attention_varlen(*inputs, starts, mask=masks.causal())
        out.sum().backward()
    assert not out[17:].any()
    assert inputs[0].grad is not None
    assert not inputs[0].grad[17:].any()


@torch.no_grad()
def test_caches_wait_for_nothing():
    query, new, cache, pages = (
        normal(2, 4, 1, 16),
        normal(2, 2, 1, 16),
        normal(2, 2, 64, 16),
        normal(9, 2, 16, 16),
    )
    places = {
        "contiguous": (cache, {}),
        "paged": (pages, {"block_table": numbers([[8, 2, 0, 1], [3, 4, 5, 6]])}),
    }
    for keys, place in places.values():
        values = keys.clone()
        options = {"key": new, "value": new, "cache_lengths": numbers([7, 40]), **place}
        expected = flashtile.attention_kvcache(query, keys, values, **options)
        with nothing_waits():
            found = flashtile.attention_kvcache(query, keys, values, **options)
        assert torch.equal(found, expected)


@pytest.mark.skipif(INTERPRETED, reason="a seed in host memory is read, which waits for nothing")
def test_flash_attns_passes_wait_for_nothing():
    q, dout = normal(2, 9, 4, 16), normal(2, 9, 4, 16)
    given = (0.3, 0.25, True, -1, -1, 0.0, None)
    passes._flash_attn_forward(q, q, q, *given, False)
    gradients = [torch.full_like(q, torch.nan) for _ in range(3)]
    with nothing_waits():
        out, lse, _, state = passes._flash_attn_forward(q, q, q, *given, False)
        passes._flash_attn_backward(dout, q, q, q, out, lse, *gradients, *given, False, rng_state=state)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_reading_would_show(monkeypatch: pytest.MonkeyPatch):
    number, inputs = normal(1)[0], qkv()
    with pytest.raises((ReadError, RuntimeError)), nothing_waits():
        bool(number > 0)

    def reading(problem: AttentionProblem, *rest: Any) -> None:
        problem.query.sum().item()

    monkeypatch.setattr(engine, "forward", reading)
    with pytest.raises((ReadError, RuntimeError)), nothing_waits():
        flashtile.attention(*inputs)


@pytest.mark.parametrize("options", [{}, {"mask": masks.causal(alignment="bottom-right")}])
def test_attention_agrees_with_the_oracle(options: dict[str, Any]):
    problem = random_problem(**options)
    grad_out, _ = random_gradients(problem)
    leaves = [t.to(DEVICE).requires_grad_() for t in (problem.query, problem.key, problem.value)]
    out, lse = flashtile.attention(*leaves, **options, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, grad_out.to(DEVICE))
    names = ("grad_query", "grad_key", "grad_value")
    found = {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}
    assert_close_to_oracle({name: t.cpu() for name, t in found.items()}, problem, grad_out)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_the_providers_operators_agree_with_the_oracle(causal: bool, dropout_p: float):
    problem = random_problem(
        dtype=torch.float16, key_length=33, mask=masks.causal() if causal else None, dropout_p=dropout_p
    )
    given = [tensor.to(DEVICE) for tensor in (problem.query, problem.key, problem.value)]
    out, lse, *rest = sdpa_cuda.flash_forward(*given, dropout_p=dropout_p, is_causal=causal)
    problem.seed = rest[4].reshape(-1)[:1].view(torch.int64).cpu()
    grad_out, _ = random_gradients(problem)
    gradients = sdpa_cuda.flash_backward(
        grad_out.to(DEVICE), *given, out, lse, *rest[:4], dropout_p, causal, *rest[4:6]
    )
    names = ("grad_query", "grad_key", "grad_value")
    found = {"out": out, "lse": lse, **dict(zip(names, gradients, strict=True))}
    assert_close_to_oracle({name: t.cpu() for name, t in found.items()}, problem, grad_out)


def test_dropout_is_that_of_the_reference():
    inputs = qkv()
    seed = torch.tensor([2**62 + 5]).to(DEVICE)
    out = flashtile.attention(*inputs, dropout_p=0.4, seed=2**62 + 5)
    assert torch.equal(out, flashtile.attention(*inputs, dropout_p=0.4, seed=seed))
    exact, _ = reference.attention(
        AttentionProblem(*(t.detach().double() for t in inputs), scale=0.25, dropout_p=0.4, seed=seed)
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
