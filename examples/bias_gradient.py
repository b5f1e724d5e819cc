"""Train a relative position bias (as in T5): the heads learn to look some positions back.

The bias is one number per head and distance. flashtile gives its gradient from the tiled backward pass;
torch's SDPA on CPU leaves its fused kernel as soon as the mask needs a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile import masks

HEADS, LENGTH, HEAD_DIM = 2, 64, 16
FARTHEST = 8  # distances beyond share one number
LOOK_BACK = torch.tensor([1, 5])  # what head 0 and head 1 have to find


def bias_of(table: Tensor) -> Tensor:
    """table (heads, FARTHEST + 1) as a bias (1, heads, LENGTH, LENGTH)."""
    position = torch.arange(LENGTH)
    distance = (position[:, None] - position).clamp(0, FARTHEST)
    return table[:, distance].unsqueeze(0)


def check_gradient(table: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """The table's gradient equals the one torch gets through a matrix of scores."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    ours = flashtile.attention(query, key, value, bias=bias_of(table), mask=masks.causal())
    biased = bias_of(table).masked_fill(~causal, -torch.inf)
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=biased)
    gradients = [torch.autograd.grad(out.square().sum(), table)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def main() -> None:
    torch.manual_seed(0)
    table = torch.zeros(HEADS, FARTHEST + 1, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.3)
    for step in range(40):
        query, key, value = torch.randn(3, 4, HEADS, LENGTH, HEAD_DIM)
        wanted = torch.stack([value[:, h].roll(int(LOOK_BACK[h]), dims=1) for h in range(HEADS)], dim=1)
        out = flashtile.attention(0.1 * query, 0.1 * key, value, bias=bias_of(table), mask=masks.causal())
        loss = F.mse_loss(out[:, :, FARTHEST:], wanted[:, :, FARTHEST:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2}  loss {loss.item():.4f}")
    print(f"learned distances: {table.argmax(1).tolist()}, wanted {LOOK_BACK.tolist()}")
    assert torch.equal(table.argmax(1), LOOK_BACK)
    check_gradient(table, query, key, value)


if __name__ == "__main__":
    main()
