"""Behind torch's scaled_dot_product_attention: same results, same memory order, and a clean way back."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile import cpu, dispatch
from flashtile.integrations import sdpa
from tests.conftest import needs_torch_2_9


class CountingBackend:
    """The CPU engine, counting its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._engine = cpu

    def forward(self, *arguments: Any) -> None:
        self.calls += 1
        self._engine.forward(*arguments)

    def backward(self, *arguments: Any) -> None:
        self.calls += 1
        self._engine.backward(*arguments)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CountingBackend:
    counting = CountingBackend()
    monkeypatch.setitem(dispatch._loaded, "cpu", counting)
    return counting


@pytest.fixture(autouse=True)
def inactive_after() -> Iterator[None]:
    yield
    flashtile.deactivate()
    assert not sdpa.is_active()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def qkv(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"query": (2, 4, 9, 8), "key": (2, 4, 7, 8), "value": (2, 4, 7, 8)}
    return {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}


def by_length(*shape: int) -> Tensor:
    """(batch, heads, length, head_dim) stored as (batch, length, heads, head_dim)."""
    batch, heads, length, head_dim = shape
    return normal(batch, length, heads, head_dim).transpose(1, 2)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal square": {"key": normal(2, 4, 9, 8), "value": normal(2, 4, 9, 8), "is_causal": True},
    "scale": {"scale": 0.7},
    "bool mask": {"attn_mask": torch.rand(9, 7) < 0.7},
    "rows that see nothing": {"attn_mask": torch.rand(2, 1, 9, 7) < 0.1},
    "bool mask of heads": {"attn_mask": torch.rand(4, 1, 7) < 0.7},
    "float mask": {"attn_mask": normal(2, 1, 9, 7)},
    "float mask with holes": {"attn_mask": normal(9, 7).masked_fill(torch.rand(9, 7) < 0.3, -torch.inf)},
    "mask and causal": {"attn_mask": normal(9, 7), "is_causal": True},
    "grouped": {"key": normal(2, 2, 7, 8), "value": normal(2, 2, 7, 8), "enable_gqa": True},
    "transposed": {
        "query": by_length(2, 4, 9, 8),
        "key": by_length(2, 4, 7, 8),
        "value": by_length(2, 4, 7, 8),
    },
}
# What torch computes with its quadratic path.
QUADRATIC_CALLS = {
    "value head_dim": {"value": normal(2, 4, 7, 5)},
    "grouped value head_dim": {"key": normal(2, 2, 7, 8), "value": normal(2, 2, 7, 5), "enable_gqa": True},
    "mask that learns": {"attn_mask": normal(1, 4, 9, 7).requires_grad_()},
    "three dimensions": {
        name: normal(4, length, 8) for name, length in (("query", 9), ("key", 7), ("value", 7))
    },
    "three dimensions with a mask": {
        "query": normal(4, 9, 8),
        "key": normal(4, 7, 8),
        "value": normal(4, 7, 8),
        "attn_mask": torch.rand(4, 9, 7) < 0.8,
    },
    "transposed value head_dim": {
        "query": by_length(2, 4, 9, 8),
        "key": by_length(2, 4, 7, 8),
        "value": by_length(2, 4, 7, 5),
    },
    "head_dim of stride": {"query": normal(2, 4, 8, 9).mT},
}
# What is left to torch's own code.
OTHER_CALLS = {
    "two dimensions": {"query": normal(9, 8), "key": normal(7, 8), "value": normal(7, 8)},
    "five dimensions": {name: normal(1, 2, 4, 9, 8) for name in ("query", "key", "value")},
    "keys that broadcast": {"key": normal(1, 4, 7, 8), "value": normal(1, 4, 7, 8)},
}


def results(options: dict[str, Any], requires_grad: bool = True) -> list[Tensor]:
    """The output of torch's function and the gradients of whatever needs one."""
    given = {**qkv(), **options}
    for name in ("query", "key", "value"):
        given[name] = given[name].detach().requires_grad_(requires_grad)
    out = F.scaled_dot_product_attention(**given)
    leaves = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    grad_out = torch.ones_like(out).cumsum(-1).to(out.dtype)
    return [out.detach(), *(torch.autograd.grad(out, leaves, grad_out) if leaves else ())]


def twice(options: dict[str, Any], requires_grad: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """The results of flashtile and of torch for the same random inputs."""
    found = []
    for switch in (flashtile.activate, flashtile.deactivate):
        switch()
        torch.manual_seed(1)
        found.append(results(options, requires_grad))
    return found[0], found[1]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name", [*CALLS, *QUADRATIC_CALLS])
def test_same_results_and_memory_order(name, requires_grad, engine):
    ours, torchs = twice({**CALLS, **QUADRATIC_CALLS}[name], requires_grad)
    assert engine.calls == (2 if len(ours) > 1 else 1)
    assert ours[0].stride() == torchs[0].stride()
    for found, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_what_is_not_served_is_torchs_bit_for_bit(name, engine):
    ours, torchs = twice(OTHER_CALLS[name])
    assert engine.calls == 0
    assert all(torch.equal(found, expected) for found, expected in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32])
def test_every_dtype(dtype, mask_dtype, engine):
    mask = None if mask_dtype is None else (torch.rand(9, 7) < 0.8).to(mask_dtype)
    if dtype == torch.float64 and mask_dtype == torch.float32:
        mask = mask.double()
    ours, torchs = twice({**qkv(dtype), "attn_mask": mask})
    assert engine.calls == 2
    tolerance = 8 * torch.finfo(dtype).eps
    for found, expected in zip(ours, torchs, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_chosen_backend_is_respected(backend, engine):
    with sdpa_kernel(backend):
        ours, torchs = twice({})
        assert engine.calls == (0 if backend == SDPBackend.MATH else 2)
        if backend == SDPBackend.MATH:
            assert all(torch.equal(found, expected) for found, expected in zip(ours, torchs, strict=True))


@pytest.mark.filterwarnings("ignore:.*(Flash attention|[Ff]used).*:UserWarning")
def test_flash_alone_still_refuses_dropout():
    flashtile.activate()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(**qkv(), dropout_p=0.5)


def test_dropout_follows_torchs_generator(engine):
    inputs = qkv()
    with flashtile.activated():
        torch.manual_seed(3)
        first = F.scaled_dot_product_attention(**inputs, dropout_p=0.5)
        second = F.scaled_dot_product_attention(**inputs, dropout_p=0.5)
        torch.manual_seed(3)
        again = F.scaled_dot_product_attention(**inputs, dropout_p=0.5)
    assert engine.calls == 3
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_errors_are_torchs():
    inputs = {**qkv(), "key": normal(2, 3, 7, 8)}
    messages = []
    for switch in (flashtile.activate, flashtile.deactivate):
        switch()
        with pytest.raises(RuntimeError) as error:
            F.scaled_dot_product_attention(**inputs)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@needs_torch_2_9("torch's own operator reads beside the keys of grouped heads")
def test_the_flash_operator_keeps_its_promises():
    """Output with the strides of query; LSE in the compute dtype stored as (batch, length, heads)."""
    inputs = [by_length(2, 4, 9, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8)]
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    expected_out, expected_lse = operator(*inputs, is_causal=True)
    with flashtile.activated():
        out, lse = operator(*inputs, is_causal=True)
        with pytest.raises(RuntimeError, match="dropout is not supported here"):
            operator(*inputs, dropout_p=0.5)
        with pytest.raises(RuntimeError, match="attn_mask must be"):
            operator(*inputs, attn_mask=torch.zeros(7, 9))
    for found, expected in ((out, expected_out), (lse, expected_lse)):
        assert found.stride() == expected.stride()
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_nan_stays_in_its_row():
    inputs = qkv()
    inputs["query"][0, 1, 3, 2] = torch.nan
    with flashtile.activated():
        out = F.scaled_dot_product_attention(**inputs)
    assert out[0, 1, 3].isnan().all()
    assert int(out.isnan().sum()) == 8


def test_autocast_and_modules():
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    tokens = normal(2, 5, 16)
    expected, _ = layer(tokens, tokens, tokens, need_weights=False)
    with flashtile.activated():
        found, _ = layer(tokens, tokens, tokens, need_weights=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(**qkv()).dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_compiled_code_follows_the_switch(engine):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=True) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    inputs = [tensor.requires_grad_() for tensor in qkv().values()]
    before = compiled(*inputs)
    assert engine.calls == 0
    with flashtile.activated():
        during = compiled(*inputs)
        during.sum().backward()
    assert engine.calls == 2
    torch.testing.assert_close(during, before)
    assert torch.equal(compiled(*inputs), before)
    assert engine.calls == 2


def test_torch_func_goes_through(engine):
    inputs = list(qkv().values())

    def loss(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors).sin().sum()

    expected = torch.func.grad(loss)(*inputs)
    with flashtile.activated():
        torch.testing.assert_close(torch.func.grad(loss)(*inputs), expected)
    assert engine.calls == 2


def test_blocks_nest_and_activation_is_idempotent():
    assert not sdpa.is_active()
    with flashtile.activated():
        with flashtile.activated():
            assert sdpa.is_active()
        assert sdpa.is_active()
        flashtile.deactivate()
        assert sdpa.is_active()  # until the block ends
    assert not sdpa.is_active()
    flashtile.deactivate()
    flashtile.activate()
    flashtile.activate()
    with flashtile.activated():
        pass
    assert sdpa.is_active()
    flashtile.deactivate()
    assert not sdpa.is_active()
    with flashtile.activated():
        flashtile.activate()
    assert sdpa.is_active()


def test_torchs_registry_knows_the_provider():
    registry = pytest.importorskip("torch.nn.attention")
    if not hasattr(registry, "activate_flash_attention_impl"):
        pytest.skip("this torch has no provider registry")
    assert "flashtile" in registry.list_flash_attention_impls()
    registry.activate_flash_attention_impl("flashtile")
    assert sdpa.is_active()
    with flashtile.activated():
        assert registry.current_flash_attention_impl() == "flashtile"
    registry.restore_flash_attention_impl()
    assert not sdpa.is_active()
    flashtile.activate()
    assert registry.current_flash_attention_impl() == "flashtile"
    registry.restore_flash_attention_impl()
    assert not sdpa.is_active()


def test_another_provider_stays_active():
    registry = torch.nn.attention
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip("this torch has no provider registry")

    class Other:
        def remove(self) -> None:
            pass

    registry.register_flash_attention_impl("other", register_fn=Other)
    registry.activate_flash_attention_impl("other")
    try:
        with flashtile.activated():
            assert sdpa.is_active()
            assert registry.current_flash_attention_impl() == "other"
        assert not sdpa.is_active()
        assert registry.current_flash_attention_impl() == "other"
    finally:
        registry.restore_flash_attention_impl()


def test_without_a_registry(monkeypatch, engine):
    monkeypatch.setattr(sdpa, "_registry", None)
    inputs = qkv()
    expected = F.scaled_dot_product_attention(**inputs)
    with flashtile.activated():
        torch.testing.assert_close(F.scaled_dot_product_attention(**inputs), expected)
    assert engine.calls == 1
    assert not sdpa.is_active()


@pytest.mark.parametrize("name", ["value head_dim", "three dimensions"])
def test_second_derivatives_where_torch_has_them(name):
    found = []
    inputs = {**qkv(), **QUADRATIC_CALLS[name]}
    for switch in (flashtile.activate, flashtile.deactivate):
        switch()
        query = inputs["query"].detach().requires_grad_()
        out = F.scaled_dot_product_attention(**{**inputs, "query": query})
        (gradient,) = torch.autograd.grad(out.sin().sum(), query, create_graph=True)
        found.append(torch.autograd.grad((gradient**2).sum(), query)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_threads_share_the_switch():
    inputs = qkv()
    expected = F.scaled_dot_product_attention(**inputs)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with flashtile.activated():
                    torch.testing.assert_close(F.scaled_dot_product_attention(**inputs), expected)
                    assert sdpa.is_active()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not sdpa.is_active()
    assert torch.equal(F.scaled_dot_product_attention(**inputs), expected)


def test_activation_is_silent():
    code = "import warnings; warnings.simplefilter('error'); import flashtile; flashtile.activate()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_deactivating_restores_torchs_kernel_bit_for_bit(dtype):
    options = {**qkv(dtype), "is_causal": True}
    before = results(options)
    with flashtile.activated():
        results(options)
    assert all(torch.equal(found, expected) for found, expected in zip(results(options), before, strict=True))
