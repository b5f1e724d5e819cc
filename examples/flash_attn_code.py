"""Code written for flash-attn, on a CPU: `install()`, and `import flash_attn` finds flashtile.

Here that code is a string; it might as well be a package that cannot be edited.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from flashtile import compat

THEIR_CODE = """
from flash_attn import flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input


def causal_attention(qkv, attention_mask):  # qkv (batch, length, 3, heads, head_dim)
    tokens, indices, cu_seqlens, longest, *_ = unpad_input(qkv, attention_mask)
    out = flash_attn_varlen_qkvpacked_func(tokens, cu_seqlens, longest, causal=True)
    return pad_input(out, indices, *attention_mask.shape)


def decode(q, k, v, k_cache, v_cache, lengths):  # one new token per sequence
    return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
"""


def main() -> None:
    torch.manual_seed(0)
    compat.install()
    theirs: dict[str, object] = {}
    exec(THEIR_CODE, theirs)

    lengths = torch.tensor([100, 37, 64])
    attention_mask = torch.arange(100) < lengths[:, None]
    qkv = torch.randn(3, 100, 3, 4, 32, requires_grad=True)
    out = theirs["causal_attention"](qkv, attention_mask)
    gradient = torch.autograd.grad(out.square().sum(), qkv)[0]

    q, k, v = qkv.transpose(1, 3).unbind(2)  # (batch, heads, length, head_dim)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    expected = expected * attention_mask[:, :, None, None]
    expected_gradient = torch.autograd.grad(expected.square().sum(), qkv)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)
    print(f"three sequences of {lengths.tolist()} tokens: output and gradient are torch's")

    k_cache, v_cache = (torch.zeros(3, 100, 4, 32) for _ in range(2))
    steps = []
    with torch.no_grad():
        for t in range(20):
            q, k, v = qkv[:, t : t + 1].unbind(2)
            steps.append(theirs["decode"](q, k, v, k_cache, v_cache, torch.full((3,), t)))
    torch.testing.assert_close(torch.cat(steps, dim=1), out[:, :20].detach(), rtol=1e-4, atol=1e-5)
    print("twenty tokens, one at a time with a cache: the same rows")
    compat.uninstall()


if __name__ == "__main__":
    main()
