"""One attention call, described once: what the front door validated and what every backend computes.

A backend trusts the problem: shapes agree, dtypes are supported, every tensor is on the query's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE, the sums and the small float arguments: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_scale(query: Tensor) -> float:
    """The factor of the scores where the caller gives none: head_dim ** -0.5."""
    return float(query.shape[3] ** -0.5)


class Part(NamedTuple):
    """Where a problem lies in a larger one, of which it has some of the queries, keys and heads.

    Dropout and ALiBi count positions and heads in the whole. The LSE, output and gradients that its backward
    pass gets are those of the whole too: probabilities are shares of the whole row.
    """

    query: int = 0  # position of its first query
    key: int = 0  # position of its first key
    head: int = 0  # number of its first query head
    heads: int = 0  # query heads of the whole
    diagonal: int = 0  # keys minus queries of the whole


# Not frozen: building a frozen one takes a microsecond longer, a tenth of a small call. Nobody changes it.
@dataclass(slots=True, eq=False)
class AttentionProblem:
    """A validated attention call; sizes are batch B, heads Hq and Hkv, lengths Sq and Sk, head dims D and Dv.

    Key j is visible to query i when ``i + lower <= j <= i + upper`` (None: unbounded), ``first <= j < last``
    and ``mask`` is True there; a row without visible keys gives output 0 and LSE -inf.
    The scores are ``softcap(scale * query @ key^T) + bias - alibi_slope * |i + Sk - Sq - j|``.
    """

    query: Tensor  # (B, Hq, Sq, D) float64, float32, bfloat16 or float16, any strides
    key: Tensor  # (B, Hkv, Sk, D)
    value: Tensor  # (B, Hkv, Sk, Dv)
    scale: float
    softcap: float | None = None
    lower: int | None = None
    upper: int | None = None
    first: Tensor | None = None  # int32 (B or 1, Sq or 1)
    last: Tensor | None = None  # int32 (B or 1, Sq or 1)
    mask: Tensor | None = None  # bool, 4-D, every dim full size or 1; True = attend
    bias: Tensor | None = None  # query's dtype, 4-D, every dim full size or 1
    alibi_slopes: Tensor | None = None  # compute dtype, (B or 1, Hq)
    sinks: Tensor | None = None  # compute dtype, (Hq,)
    dropout_p: float = 0.0
    seed: int | Tensor = 0  # 64-bit key of the Philox dropout mask; int64 (1,) if it is on a device
    # Sequences with lengths of their own, B of them: what is said above of batch entries holds of sequences,
    # i, j, Sq and Sk count within each, and `first` and `last` of packed queries are (1, Tq or 1).
    query_starts: Tensor | None = None  # int64 (B + 1,): query is (1, Hq, Tq, D), the sequences packed
    key_starts: Tensor | None = None  # int64 (B + 1,): key and value are (1, Hkv, Tk, D), packed too
    key_lengths: Tensor | None = None  # int64 (B,): keys of a cache that are in use, the first ones
    batch_index: Tensor | None = None  # int64 (B,): where in the cache a sequence lies; its own entry if None
    block_table: Tensor | None = None  # int32 (B, P): the pages of each; key is (pages, Hkv, page_size, D)
    part: Part | None = None  # not of sequences with lengths of their own

    @property
    def ragged(self) -> bool:
        """Whether sequences have lengths, or places in a cache, of their own."""
        return self.query_starts is not None or self.key_lengths is not None

    @property
    def sequences(self) -> int:
        """B, the number of sequences."""
        if self.query_starts is not None:
            return self.query_starts.shape[0] - 1
        return self.query.shape[0]

    @property
    def most_keys(self) -> int:
        """The most keys that a sequence can have: those of the cache or of all sequences."""
        if self.block_table is not None:
            return self.block_table.shape[1] * self.key.shape[2]
        return self.key.shape[2]


@dataclass
class Gradients:
    """Preallocated gradients; a backend writes every element of those that are not None.

    ``query``, ``key`` and ``value`` have the dtype of the inputs, the rest the compute dtype and the shape
    of the problem's tensor. None means that nobody asked for it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None

    def zero_(self) -> None:
        """What a call without rows or keys gives back."""
        for gradient in vars(self).values():
            if gradient is not None:
                gradient.zero_()
