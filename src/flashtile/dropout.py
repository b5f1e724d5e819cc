"""The dropout mask: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

One random word per (seed, batch entry, head, query, key), whatever the tile size, thread or device, so that
the kernels, the backward pass and this module all see the same mask without anybody storing it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four random words of each counter under the key, ten rounds.

    All tensors are int64 with values in 0..2**32-1, and broadcast against each other.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(10):
        # A product of two words may wrap in int64, but its bits are right: the mask drops the copied sign.
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0, word1, word2, word3 = (
            (product1 >> 32 & _WORD) ^ word1 ^ key0,
            product1 & _WORD,
            (product0 >> 32 & _WORD) ^ word3 ^ key1,
            product0 & _WORD,
        )
        key0 = key0 + _KEY_STEPS[0] & _WORD
        key1 = key1 + _KEY_STEPS[1] & _WORD
    return word0, word1, word2, word3


def dropout_mask(
    seed: int | Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    query_length: int,
    key_length: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """The mask of attention under this seed: bool (batch, heads, query_length, key_length), True = kept.

    Kept entries are scaled by ``1 / (1 - dropout_p)``. ``seed`` is a 64-bit int (signed or unsigned: the bits
    count) or an int64 tensor of one element. The mask of an entry does not depend on the sizes, except that
    ``heads`` numbers the heads of all batch entries. An entry is kept if its Philox word, counter
    (key // 4, query, batch * heads + head, 0) and output number key % 4, is at least ``dropout_p * 2**32``.

    Raises ValueError for a probability outside [0, 1], a seed of more than 64 bits or a negative size.
    """
    threshold = keep_threshold(dropout_p)
    sizes = {"batch": batch, "heads": heads, "query_length": query_length, "key_length": key_length}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must be at least 0, got {size}")
    bits = seed_tensor(seed, torch.device("cpu" if device is None else device))
    head_index = torch.arange(batch * heads, device=bits.device)
    kept = kept_entries(bits, threshold, head_index, query_length, key_length)
    return kept.reshape(batch, heads, query_length, key_length)


def kept_entries(
    seed: Tensor,
    threshold: int,
    head_index: Tensor,
    query_length: int,
    key_length: int,
    *,
    first_query: int = 0,
    first_key: int = 0,
) -> Tensor:
    """Bool (heads, query_length, key_length) for heads of these numbers, (heads,) int64; see dropout_mask.

    ``first_query`` and ``first_key`` say where in the whole mask this part of it begins.
    """
    bits = seed.reshape(())
    query_index = torch.arange(query_length, device=bits.device)[:, None] + first_query
    first_block, skipped = divmod(first_key, 4)
    key_block = torch.arange((skipped + key_length + 3) // 4, device=bits.device) + first_block
    words = philox(
        (key_block, query_index, head_index[:, None, None], torch.zeros_like(key_block)),
        (bits & _WORD, bits >> 32 & _WORD),
    )
    return (torch.stack(words, dim=-1) >= threshold).flatten(-2)[..., skipped : skipped + key_length]


def keep_threshold(dropout_p: float) -> int:
    """The smallest random word, of 0..2**32-1, that keeps an entry; 2**32, which none reaches, for p = 1."""
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p!r}")
    return math.floor(dropout_p * 2**32)


def keep_scale(dropout_p: float) -> float:
    """What kept entries are multiplied by, so that the expectation stays the same."""
    return 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


def draw_seed(device: torch.device | str) -> Tensor:
    """A random 64-bit seed, int64 (1,), from torch's default generator for ``device``.

    Nothing is read back, so it can be traced and stays on the device; torch.manual_seed governs it.
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """``seed`` as an int64 tensor (1,) on ``device``; an unsigned int keeps its bits and becomes negative."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed must be an int64 tensor of one element, got {seed.dtype} {tuple(seed.shape)}"
            )
        return seed.reshape(1).to(device)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int or an int64 tensor of one element, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit in 64 bits, got {seed}")
    return filled_seed(seed, device)


def filled_seed(seed: Any, device: torch.device) -> Tensor:
    """An int of 64 bits as an int64 tensor (1,): written there, since a copy would wait for the device."""
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)
