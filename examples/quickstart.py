"""Attention and its gradients, with grouped heads and the LSE, checked against float64 and against torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import flashtile
from flashtile import masks


def main() -> None:
    torch.manual_seed(0)
    # (batch, heads, length, head_dim); four query heads share each of the two key heads.
    query = torch.randn(2, 8, 300, 64, requires_grad=True)
    key = torch.randn(2, 2, 300, 64, requires_grad=True)
    value = torch.randn(2, 2, 300, 64, requires_grad=True)
    weight = torch.randn(2, 8, 300, 64)

    out, lse = flashtile.attention(query, key, value, mask=masks.causal(), return_lse=True)
    gradients = torch.autograd.grad(out, (query, key, value), weight)

    # The formula itself in float64.
    wide = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    scores = wide[0] @ wide[1].repeat_interleave(4, dim=1).mT * 64**-0.5
    scores = scores.masked_fill(~torch.ones(300, 300, dtype=torch.bool).tril(), float("-inf"))
    exact_out, exact_lse = scores.softmax(-1) @ wide[2].repeat_interleave(4, dim=1), scores.logsumexp(-1)
    exact_gradients = torch.autograd.grad(exact_out, wide, weight.double())

    torch_out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch_gradients = torch.autograd.grad(torch_out, (query, key, value), weight)

    print("largest error against float64      flashtile    torch SDPA")
    names = ("output", "query gradient", "key gradient", "value gradient")
    exact = (exact_out.detach(), *exact_gradients)
    ours, theirs = (out.detach(), *gradients), (torch_out.detach(), *torch_gradients)
    for name, truth, our, their in zip(names, exact, ours, theirs, strict=True):
        our_error, their_error = (float((tensor - truth).abs().max()) for tensor in (our, their))
        print(f"  {name:<32} {our_error:.1e}      {their_error:.1e}")
        torch.testing.assert_close(our.double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, exact_lse.detach().float())


if __name__ == "__main__":
    main()
