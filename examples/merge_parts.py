"""Attention over parts of the keys, merged exactly: what split-key decoding and ring attention do."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile import masks

PARTS = 4


def largest(difference: Tensor) -> float:
    return float(difference.detach().abs().max())


def main() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 8, 1024, 64, requires_grad=True)
    whole = flashtile.attention(query, key, value, mask=masks.causal())

    outputs, lses = [], []
    for part in range(PARTS):  # each could be on a machine of its own
        own = slice(part * 1024 // PARTS, (part + 1) * 1024 // PARTS)
        # Keys of this part stand at own.start, own.start + 1, ...: causal, seen from there.
        visible = masks.key_range(0, (torch.arange(1024) + 1 - own.start).clamp(0, 1024 // PARTS)[None])
        out, lse = flashtile.attention(query, key[:, :, own], value[:, :, own], mask=visible, return_lse=True)
        outputs.append(out)
        lses.append(lse)
    merged, _ = flashtile.merge(outputs, lses)
    torch.testing.assert_close(merged, whole)

    mean = torch.stack(outputs).mean(0)
    print(f"{PARTS} parts merged: largest difference {largest(merged - whole):.1e}")
    print(f"their mean would be off by {largest(mean - whole):.2f}")

    upstream = torch.randn_like(whole)
    for found, expected in zip(
        torch.autograd.grad(merged, query, upstream), torch.autograd.grad(whole, query, upstream), strict=True
    ):
        torch.testing.assert_close(found, expected)
        print(f"gradients too: {largest(found - expected):.1e}")


if __name__ == "__main__":
    main()
