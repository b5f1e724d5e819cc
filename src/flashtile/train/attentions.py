"""The attentions a GPT can be trained with: flashtile, torch's SDPA and standard attention.

All see the same: causal, and within the document. Each is told so in the way that serves it best: flashtile
by intervals, SDPA by `is_causal` where a row is one document, and by a boolean matrix where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile import masks
from flashtile.masks import Mask


class Visible:
    """What a batch's tokens see: themselves and what is before them, within their document.

    One object serves all layers; the matrix is made once, and only for an attention that needs it.

    Args:
        batch, length: of the rows of tokens.
        documents: int64 (batch, length), an id for each token, or None where each row is one document.
    """

    def __init__(
        self, batch: int, length: int, device: torch.device, documents: Tensor | None = None
    ) -> None:
        self.batch, self.length, self.device, self.documents = batch, length, device, documents
        self.mask: Mask = masks.causal()  # for flashtile: intervals of keys, no matrix
        if documents is not None:
            self.mask = self.mask & masks.documents(documents)
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """bool (batch or 1, 1, length, length), True where the query sees the key."""
        if self._dense is None:
            self._dense = self.mask.dense(self.batch, self.length, self.length, self.device)
        return self._dense


@dataclass(frozen=True)
class Dropout:
    """Which entries of the softmax are dropped: those of ``flashtile.dropout_mask(seed, p, ...)``."""

    p: float
    seed: Tensor  # int64 (1,)


Attention = Callable[[Tensor, Tensor, Tensor, Visible, Dropout | None], Tensor]


def flashtile_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, dropout: Dropout | None
) -> Tensor:
    if dropout is None:
        return flashtile.attention(query, key, value, mask=visible.mask)
    return flashtile.attention(query, key, value, mask=visible.mask, dropout_p=dropout.p, seed=dropout.seed)


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, dropout: Dropout | None
) -> Tensor:
    """Dropout is torch's own: from its generator, not from the seed, so other entries are dropped."""
    alone = visible.documents is None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=None if alone else visible.dense(), is_causal=alone,
        dropout_p=0.0 if dropout is None else dropout.p, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def standard_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, dropout: Dropout | None
) -> Tensor:
    """The formula, with every score in memory; drops the entries that flashtile drops."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    probabilities = scores.masked_fill(~visible.dense(), float("-inf")).softmax(-1)
    if dropout is not None:
        batch, heads, length, _ = scores.shape
        kept = flashtile.dropout_mask(
            dropout.seed, dropout.p, batch, heads, length, length, device=scores.device
        )
        probabilities = probabilities * kept / (1 - dropout.p)
    out: Tensor = probabilities.to(value.dtype) @ value
    return out


ATTENTIONS: dict[str, Attention] = {
    "flashtile": flashtile_attention,
    "sdpa": torch_attention,
    "standard": standard_attention,
}
