"""Models of Transformers on flashtile: the results of eager attention, in inference and in training."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import (
    DECODERS,
    assert_as_exact_as_eager,
    attention_mask,
    build,
    recorded_intervals,
    tokens,
)

BATCH, LENGTH = 2, 16
IDS = tokens(BATCH, LENGTH)
POSITIONS = torch.cat([torch.arange(5), torch.arange(11)]).expand(BATCH, -1)
IMAGES = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(BATCH, 8, 60, generator=torch.Generator().manual_seed(0))
TARGETS = tokens(BATCH, 7, seed=1)


@pytest.mark.parametrize("padding", ["none", "right", "holes"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders(family, padding):
    mask = attention_mask(padding, BATCH, LENGTH)
    there = slice(None) if mask is None else mask.bool()
    with recorded_intervals() as calls:
        assert_as_exact_as_eager(build(family), lambda model: model(IDS, attention_mask=mask).logits[there])
    assert len(calls) == 2
    for intervals in calls:
        assert intervals is not None
        assert intervals != (None,) * 5
        assert intervals.dense is None or (padding == "holes" and intervals.dense.shape[2] == 1)


@pytest.mark.parametrize("family", DECODERS)
def test_left_padding_changes_nothing(family):
    """A padded row has the logits of its tokens alone."""
    mask = attention_mask("left", BATCH, LENGTH)
    model = build(family)
    exact_model = copy.deepcopy(model).double()
    positions = torch.arange(LENGTH).expand(BATCH, -1)

    def alone(row: int) -> Tensor:
        there = mask[row].bool()
        ids, position_ids = IDS[row][there], positions[row][there]
        return exact_model(ids[None], position_ids=position_ids[None]).logits[0]

    with torch.no_grad():
        exact = torch.cat([alone(row) for row in range(BATCH)])
    with recorded_intervals() as calls:
        assert_as_exact_as_eager(
            model, lambda model: model(IDS, attention_mask=mask).logits[mask.bool()], exact
        )
    assert all(intervals.dense is None for intervals in calls)


@pytest.mark.parametrize("family", DECODERS)
def test_packed_sequences(family):
    with recorded_intervals() as calls:
        assert_as_exact_as_eager(
            build(family), lambda model: model(IDS, position_ids=POSITIONS, use_cache=False).logits
        )
    assert all(intervals.dense is None for intervals in calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_16_bit_decoders(family, dtype):
    mask = attention_mask("right", BATCH, LENGTH)
    assert_as_exact_as_eager(build(family), lambda model: model(IDS, attention_mask=mask).logits, dtype=dtype)


def test_autocast():
    def result(model: Any) -> Tensor:
        narrow = model.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            return model(IDS).logits.to(torch.float32 if narrow else torch.float64)

    assert_as_exact_as_eager(build("gemma2"), result)


ENCODERS: dict[str, tuple[str, Any]] = {
    "bert": ("bert", lambda model: model(IDS).last_hidden_state),
    "bert, padded": (
        "bert",
        lambda model: model(IDS, attention_mask=attention_mask("left", BATCH, LENGTH)).last_hidden_state,
    ),
    "vit": ("vit", lambda model: model(IMAGES.to(model.dtype)).last_hidden_state),
    "t5": ("t5", lambda model: model(IDS, decoder_input_ids=TARGETS).logits),
    "t5, padded": (
        "t5",
        lambda model: (
            model(
                IDS,
                attention_mask=attention_mask("right", BATCH, LENGTH),
                decoder_input_ids=TARGETS,
                decoder_attention_mask=attention_mask("right", BATCH, 7),
            ).logits
        ),
    ),
    "whisper": ("whisper", lambda model: model(SOUND.to(model.dtype), decoder_input_ids=TARGETS).logits),
}


@pytest.mark.parametrize("case", ENCODERS.values(), ids=ENCODERS.keys())
def test_encoders_and_cross_attention(case):
    family, result = case
    with recorded_intervals() as calls:
        assert_as_exact_as_eager(build(family), result)
    assert len(calls) == {"bert": 2, "vit": 2, "t5": 6, "whisper": 6}[family]
    assert all(intervals is None or intervals.dense is None for intervals in calls)


def loss_and_gradients(model: Any, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


TRAINED: dict[str, dict[str, Any]] = {
    "llama": {"attention_mask": attention_mask("right", BATCH, LENGTH)},
    "gemma2": {},
    "gpt_oss": {},
    "mistral": {"position_ids": POSITIONS, "use_cache": False},
    "t5": {"attention_mask": attention_mask("right", BATCH, LENGTH)},
}


@pytest.mark.parametrize(("family", "inputs"), TRAINED.items(), ids=TRAINED.keys())
def test_gradients(family, inputs):
    inputs = {"input_ids": IDS, "labels": IDS, **inputs}
    model = build(family)
    _, exact = loss_and_gradients(copy.deepcopy(model).double(), **inputs)
    _, eager = loss_and_gradients(model, **inputs)
    model.set_attn_implementation("flashtile")
    _, found = loss_and_gradients(model, **inputs)
    assert len(found) == len(eager) == len(exact) == len(list(model.parameters()))

    def error(gradients: list[Tensor]) -> float:
        """The largest of all parameters, each relative to its largest gradient."""
        return max(
            float((ours - right).abs().max() / right.abs().max())
            for ours, right in zip(gradients, exact, strict=True)
        )

    assert error(found) <= 2 * error(eager)
    assert error(eager) < 1e-4


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointing_repeats_the_dropout(reentrant):
    model = build("mistral", "flashtile", attention_dropout=0.3).train()
    inputs = {
        "input_ids": IDS,
        "labels": IDS,
        "attention_mask": attention_mask("right", BATCH, LENGTH),
        "use_cache": False,
    }
    loss, gradients = loss_and_gradients(model, **inputs)
    with warnings.catch_warnings():  # a newer version has another name for it
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, repeated = loss_and_gradients(model, **inputs)
    assert torch.equal(again, loss)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(repeated, gradients, strict=True))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not torch.equal(model.eval()(**inputs).loss, loss)  # there was a dropout


def test_implementations_change_at_run_time_and_models_do_not_meet():
    ours, theirs = build("mistral", "flashtile"), build("mistral")
    with torch.no_grad(), recorded_intervals() as calls:
        expected = theirs(IDS).logits
        assert not calls
        found = ours(IDS).logits
        assert len(calls) == 2
        assert torch.equal(theirs(IDS).logits, expected)
        ours.set_attn_implementation("eager")
        assert torch.equal(ours(IDS).logits, expected)
        ours.set_attn_implementation("sdpa")
        assert len(calls) == 2
        ours.set_attn_implementation("flashtile")
        assert torch.equal(ours(IDS).logits, found)
        assert len(calls) == 4


def test_padding_is_lost_without_the_mask_function(monkeypatch):
    """Why register() registers two functions."""
    from transformers.masking_utils import AttentionMaskInterface

    model = build("llama", "flashtile")
    mask = attention_mask("left", BATCH, LENGTH)
    with torch.no_grad():
        expected = model(IDS, attention_mask=mask).logits[mask.bool()]
        monkeypatch.delitem(AttentionMaskInterface._global_mapping, "flashtile")
        lost = model(IDS, attention_mask=mask).logits[mask.bool()]
    assert (lost - expected).abs().max() > 0.1


def test_bidirectional_use_of_a_decoder():
    with recorded_intervals() as calls:
        assert_as_exact_as_eager(build("llama", is_causal=False), lambda model: model(IDS).logits)
        assert_as_exact_as_eager(build("mistral"), lambda model: model(IDS, is_causal=False).logits)
    assert calls[0] == (None,) * 5
    assert calls[-1].upper > 0


def test_a_mask_of_four_dimensions():
    visible = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.7
    visible |= torch.eye(LENGTH, dtype=torch.bool)

    def result(model: Any) -> Tensor:
        if model.config._attn_implementation == "eager":
            mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min).to(model.dtype)
            return model(IDS, attention_mask=mask).logits
        return model(IDS, attention_mask=visible).logits

    assert_as_exact_as_eager(build("llama"), result)


def test_what_it_does_not_do_it_refuses():
    model = build("llama", "flashtile")
    with pytest.raises(ValueError, match="output_attentions=True needs the matrix"):
        model(IDS, output_attentions=True)
    with pytest.raises(TypeError, match="LlamaAttention passes head_mask"):
        model(IDS, head_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="'eager' instead"):
        model.config.output_attentions = True
