"""The attention function of the Transformers integration, called as attention modules call it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils import generic

from flashtile import masks, reference
from flashtile.integrations import transformers
from flashtile.integrations.transformers import attention_forward
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem


class Attention(nn.Module):
    """An attention module, of which the function knows no more than this."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


CAUSAL, FULL = Attention(is_causal=True), Attention(is_causal=False)
VISIBLE = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
ADDED = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(1))
HIDING = torch.where(VISIBLE, 0.0, -torch.inf)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
STARTS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
DOCUMENTS = masks.documents([0, 0, 0, 0, 1, 1, 1, 1, 1])

# module, arguments of the call, and the same as a problem
CALLS: dict[str, tuple[Attention, dict[str, Any], dict[str, Any]]] = {
    "causal module": (CAUSAL, {}, {"upper": 0}),
    "full module": (FULL, {}, {}),
    "is_causal beats the module": (FULL, {"is_causal": True}, {"upper": 0}),
    "is_causal beats the causal module": (CAUSAL, {"is_causal": False}, {}),
    "is_causal without a module's": (Attention(), {"is_causal": True}, {"upper": 0}),
    "static cache": (CAUSAL, {}, {"upper": 0, "query_length": 5, "key_length": 32}),
    "one query": (CAUSAL, {}, {"query_length": 1}),
    "one query of a module that says nothing": (Attention(), {}, {"query_length": 1}),
    "window": (CAUSAL, {"sliding_window": 3}, {"lower": -2, "upper": 0}),
    "window of both sides": (FULL, {"sliding_window": 3}, {"lower": -2, "upper": 2}),
    "window of one query": (CAUSAL, {"sliding_window": 3}, {"query_length": 1, "lower": 6}),
    "scale and softcap": (
        CAUSAL,
        {"scaling": 0.7, "softcap": 1.5},
        {"upper": 0, "scale": 0.7, "softcap": 1.5},
    ),
    "sinks": (CAUSAL, {"s_aux": SINKS}, {"upper": 0, "sinks": SINKS}),
    "mask": (CAUSAL, {"attention_mask": VISIBLE}, {"mask": VISIBLE}),
    "mask and window": (CAUSAL, {"attention_mask": VISIBLE, "sliding_window": 3}, {"mask": VISIBLE}),
    "additive mask": (CAUSAL, {"attention_mask": ADDED}, {"bias": ADDED}),
    "position bias": (FULL, {"position_bias": ADDED}, {"bias": ADDED}),
    "position bias, causal": (CAUSAL, {"position_bias": ADDED}, {"bias": ADDED, "upper": 0}),
    "position bias and mask": (
        FULL,
        {"position_bias": ADDED, "attention_mask": VISIBLE},
        {"bias": ADDED, "mask": VISIBLE},
    ),
    "position bias and additive mask": (
        FULL,
        {"position_bias": ADDED, "attention_mask": HIDING},
        {"bias": ADDED + HIDING},
    ),
    "packed": (FULL, {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS}, {"batch": 1, "mask": DOCUMENTS}),
    "packed, causal": (
        CAUSAL,
        {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 5, "max_length_k": 5},
        {"batch": 1, "mask": DOCUMENTS & masks.causal()},
    ),
    "what changes nothing": (
        FULL,
        {"position_ids": torch.arange(9), "use_cache": True, "output_attentions": False, "unheard_of": None},
        {},
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_results_and_gradients(call):
    module, given, fields = call
    problem = random_problem(
        **{"query_length": 9, "key_length": 9, "head_dim": 16, "value_head_dim": 12, **fields}
    )
    inputs = [tensor.clone().requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
    out, weights = attention_forward(module, *inputs, **{"attention_mask": None, **given})
    assert weights is None
    assert out.is_contiguous()
    grad_out, _ = random_gradients(problem)
    gradients = torch.autograd.grad(out, inputs, grad_out.transpose(1, 2))
    found = dict(zip(("grad_query", "grad_key", "grad_value"), gradients, strict=True))
    assert_close_to_oracle({"out": out.detach().transpose(1, 2), **found}, problem, grad_out)


def test_gradients_of_position_bias_and_sinks():
    problem = random_problem(query_length=9, key_length=9, bias=ADDED, sinks=SINKS, upper=0)
    bias, sinks = ADDED.clone().requires_grad_(), SINKS.clone().requires_grad_()
    out, _ = attention_forward(
        CAUSAL,
        problem.query,
        problem.key,
        problem.value,
        None,
        position_bias=bias,
        s_aux=sinks.view(1, -1, 1, 1),
    )
    grad_out, _ = random_gradients(problem)
    gradients = torch.autograd.grad(out, (bias, sinks), grad_out.transpose(1, 2))
    found = dict(zip(("grad_bias", "grad_sinks"), gradients, strict=True))
    assert_close_to_oracle(found, problem, grad_out)


def test_a_bias_of_higher_precision_keeps_it():
    """Transformers adds it to 16-bit scores and gets float32."""
    problem = random_problem(query_length=9, key_length=9, dtype=torch.bfloat16)
    inputs = (problem.query, problem.key, problem.value)
    out, _ = attention_forward(FULL, *inputs, None, position_bias=100 * ADDED)
    assert out.dtype == torch.bfloat16
    wide = random_problem(query_length=9, key_length=9, bias=100 * ADDED)
    wide.query, wide.key, wide.value = (tensor.float() for tensor in inputs)
    exact, _ = reference.attention(wide)
    torch.testing.assert_close(out.transpose(1, 2), exact.to(torch.bfloat16), rtol=2**-8, atol=0.0)
    coarse = 100 * ADDED.to(torch.bfloat16)
    wide.bias = coarse.float()
    assert (reference.attention(wide)[0] - exact).abs().max() > 2**-6


@pytest.mark.parametrize("learned", ["query", "key"])
def test_a_batch_of_one_is_for_all(learned):
    problem = random_problem(query_length=9, key_length=9)
    query, key, value = problem.query, problem.key, problem.value
    if learned == "query":
        query = query[:1]
        problem.query = query.expand(2, -1, -1, -1)
    else:
        key, value = key[:1], value[:1]
        problem.key, problem.value = (tensor.expand(2, -1, -1, -1) for tensor in (key, value))
    out, _ = attention_forward(FULL, query, key, value, None)
    assert_close_to_oracle({"out": out.transpose(1, 2)}, problem)


def test_dropout_is_governed_by_torchs_generator():
    problem = random_problem(query_length=9, key_length=9, dropout_p=0.4, upper=0)
    torch.manual_seed(7)
    problem.seed = int(torch.randint(-(2**63), 2**63 - 1, (1,)))
    torch.manual_seed(7)
    out, _ = attention_forward(CAUSAL, problem.query, problem.key, problem.value, None, dropout=0.4)
    assert_close_to_oracle({"out": out.transpose(1, 2)}, problem)


INTS = torch.ones(2, 1, 9, 9, dtype=torch.int64)
REFUSED: dict[str, tuple[Attention, dict[str, Any], type[Exception], str]] = {
    "weights": (CAUSAL, {"output_attentions": True}, ValueError, 'output_attentions=True .*"eager"'),
    "unknown": (CAUSAL, {"head_mask": SINKS}, TypeError, "Attention passes head_mask to the attention"),
    "several unknown": (CAUSAL, {"indices": INTS, "sinks": SINKS}, TypeError, "passes indices, sinks"),
    "causal or not": (Attention(), {}, ValueError, "neither an attention_mask nor is_causal"),
    "padding": (CAUSAL, {"attention_mask": torch.ones(2, 9)}, ValueError, r"got shape \(2, 9\)"),
    "other mask": (CAUSAL, {"attention_mask": [1]}, TypeError, "attention_mask must be a tensor, got list"),
    "int mask": (CAUSAL, {"attention_mask": INTS}, TypeError, "bool or floating, got torch.int64"),
    "mask of other keys": (CAUSAL, {"attention_mask": VISIBLE[..., :8]}, ValueError, "key"),
    "window": (CAUSAL, {"sliding_window": 0}, ValueError, "window: left must be an int >= 0"),
    "softcap": (CAUSAL, {"softcap": 0.0}, ValueError, "softcap must be finite and above 0"),
    "scaling": (
        CAUSAL,
        {"scaling": torch.ones(())},
        TypeError,
        "scale must be a Python float",
    ),
    "dropout": (CAUSAL, {"dropout": 1.5}, ValueError, "dropout_p must be between 0 and 1"),
    "sinks": (CAUSAL, {"s_aux": SINKS[:2]}, ValueError, r"sinks must have shape \(heads,\) = \(4,\)"),
    "one of two": (FULL, {"cu_seq_lens_q": STARTS}, ValueError, "must be given together"),
    "packed batch": (FULL, {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS}, ValueError, "a batch of 2"),
    "packed lengths": (
        FULL,
        {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS[:3]},
        ValueError,
        r"end with the number of queries and of keys, 9 and 9, got \[0, 4, 4, 9\]",
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_refuses(call):
    module, given, error, message = call
    problem = random_problem(query_length=9, key_length=9)
    with pytest.raises(error, match=message):
        attention_forward(
            module, problem.query, problem.key, problem.value, **{"attention_mask": None, **given}
        )


def test_registering_again_changes_nothing():
    transformers.register()
    before = generic.is_flash_attention_requested
    transformers.register()
    assert generic.is_flash_attention_requested is before
    assert hf.AttentionInterface()["flashtile"] is attention_forward
    assert "flashtile" in ALL_MASK_ATTENTION_FUNCTIONS


def test_it_is_told_apart_from_flash_attn_everywhere():
    transformers.register()
    asked = generic.is_flash_attention_requested
    assert not asked(requested_attention_implementation="flashtile")
    assert not asked(hf.LlamaConfig(attn_implementation="flashtile"))
    assert not asked(requested_attention_implementation="sdpa")
    assert not asked(hf.LlamaConfig(attn_implementation="eager"))
    assert asked(requested_attention_implementation="flash_attention_2")
    assert asked(hf.LlamaConfig(attn_implementation="flash_attention_2"))
    with pytest.raises(ValueError, match="ambiguous"):
        asked(hf.LlamaConfig(attn_implementation="flashtile"), "flashtile")
    for module in list(sys.modules.values()):
        known = getattr(module, "__dict__", {}).get("is_flash_attention_requested")
        assert known is None or known is asked, module


@pytest.mark.parametrize("version", ["4.57.6", "5.5.4"])
def test_an_old_transformers_is_refused(version, monkeypatch):
    monkeypatch.setattr("transformers.__version__", version)  # `hf` may be an older copy of the module
    with pytest.raises(ImportError, match=rf"needs Transformers 5.6 or newer, {version} is installed: pip"):
        transformers.register()


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs Transformers: pip install 'flashtile\[transformers\]'"):
        transformers.register()


def test_flashtile_alone_imports_no_transformers():
    code = (
        "import sys, flashtile, flashtile.integrations.transformers; "
        "assert 'transformers' not in sys.modules and 'diffusers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
