"""Generating with a cache in pages: a prompt in chunks, then token by token, with rotary embedding.

Two sequences of different lengths share one pool of pages. At the end, the outputs are compared with
attention over each whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile import masks, rotary

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16
PROMPTS = torch.tensor([37, 90])
NEW_TOKENS = 12


def main() -> None:
    torch.manual_seed(0)
    total = int(PROMPTS.max()) + NEW_TOKENS
    pages = -(-total // PAGE_SIZE)
    key_pages, value_pages = torch.zeros(2, 2 * pages + 3, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    block_table = torch.randperm(2 * pages + 3)[: 2 * pages].view(2, pages)
    angles = torch.arange(total)[:, None] * 10000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    cos, sin = angles.cos(), angles.sin()

    # What a model would project from its tokens: (batch, heads, length, head_dim).
    query = torch.randn(2, HEADS, total, HEAD_DIM)
    key, value = torch.randn(2, 2, KV_HEADS, total, HEAD_DIM)
    outputs: list[list[Tensor]] = [[], []]

    def step(rows: int, lengths: Tensor, entries: list[int]) -> None:
        """The next `rows` tokens of some sequences: appended to the cache, and attended from."""
        places = [slice(int(lengths[b]), int(lengths[b]) + rows) for b in entries]
        new = [
            torch.stack([tensor[b, :, own] for b, own in zip(entries, places, strict=True)])
            for tensor in (query, key, value)
        ]
        out = flashtile.attention_kvcache(
            new[0], key_pages, value_pages, key=new[1], value=new[2], cache_lengths=lengths[entries],
            block_table=block_table[entries], rotary_cos=cos, rotary_sin=sin, mask=masks.causal(),
        )  # fmt: skip
        for b, own in zip(entries, out, strict=True):
            outputs[b].append(own)
        lengths[entries] += rows

    lengths = torch.zeros(2, dtype=torch.int64)
    for b, prompt in enumerate(PROMPTS.tolist()):  # chunks of at most 32 tokens
        for start in range(0, prompt, 32):
            step(min(32, prompt - start), lengths, [b])
    for _ in range(NEW_TOKENS):
        step(1, lengths, [0, 1])

    for b, length in enumerate(lengths.tolist()):
        turned = [
            rotary.apply(tensor[b : b + 1, :, :length], cos, sin, torch.arange(length)[None])
            for tensor in (query, key)
        ]
        expected = flashtile.attention(*turned, value[b : b + 1, :, :length], mask=masks.causal())
        found = torch.cat(outputs[b], dim=1)
        torch.testing.assert_close(found, expected[0])
        error = float((found - expected[0]).abs().max())
        print(f"sequence {b}: {length} tokens in {-(-length // PAGE_SIZE)} pages, difference {error:.1e}")


if __name__ == "__main__":
    main()
