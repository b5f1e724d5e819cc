"""Standard attention in plain PyTorch: the formula itself, quadratic in memory, differentiable by autograd.

In float64 it is the oracle of the tests; in the inputs' own dtype its error says what that dtype allows.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from flashtile.dropout import keep_scale, keep_threshold, kept_entries, seed_tensor
from flashtile.masks import Intervals
from flashtile.problem import AttentionProblem, Part, compute_dtype


def attention(problem: AttentionProblem, *, row_by_row: bool | None = None) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of standard attention, computed in the dtype of ``problem.query`` (see :func:`cast`).

    ``out`` is (B, Hq, Sq, Dv) in that dtype; ``lse`` is (B, Hq, Sq), natural logarithm, in the compute dtype
    (float64 for float64, else float32). A row that sees no key, or only scores of -inf (of infinite inputs),
    has output 0 and LSE -inf, or the LSE of its sink, which is all of its denominator, as a sink of infinity
    always is. Both are differentiable in every floating tensor of the problem.

    A NaN or infinity in the query, key or value reaches the rows that see it and no other, forward and
    backward; this takes a copy of the keys and values for every row (``row_by_row``; None = if needed). Where
    a gradient that flows in may itself be NaN or infinite, ask for it.
    """
    if problem.ragged:
        return _by_sequence(problem, row_by_row)
    return _attention(problem, row_by_row)


def _attention(
    problem: AttentionProblem, row_by_row: bool | None, first_sequence: int = 0
) -> tuple[Tensor, Tensor]:
    """Sequences alike; dropout numbers them from ``first_sequence`` on."""
    heads, query_length = problem.query.shape[1:3]
    kv_heads, key_length = problem.key.shape[1:3]
    group = heads // max(1, kv_heads)
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (problem.key, problem.value))
    visible = visible_keys(problem)
    if row_by_row is None:
        row_by_row = not all(torch.isfinite(tensor).all() for tensor in (problem.query, key, value))

    products = _matmul(problem.query, key.mT, visible[..., None, :], row_by_row)
    scores = problem.scale * torch.where(visible, products, 0.0)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.bias is not None:
        scores = scores + problem.bias
    if problem.alibi_slopes is not None:
        distance = alibi_distance(query_length, key_length, scores.device, problem.part)
        scores = scores - problem.alibi_slopes.to(scores.dtype)[:, :, None, None] * distance
    probabilities, lse = _softmax(scores, visible, problem.sinks)
    if problem.dropout_p > 0:
        kept = kept_entries_of(problem, first_sequence)
        probabilities = probabilities * kept * keep_scale(problem.dropout_p)
    out = _matmul(probabilities, value, visible[..., None], row_by_row)
    return out, lse.to(compute_dtype(problem.query.dtype))


def _by_sequence(problem: AttentionProblem, row_by_row: bool | None) -> tuple[Tensor, Tensor]:
    """Every sequence a call of its own; packed queries behind the last one get what sees nothing gets."""
    if problem.sequences == 0:
        out = problem.query.new_zeros(*problem.query.shape[:3], problem.value.shape[3])
        return out, out[..., 0].to(compute_dtype(out.dtype))
    parts = [
        _attention(sequence(problem, index), row_by_row, first_sequence=index)
        for index in range(problem.sequences)
    ]
    outs, lses = zip(*parts, strict=True)
    if problem.query_starts is None:
        return torch.cat(outs), torch.cat(lses)
    out, lse = torch.cat(outs, dim=2), torch.cat(lses, dim=2)
    rest = problem.query.shape[2] - out.shape[2]
    return torch.nn.functional.pad(out, (0, 0, 0, rest)), torch.nn.functional.pad(
        lse, (0, rest), value=-math.inf
    )


def sequence(problem: AttentionProblem, index: int) -> AttentionProblem:
    """One sequence of a ragged problem as a problem of its own, with keys read from pages copied together."""
    rows, entry = slice(None), slice(index, index + 1)
    query = problem.query[entry]
    if problem.query_starts is not None:
        rows = slice(*(int(start) for start in problem.query_starts[index : index + 2]))
        query = problem.query[:, :, rows]
    key, value = (_keys_of(problem, tensor, index) for tensor in (problem.key, problem.value))
    query_length, key_length = query.shape[2], key.shape[2]

    def own(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor[entry]

    def bound(tensor: Tensor | None) -> Tensor | None:
        tensor = own(tensor)
        return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, rows]

    def plane(tensor: Tensor | None) -> Tensor | None:
        tensor = own(tensor)
        if tensor is None:
            return None
        tensor = tensor if tensor.shape[2] == 1 else tensor[:, :, :query_length]
        return tensor if tensor.shape[3] == 1 else tensor[..., :key_length]

    return dataclasses.replace(
        problem,
        query=query,
        key=key,
        value=value,
        first=bound(problem.first),
        last=bound(problem.last),
        mask=plane(problem.mask),
        bias=plane(problem.bias),
        alibi_slopes=own(problem.alibi_slopes),
        query_starts=None,
        key_starts=None,
        key_lengths=None,
        batch_index=None,
        block_table=None,
    )


def _keys_of(problem: AttentionProblem, tensor: Tensor, index: int) -> Tensor:
    """The keys or values of one sequence: (1, Hkv, Sk, D)."""
    if problem.key_starts is not None:
        first, last = (int(start) for start in problem.key_starts[index : index + 2])
        return tensor[:, :, first:last]
    assert problem.key_lengths is not None
    length = int(problem.key_lengths[index])
    if problem.block_table is not None:
        pages = problem.block_table[index, : -(-length // tensor.shape[2])]
        return tensor[pages.long()].movedim(0, 1).flatten(1, 2)[None, :, :length]
    entry = index if problem.batch_index is None else int(problem.batch_index[index])
    return tensor[entry : entry + 1, :, :length]


def visible_keys(problem: AttentionProblem) -> Tensor:
    """Which keys each query sees: bool (B, Hq, Sq, Sk). A bias of -inf hides a key just as False does."""
    batch, heads, query_length, _ = problem.query.shape
    intervals = Intervals(problem.lower, problem.upper, problem.first, problem.last, problem.mask)
    visible = intervals.visible(query_length, problem.key.shape[2], problem.query.device)
    if problem.bias is not None:
        visible = visible & (problem.bias != -math.inf)
    return visible.expand(batch, heads, -1, -1)


def kept_entries_of(problem: AttentionProblem, first_sequence: int = 0) -> Tensor:
    """The dropout mask of a problem, bool (B, Hq, Sq, Sk), counted in the whole if the problem is a part."""
    batch, heads, query_length, _ = problem.query.shape
    part, device = problem.part or Part(heads=heads), problem.query.device
    sequences = torch.arange(batch, device=device)[:, None] + first_sequence
    head_index = sequences * part.heads + part.head + torch.arange(heads, device=device)
    kept = kept_entries(
        seed_tensor(problem.seed, device), keep_threshold(problem.dropout_p), head_index.flatten(),
        query_length, problem.key.shape[2], first_query=part.query, first_key=part.key,
    )  # fmt: skip
    return kept.view(batch, heads, *kept.shape[1:])


def alibi_distance(
    query_length: int, key_length: int, device: torch.device, part: Part | None = None
) -> Tensor:
    """|i + Sk - Sq - j|, (Sq, Sk): the last query stands at the last key, of the whole if this is a part."""
    part = part or Part(diagonal=key_length - query_length)
    query_index = torch.arange(query_length, device=device)[:, None] + part.query
    key_index = torch.arange(key_length, device=device) + part.key
    return (query_index + part.diagonal - key_index).abs()


def cast(problem: AttentionProblem, dtype: torch.dtype) -> AttentionProblem:
    """The same problem with inputs and bias in ``dtype``, and the small arguments in its compute dtype."""

    def to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    return dataclasses.replace(
        problem,
        query=problem.query.to(dtype),
        key=problem.key.to(dtype),
        value=problem.value.to(dtype),
        bias=to(problem.bias, dtype),
        alibi_slopes=to(problem.alibi_slopes, compute_dtype(dtype)),
        sinks=to(problem.sinks, compute_dtype(dtype)),
    )


def _softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities of the visible keys and the LSE of every row; a sink is a key without a value."""
    logits, counted, alone = scores, visible, scores.new_full((), -math.inf)
    taken = torch.zeros((), dtype=torch.bool, device=scores.device)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        logits, counted = torch.cat([scores, sink], -1), torch.cat([visible, sink != -math.inf], -1)
        # A sink of infinity takes everything; a NaN stays, and so does what an infinite score makes of it.
        taken = (sink == math.inf) & ~(visible & ~(scores < math.inf)).any(dim=-1, keepdim=True)
        alone = torch.where(taken, sink, alone)
    some = (counted & (logits != -math.inf)).any(dim=-1, keepdim=True) & ~taken
    # A row without anything to weigh gets zeros, whose softmax is finite, and its result is replaced.
    logits = torch.where(some, torch.where(counted, logits, -math.inf), 0.0)
    probabilities = torch.softmax(logits, dim=-1)[..., : scores.shape[-1]]
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    # where() also stops gradients: what a row does not see has none, not even 0 x NaN.
    return torch.where(visible & some, probabilities, 0.0), torch.where(some, lse, alone)[..., 0]


def _matmul(left: Tensor, right: Tensor, seen: Tensor, row_by_row: bool) -> Tensor:
    """``left @ right``; row by row, each has a ``right`` of its own, with zeros where not ``seen``."""
    if not row_by_row:
        return left @ right
    return (left[..., None, :] @ torch.where(seen, right[:, :, None], 0.0)).squeeze(-2)
