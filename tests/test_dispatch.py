"""Which backend serves a call, and the reasons given when none does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import flashtile
from flashtile import dispatch
from flashtile.problem import AttentionProblem


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
        ({"device": "cuda"}, "no backend serves cuda tensors"),
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
    code = "import sys, torch, flashtile; sys.exit('numba' in sys.modules or 'flashtile.cpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
