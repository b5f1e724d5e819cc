"""Generation with Transformers' caches and decoders, and compiled models, on flashtile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.tiny_models import (
    assert_as_exact_as_eager,
    attention_mask,
    build,
    cache_argument,
    recorded_intervals,
    tokens,
)

BATCH, LENGTH = 2, 11
IDS = tokens(BATCH, LENGTH)
REPEATING = IDS[:1].repeat(1, 3)
LEFT = attention_mask("left", BATCH, LENGTH)


def generate(model: Any, **options: Any) -> Tensor:
    given = {"inputs": IDS, "attention_mask": LEFT, "max_new_tokens": 8, "do_sample": False, **options}
    result: Tensor = model.generate(**given)
    return result


WAYS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3, "cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 3, "attention_mask": torch.ones_like(IDS)},
    "prompt lookup": {
        "inputs": REPEATING,
        "attention_mask": torch.ones_like(REPEATING),
        "prompt_lookup_num_tokens": 3,
        "eos_token_id": 1,
    },
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("family", ["llama4", "gemma3", "gpt_oss"])
def test_tokens_are_those_of_eager_attention(family, way):
    model = build(family)
    expected = generate(model, **way)
    model.set_attn_implementation("flashtile")
    with recorded_intervals() as calls:
        assert torch.equal(generate(model, **way), expected)
    assert len(calls) >= 4
    assert all(intervals.dense is None for intervals in calls)


def test_several_tokens_at_once_from_an_assistant():
    options = {"inputs": IDS[:1], "attention_mask": torch.ones(1, LENGTH, dtype=torch.int64)}
    expected = generate(build("mistral"), assistant_model=build("llama"), **options)
    ours, assistant = build("mistral", "flashtile"), build("llama", "flashtile")
    assert torch.equal(generate(ours, assistant_model=assistant, **options), expected)


@pytest.mark.parametrize("family", ["t5", "whisper"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_encoder_decoders(family, way):
    model = build(family)
    options = {**way, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    inputs = (IDS,) if family == "t5" else (torch.randn(BATCH, 8, 60),)
    expected = model.generate(*inputs, **options)
    model.set_attn_implementation("flashtile")
    with recorded_intervals() as calls:
        assert torch.equal(model.generate(*inputs, **options), expected)
    assert all(intervals is None or intervals.dense is None for intervals in calls)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_chunked_prefill(family, cache):
    def result(model: Any) -> Tensor:
        if cache == "static":
            kept: Any = hf.StaticCache(config=model.config, max_cache_len=20)
        else:
            kept = hf.DynamicCache(config=model.config)
        parts = (IDS[:, :4], IDS[:, 4:9], IDS[:, 9:10], IDS[:, 10:])
        return torch.cat([model(part, **cache_argument(model, kept)).logits for part in parts], dim=1)

    with recorded_intervals() as calls:
        assert_as_exact_as_eager(build(family), result)
    assert all(intervals.dense is None for intervals in calls)


@pytest.fixture
def compiler() -> Any:
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


PADDED = attention_mask("right", BATCH, LENGTH)
COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("llama", {}),
    "padded": ("llama", {"attention_mask": PADDED}),
    "window and softcap": ("gemma2", {}),
    "encoder": ("bert", {}),
}


@pytest.mark.parametrize(("family", "inputs"), COMPILED.values(), ids=COMPILED.keys())
def test_compiled_as_one_graph(family, inputs, compiler):
    def result(model: Any) -> Tensor:
        run = model
        if model.config._attn_implementation == "flashtile":
            run = torch.compile(model, backend=compiler, fullgraph=True)
        return run(IDS, **inputs)[0]

    assert_as_exact_as_eager(build(family, num_hidden_layers=2), result)
    assert compiler.frame_count == 1


def test_compiled_training_step(compiler):
    model = build("llama", "flashtile")
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    again = torch.compile(model, backend=compiler, fullgraph=True)(IDS, labels=IDS).loss
    again.backward()
    torch.testing.assert_close(again, loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_one_graph_serves_every_step_of_a_static_cache(compiler):
    """Masks made outside of it are tensors to it, with no number that changes from step to step."""
    model = build("llama")
    expected = generate(model)
    model.set_attn_implementation("flashtile")
    config = hf.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    counters.clear()
    found = generate(model, cache_implementation="static", compile_config=config)
    assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] == 1
