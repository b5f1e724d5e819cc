"""``context_parallel``: models of Transformers on several ranks train as on one, or say why not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parallel.models import (
    BATCH,
    MISTAKES,
    Training,
    attend_behind_sdpa,
    mistakes,
    train,
    train_unwrapped,
    train_wrapped,
)
from tests.tiny_models import build

DOCUMENTS = [0, 3, 40, 40, 41, 61]
TRAININGS = [
    Training("llama", 2, {"layout": "zigzag"}, "right", checkpoints=True),
    Training("llama", 3, {"method": "ulysses"}, "left"),
    Training("llama", 4, {"method": "mesh", "mesh": (2, 2), "layout": "zigzag", "cu_seqlens": DOCUMENTS}),
    Training("mistral", 4, {"layout": "zigzag", "cu_seqlens": DOCUMENTS}),
    Training("mistral", 3, {"method": "allgather"}, "holes"),
    Training("mistral", 3, {"method": "ulysses", "cu_seqlens": DOCUMENTS}),
    Training("gpt_oss", 2, {"layout": "zigzag"}),
    Training("llama4", 2, {"layout": "zigzag"}),
]


def name_of(training: Training) -> str:
    words = [training.family, *map(str, training.context.values()), training.padding, training.ranks]
    return "-".join(str(word) for word in words)


@pytest.mark.parametrize("training", TRAININGS, ids=name_of)
def test_loss_and_gradients_are_those_of_one_process(ranks, training):
    exact_loss, exact = training.on_one_process(torch.float64)
    alone_loss, alone = training.on_one_process()
    for loss, found in ranks.run(train, training.ranks, training=training):
        assert found.keys() == alone.keys() == exact.keys()
        # A loss is float32 in any model: each share is rounded as it is summed and divided, then added.
        rounding = (1 + training.ranks) * torch.finfo(torch.float32).eps
        assert error(loss, exact_loss) <= 2 * error(alone_loss, exact_loss) + rounding
        worst, standard = (max(error(one[name], exact[name]) for name in exact) for one in (found, alone))
        assert worst <= 2 * standard, (worst, standard)
        assert standard < 1e-4  # the comparison means something


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_step_in_wrappers_of_data_parallel_training(ranks, wrapper, copies):
    alone = train_unwrapped(BATCH * copies)
    for name, weights in build("llama", "flashtile").named_parameters():
        assert error(alone[name], weights.detach()) > 1e-3  # far more than is allowed below
    for found in ranks.run(train_wrapped, 4, wrapper=wrapper, copies=copies):
        assert found.keys() == alone.keys()
        for name, weights in alone.items():
            torch.testing.assert_close(found[name], weights)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().max() / exact.abs().max())


SAID = {
    "positions of the part": "ValueError: position_ids must be those of this rank's part of the whole seq",
    "documents of the part": "ValueError: position_ids must be those of this rank's part of the whole seq",
    "matrix": "ValueError: context_parallel does not support masks that are matrices",
    "generation": "ValueError: context_parallel needs the keys of the queries' own part: no cache",
    "another length": "ValueError: this rank's part of 41 tokens must have the 2",
    "chunks and padding": "ValueError: context_parallel does not support chunked attention with padding on",
    "chunks and documents": "ValueError: context_parallel does not support chunked attention with padding",
    "cross-attention": "ValueError: context_parallel ",
    "documents of another length": "ValueError: cu_seqlens must end with the length of the sequence, 61, got",
    "labels": "ValueError: labels must have the shape of input_ids, (1, 8), got (1, 7)",
    "attn_mask": "ValueError: context_parallel serves scaled_dot_product_attention of plain tensors without",
    "method": 'ValueError: method must be one of "ring", "ulysses", "allgather", "mesh", got \'star\'',
    "zigzag heads": 'ValueError: layout must be "contiguous" with method="ulysses", got \'zigzag\'',
    "no mesh": 'TypeError: group must be a DeviceMesh with method="mesh", got ProcessGroup',
    "no documents": "ValueError: cu_seqlens must hold 0 and the end of every document, got [0]",
    "nobody attends": "UserWarning: nothing in this context_parallel block attended through flashtile",
}


def test_what_cannot_be_computed_is_refused_on_every_rank(ranks):
    assert SAID.keys() == MISTAKES.keys()
    told = ranks.run(mistakes, 2)
    for name, expected in SAID.items():
        heard = [one[name] for one in told]
        assert any(error.startswith(expected) for error in heard), heard
        for error in heard:
            assert error.startswith(expected) or "refused the arguments there; the error raised" in error


def test_behind_scaled_dot_product_attention(ranks):
    for out, gradient, expected, expected_gradient in ranks.run(attend_behind_sdpa, 3):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient, expected_gradient)
