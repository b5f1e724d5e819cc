"""A torch model as it is, with flashtile behind its scaled_dot_product_attention: one line, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import flashtile
from flashtile.integrations import sdpa


def outputs_and_gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, ...]:
    causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
    out = model(tokens, mask=causal, is_causal=True)
    return (out.detach(), *torch.autograd.grad(out.square().mean(), tuple(model.parameters())))


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    tokens = torch.randn(2, 100, 64)
    expected = outputs_and_gradients(model, tokens)

    flashtile.activate()  # from here on, in every thread
    assert sdpa.is_active()
    found = outputs_and_gradients(model, tokens)
    flashtile.deactivate()
    assert_same(found, expected)
    difference = max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True))
    print(f"encoder, output and {len(found) - 1} gradients: largest difference {difference:.1e}")

    with flashtile.activated():  # or for one block only
        inside = outputs_and_gradients(model, tokens)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(inside, found, strict=True))

    after = outputs_and_gradients(model, tokens)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, expected, strict=True))
    print("switched off again: torch's own results, bit for bit")


if __name__ == "__main__":
    main()
