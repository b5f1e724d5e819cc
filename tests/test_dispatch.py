"""Which backend serves a call, and the reasons given when none does."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import dispatch
from flashtile.gpu import fallback, target
from flashtile.problem import AttentionProblem, Part


def test_cpu_tensors_go_to_the_cpu_engine(dtype):
    query = torch.zeros(1, 1, 2, 4, dtype=dtype)
    assert dispatch.backend(AttentionProblem(query, query, query, 0.5)).__name__ == "flashtile.cpu"


def test_other_devices_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(dispatch, "_MODULES", {"tpu": "flashtile.tpu"})
    monkeypatch.setattr(dispatch, "_loaded", {})
    query = torch.zeros(1, 1, 2, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"no backend serves cpu tensors \(.*kernels for: tpu\)"):
        flashtile.attention(query, query, query)
    with pytest.raises(NotImplementedError, match="no backend serves cpu tensors"), torch.no_grad():
        flashtile.attention(query, query, query)
    with pytest.raises(NotImplementedError, match="no backend serves cpu tensors"):
        dispatch.backend(AttentionProblem(query, query, query, 0.5))


def test_meta_tensors_get_shapes_without_a_backend():
    query = torch.zeros(2, 4, 9, 8, device="meta")
    out, lse = flashtile.attention(query, query, query[..., :5], return_lse=True)
    assert out.shape == (2, 4, 9, 5)
    assert lse.shape == (2, 4, 9)
    assert out.device.type == lse.device.type == "meta"


def test_explain_says_which_backend_and_why():
    text = dispatch.explain(dtype=torch.bfloat16, heads=32, kv_heads=8, query_length=1, key_length=8192)
    assert "32 heads, 1 queries, head_dim 64" in text
    assert "8 heads, 8192 keys" in text
    assert "backend: flashtile.cpu" in text
    assert "accumulated in float32" in text
    assert "4 query heads share each key head" in text


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"device": "mps"}, r"no backend serves mps tensors (this version has kernels for: cpu, cuda)"),
        ({"device": "xpu"}, "no backend serves xpu tensors"),
        ({"dtype": torch.int8}, "int8 is not one of float32, bfloat16, float16, float64"),
        ({"heads": 8, "kv_heads": 3}, "8 query heads cannot be shared evenly by 3 key heads"),
        ({"value_head_dim": 0}, "head_dim must be at least 1, not 0"),
    ],
)
def test_explain_says_why_nothing_serves_a_call(call, reason):
    text = dispatch.explain(**call)
    assert "backend: none" in text
    assert reason in text


def test_importing_flashtile_loads_no_compiler():
    compilers = {"numba", "triton", "flashtile.cpu", "flashtile.gpu.engine"}
    code = f"import sys, torch; before = set(sys.modules); import flashtile; sys.exit(bool({compilers} & "
    code += "(set(sys.modules) - before)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def gpu_problem(dtype: torch.dtype = torch.float16, head_dim: int = 64, **options: Any) -> AttentionProblem:
    """A call on a GPU that need not be there: its tensors have no values."""
    with FakeTensorMode():
        query = torch.empty(1, 2, 8, head_dim, dtype=dtype, device="cuda")
    return AttentionProblem(query, query, query, 0.5, **options)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The GPU kernels, as if they were loaded; with a `reason`, as if they could not serve the GPU."""
    found = SimpleNamespace(reason=None)
    monkeypatch.setitem(dispatch._loaded, "cuda", found)
    monkeypatch.setattr(target, "unsupported_reason", lambda *sizes, backward=False: found.reason)
    return found


def test_gpu_tensors_go_to_the_kernels(kernels):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert dispatch.backend(gpu_problem(dtype)) is kernels
        assert dispatch.backend(gpu_problem(dtype, softcap=3.0), backward=True) is kernels


def test_without_kernels_torchs_attention_serves_what_means_the_same(kernels):
    kernels.reason = "Triton is not installed"
    assert dispatch.backend(gpu_problem(upper=0)) is fallback
    assert dispatch.backend(gpu_problem(upper=0), backward=True) is fallback
    with pytest.raises(NotImplementedError, match=r"\(Triton is not installed\), and .* it has no softcap"):
        dispatch.backend(gpu_problem(softcap=3.0))


def test_a_part_of_a_larger_problem_is_for_the_kernels_alone(kernels):
    problem = gpu_problem(part=Part(heads=2))
    assert dispatch.backend(problem) is kernels
    kernels.reason = "Triton is not installed"
    with pytest.raises(NotImplementedError, match=r"Triton is not installed.* no part of a larger problem"):
        dispatch.backend(problem)


def test_float64_on_a_gpu_is_standard_attention(kernels):
    assert dispatch.backend(gpu_problem(torch.float64, softcap=3.0)) is fallback


def test_the_passes_of_one_call_may_be_served_apart(kernels, monkeypatch):
    monkeypatch.setattr(
        target, "unsupported_reason", lambda *sizes, backward=False: "too wide" if backward else None
    )
    assert dispatch.backend(gpu_problem(head_dim=300)) is kernels
    assert dispatch.backend(gpu_problem(head_dim=300), backward=True) is fallback


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_explain_says_that_there_is_no_gpu():
    text = dispatch.explain(device="cuda")
    assert "backend: none" in text
    assert f"torch {torch.__version__} sees no GPU here" in text


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dtype": torch.bfloat16}, ["backend: flashtile.gpu.engine\n", "Some GPU (sm90), "]),
        (
            {"dtype": torch.float64, "kv_heads": 2},
            ["backend: flashtile.gpu.fallback\n", "too little for float64", "repeated for each"],
        ),
        (
            {"dtype": torch.float16, "head_dim": 300},
            [
                "backend: flashtile.gpu.engine; backward: flashtile.gpu.fallback\n",
                "head_dim 300 is beyond 256",
            ],
        ),
        ({"dtype": torch.float16, "head_dim": 600}, ["backend: flashtile.gpu.fallback\n", "beyond 512"]),
    ],
)
def test_explain_names_the_gpu_and_the_reason(options, parts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(target, "target_of", lambda device: target.Target("sm90", 2**17, 32, 132))
    monkeypatch.setattr(target, "triton_reason", lambda: None)
    text = dispatch.explain(device="cuda", **options)
    for part in parts:
        assert part in text
