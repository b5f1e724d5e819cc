"""Every mask as a picture, a mask per model family, and each checked against its boolean tensor in torch.

Rows are queries, columns keys. A mask is kept as one run of keys per query, so it costs no matrix and whole
tiles that nobody sees are skipped.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

import flashtile
from flashtile import masks

LENGTH = 16
EXAMPLES = {
    "GPT: causal": masks.causal(),
    "Mistral, sliding_window=4: itself and the 3 before": masks.causal() & masks.window(left=3),
    "BERT: padding after 11 tokens": masks.key_lengths(11),
    "generation with padding on the left": masks.causal() & masks.key_starts(3),
    "three documents packed into one row": masks.causal() & masks.documents([0] * 5 + [1] * 8 + [2] * 3),
    "prefix-LM: the first 6 tokens see each other": masks.prefix(6),
    "Llama 4: chunks of 6": masks.causal() & masks.chunks(6),
    "any pattern, here every third key, within causal": masks.causal() & (torch.arange(LENGTH) % 3 == 0),
}


def check(mask: flashtile.Mask) -> None:
    """flashtile with the mask equals torch with the boolean matrix; rows that see nothing are 0."""
    query, key, value = torch.randn(3, 1, 2, LENGTH, 32)
    out = flashtile.attention(query, key, value, mask=mask)
    visible = mask.dense(1, LENGTH, LENGTH)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, attn_mask=visible))
    assert out[~visible.any(-1).expand(1, 2, LENGTH)].eq(0).all()


def main() -> None:
    torch.manual_seed(0)
    for title, mask in EXAMPLES.items():
        print(f"\n{title}\n{mask!r}\n{mask.draw(LENGTH)}")
        check(mask)

    print("\nfewer queries than keys: say where the queries stand")
    for alignment in ("top-left", "bottom-right"):
        mask = masks.causal(alignment=alignment)
        print(f"{mask!r}\n{mask.draw(4, 10)}")


if __name__ == "__main__":
    main()
