"""Diffusers models on flashtile, through torch's own attention: nothing of Diffusers is replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import dispatch

diffusers = pytest.importorskip("diffusers")


def unet() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A small text-to-image U-Net: self-attention over pixels, cross-attention to words."""
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=8,
    )
    inputs = {"sample": torch.randn(2, 4, 16, 16), "encoder_hidden_states": torch.randn(2, 11, 24)}
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 7:] = 0  # a shorter prompt
    return model, {**inputs, "timestep": torch.tensor(10), "encoder_attention_mask": mask}


def transformer() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A small diffusion transformer, whose attention goes through Diffusers' dispatcher."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    model.set_attention_backend("native")
    inputs = {
        "hidden_states": torch.randn(1, 64, 4),
        "encoder_hidden_states": torch.randn(1, 9, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(64, 3),
        "txt_ids": torch.randn(9, 3),
    }
    return model, inputs


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the queries that flashtile's kernels got."""
    shapes: list[torch.Size] = []
    right = dispatch.backend

    def noted(problem, **options):
        shapes.append(problem.query.shape)
        return right(problem, **options)

    monkeypatch.setattr(dispatch, "backend", noted)
    return shapes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("build", [unet, transformer])
def test_a_model_gives_the_same_with_and_without(
    build: Callable[[], tuple[torch.nn.Module, dict[str, Tensor]]], served: list[torch.Size]
):
    model, inputs = build()
    model.eval()
    results = []
    for use in (False, True):
        model.zero_grad()
        served.clear()
        if use:
            with flashtile.activated():
                out = model(**inputs).sample
                out.square().mean().backward()
            assert served, "no call reached flashtile"
        else:
            out = model(**inputs).sample
            out.square().mean().backward()
            assert not served
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((out.detach(), gradients))
    (expected, expected_gradients), (found, gradients) = results
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-6)
