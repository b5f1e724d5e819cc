"""The probabilities that a call works with, written out: quadratic in memory, for looking at them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.compat.arguments import Options
from flashtile.dropout import dropout_mask
from flashtile.problem import compute_dtype
from flashtile.reference import alibi_distance


@torch.no_grad()
def signed_probabilities(
    query: Tensor, key: Tensor, lse: Tensor, options: Options, kept: Tensor | None
) -> Tensor:
    """softmax of the scores (B, Hq, Sq, Sk) in query's dtype, negative where ``kept`` is False.

    ``query`` is (B, Hq, Sq, D), ``key`` (B, Hkv, Sk, D), ``lse`` (B, Hq, Sq) the LSE of the same call, which
    includes the sinks, ``kept`` bool (B, Hq, Sq, Sk).
    """
    dtype = compute_dtype(query.dtype)
    query_length, key_length = query.shape[2], key.shape[2]
    keys = key.repeat_interleave(query.shape[1] // max(1, key.shape[1]), dim=1).to(dtype)
    scale = query.shape[3] ** -0.5 if options.scale is None else options.scale
    with torch.autocast(query.device.type, enabled=False):
        scores = scale * (query.to(dtype) @ keys.mT)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        distance = alibi_distance(query_length, key_length, query.device)
        scores = scores - options.alibi_slopes.to(dtype)[..., None, None] * distance
    probabilities = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    if options.mask is not None:
        visible = options.mask.dense(query.shape[0], query_length, key_length, query.device)
        probabilities = probabilities.masked_fill(~visible, 0.0)
    if kept is not None:
        probabilities = torch.where(kept, probabilities, -probabilities)
    return probabilities.to(query.dtype)


@torch.no_grad()
def packed_probabilities(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None],
    options: Options,
    block_table: Tensor | None,
) -> Tensor:
    """The same for packed sequences, each at [b, :, 0, 0] of (B, Hq, *longest), with zeros around.

    ``query`` is (Tq, Hq, D), ``key`` (Tk, Hkv, D) or pages (pages, page_size, Hkv, D), ``lse`` (Hq, Tq).
    """
    ends = [torch.as_tensor(numbers) for numbers in cu_seqlens]
    sizes = [
        int(numbers.diff().max()) if length is None else length
        for numbers, length in zip(ends, longest, strict=True)
    ]
    starts, key_starts = (numbers.tolist() for numbers in ends)
    batch, heads = len(starts) - 1, query.shape[1]
    probabilities = query.new_zeros(batch, heads, *sizes)
    kept = None
    if options.seed is not None:
        kept = dropout_mask(options.seed, options.dropout_p, batch, heads, sizes[0], sizes[1], query.device)
    slopes = options.alibi_slopes
    for b in range(batch):
        rows, keys = slice(*starts[b : b + 2]), slice(*key_starts[b : b + 2])
        queries, many = rows.stop - rows.start, keys.stop - keys.start
        own_keys = key[keys] if block_table is None else key[block_table[b].long()].flatten(0, 1)[:many]
        if slopes is not None and slopes.dim() == 2:
            options = options._replace(alibi_slopes=slopes[b % slopes.shape[0]])
        probabilities[b, :, :queries, :many] = signed_probabilities(
            query[rows].transpose(0, 1)[None],
            own_keys.transpose(0, 1)[None],
            lse[None, :, rows],
            options,
            None if kept is None else kept[None, b, :, :queries, :many],
        )[0]
    return probabilities
