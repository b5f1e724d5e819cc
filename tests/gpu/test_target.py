"""Which GPUs and head dims are served, and how their float32 products are made."""

from __future__ import annotations

import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from flashtile.gpu import target
from flashtile.gpu.target import Target, architecture, product_precision, target_of, unsupported_reason

CUDA = torch.device("cuda", 0)


def device(name: str, monkeypatch: pytest.MonkeyPatch, shared_memory: int = 2**17) -> torch.device:
    """A device that claims to be of this architecture, with a Triton that suffices."""
    monkeypatch.setattr(target, "INTERPRETED", False)
    monkeypatch.setattr(target, "triton_reason", lambda: None)
    monkeypatch.setattr(target, "_target_at", lambda index: Target(name, shared_memory, 32, 8))
    return CUDA


@pytest.mark.parametrize("name", ["sm75", "sm80", "sm90", "sm120", "gfx90a", "gfx942", "gfx1100", "gfx1201"])
def test_served(name, monkeypatch):
    there = device(name, monkeypatch)
    assert target_of(there).name == name
    assert unsupported_reason(there, 128, 64) is None
    assert unsupported_reason(there, 256, 256, backward=True) is None


@pytest.mark.parametrize(
    ("name", "said"), [("sm70", "sm70 is older than sm75"), ("sm61", "older"), ("gfx906", "not one of")]
)
def test_architectures_that_are_not_served(name, said, monkeypatch):
    assert said in unsupported_reason(device(name, monkeypatch), 64, 64)


def test_widest_head_dims(monkeypatch):
    there = device("sm90", monkeypatch)
    assert unsupported_reason(there, 512, 512) is None
    assert "513 is beyond 512" in unsupported_reason(there, 64, 513)
    assert "head_dim 257 is beyond 256" in unsupported_reason(there, 257, 64, backward=True)
    assert "forward pass holds on sm75" in unsupported_reason(device("sm75", monkeypatch, 2**16), 257, 64)


@pytest.mark.parametrize(("version", "served"), [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True)])
def test_versions_of_triton(version, served, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(target, "_finds_a_compiler", lambda: True)
    reason = target.triton_reason.__wrapped__()
    assert reason is None if served else "is older than 3.6" in reason


def test_triton_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "not installed" in target.triton_reason.__wrapped__()


@pytest.mark.skipif(os.name == "nt", reason="on Windows Triton brings a compiler along")
def test_triton_without_a_compiler(monkeypatch):
    """It builds what launches its kernels, and would raise at the first of them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(target, "INTERPRETED", False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "cc")
    assert target.triton_reason.__wrapped__() is None
    with monkeypatch.context() as patch:
        patch.setattr(target.sysconfig, "get_path", lambda name: "nowhere")
        assert "no Python.h" in target.triton_reason.__wrapped__()
    monkeypatch.delenv("CC")
    assert "finds no compiler" in target.triton_reason.__wrapped__()
    monkeypatch.setattr(target, "INTERPRETED", True)
    assert target.triton_reason.__wrapped__() is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"shared_memory_per_block_optin": 7, "shared_memory_per_block": 5}, 7),
        ({"shared_memory_per_block": 5}, 5),
        ({}, 227 * 1024),  # torch 2.6 does not say
    ],
)
def test_memory_of_a_block(fields, expected, monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, **fields)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert target._target_at.__wrapped__(0) == Target("sm90", expected, 32, 132)


def test_architecture_of_a_device(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert architecture(SimpleNamespace(major=9, minor=0)) == "sm90"
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert architecture(SimpleNamespace(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")) == "gfx942"


@pytest.fixture
def matmul_precision():
    """Restores torch's setting, by the interface that this version has."""
    matmul = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    before = getattr(matmul, name)
    yield lambda tf32: setattr(
        matmul, name, ("tf32" if tf32 else "ieee") if name == "fp32_precision" else tf32
    )
    setattr(matmul, name, before)


def test_tf32_only_where_torch_allows_it(matmul_precision):
    hopper, turing = (Target(name, 2**16, 32, 8) for name in ("sm90", "sm75"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product_precision(hopper, torch.float32) == "ieee"
        matmul_precision(True)
        assert product_precision(hopper, torch.float32) == "tf32"
        assert product_precision(hopper, torch.bfloat16) == "ieee"
        assert product_precision(turing, torch.float32) == "ieee"
        matmul_precision(False)
        assert product_precision(hopper, torch.float32) == "ieee"
