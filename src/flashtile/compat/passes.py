"""flash-attn's forward and backward pass by themselves, as libraries that build on flash-attn call them.

Ring attention, for one, gives the backward pass the output and the LSE over all keys together with a part of
the keys. The names, the signatures and what is returned are those of ``flash_attn.flash_attn_interface``;
nothing here is recorded for autograd. ``softmax_d``, rowsum(dout * out), is not padded to a multiple of 128,
and the random state is (seed, 0). The names that begin with ``_wrapped`` are functions too, not operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import torch_ops
from flashtile.compat.arguments import Options, by_heads, options_of
from flashtile.compat.calls import attend, attend_packed
from flashtile.compat.errors import InputError, InputTypeError, named
from flashtile.dropout import draw_seed
from flashtile.masks import Intervals
from flashtile.masks.lengths import Packed
from flashtile.problem import AttentionProblem, compute_dtype
from flashtile.ragged import cumulative_lengths

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]

Passed = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Passed:
    """``(out, softmax_lse, S_dmask, rng_state)``; S_dmask is empty without ``return_softmax``."""
    window_size = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
    inputs = by_heads(q, k, v)
    options, state = _with_state(options, q)
    out, lse, *probabilities = attend(inputs, options, return_softmax, return_lse=True)
    return out, lse, probabilities[0] if probabilities else q.new_empty(0), state


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Passed:
    """:func:`_flash_attn_forward` for packed sequences. Rows without a sequence are always zero."""
    for name, tensor in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if tensor is not None:
            raise InputError(f"{name} must be None: flashtile has no such option here, got a tensor")
    window_size = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
    options, state = _with_state(options, q)
    out, lse, *probabilities = attend_packed(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), options, return_softmax,
        return_lse=True, block_table=block_table,
    )  # fmt: skip
    return out, lse, probabilities[0] if probabilities else q.new_empty(0), state


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients into ``dq``, ``dk`` and ``dv`` where they are given; returns softmax_d."""
    window_size = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
    query, key, value = by_heads(q, k, v)
    intervals = Intervals()
    if options.mask is not None:
        intervals = options.mask.resolve(q.shape[0], q.shape[1], k.shape[1], q.device)
    _check_results(
        dout, out, softmax_lse, (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1]), q
    )
    problem = _problem(query, key, value, options, intervals, rng_state)
    rows = (out.transpose(1, 2), softmax_lse, dout.transpose(1, 2))
    found = _backward(problem, *rows)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        if into is not None:
            into.copy_(gradient.transpose(1, 2))
    return _softmax_d(dout, out).transpose(1, 2)


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """:func:`_flash_attn_backward` for packed sequences. Rows without a sequence are always zero."""
    window_size = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
    query, key, value = by_heads(q[None], k[None], v[None])
    starts = named(cumulative_lengths, "cu_seqlens_q", cu_seqlens_q, q.shape[0], q.device)
    key_starts = named(cumulative_lengths, "cu_seqlens_k", cu_seqlens_k, k.shape[0], q.device)
    intervals = Intervals()
    if options.mask is not None:
        longest = (int(starts.diff().max()), int(key_starts.diff().max()))
        sizes = (q.shape[0], k.shape[0], longest[1], longest)
        intervals = options.mask.intervals(Packed(*sizes, starts, key_starts, key_starts.diff()))
    _check_results(dout, out, softmax_lse, (*q.shape[:2], v.shape[2]), (q.shape[1], q.shape[0]), q)
    problem = _problem(query, key, value, options, intervals, rng_state)
    problem.query_starts, problem.key_starts = starts, key_starts
    rows = (out.transpose(0, 1)[None], softmax_lse[None], dout.transpose(0, 1)[None])
    found = _backward(problem, *rows)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        if into is not None:
            into.copy_(gradient[0].transpose(0, 1))
    return _softmax_d(dout, out).transpose(0, 1)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _with_state(options: Options, q: Tensor) -> tuple[Options, Tensor]:
    """The options with a seed where there is dropout, and the state that tells it to the backward pass."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if options.dropout_p:
        state[:1] = draw_seed(q.device)
        options = options._replace(seed=state[:1])
    return options, state


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    intervals: Intervals,
    rng_state: Tensor | None,
) -> AttentionProblem:
    if not 0.0 <= options.dropout_p <= 1.0:
        raise InputError(f"dropout_p must be between 0 and 1, got {options.dropout_p}")
    if options.dropout_p and rng_state is None:
        raise InputError("rng_state must be what the forward pass returned where dropout_p > 0, got None")
    if options.dropout_p and rng_state is not None and rng_state.dtype != torch.int64:
        raise InputError(f"rng_state must be what the forward pass returned, int64, got {rng_state.dtype}")
    slopes = options.alibi_slopes
    if slopes is not None:
        heads = query.shape[1]
        if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
            raise InputError(
                f"alibi_slopes must be ([batch,] heads = {heads}), got shape {tuple(slopes.shape)}"
            )
        slopes = slopes.to(compute_dtype(query.dtype)).reshape(-1, heads)
    lower, upper, first, last, dense = intervals
    scale = query.shape[3] ** -0.5 if options.scale is None else options.scale
    return AttentionProblem(
        query, key, value, scale, options.softcap, lower, upper, first, last, dense,
        alibi_slopes=slopes,
        dropout_p=options.dropout_p,
        seed=rng_state[:1] if options.dropout_p and rng_state is not None else 0,
    )  # fmt: skip


def _backward(
    problem: AttentionProblem, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.to(compute_dtype(out.dtype)).contiguous()
    wanted = (True, True, True, False, False, False)
    gradients = torch_ops.backward(problem, out, lse, dout, None, wanted)
    return gradients.query, gradients.key, gradients.value


def _check_results(
    dout: Tensor, out: Tensor, lse: Tensor, shape: tuple[int, ...], lse_shape: tuple[int, ...], q: Tensor
) -> None:
    for name, tensor, expected in (
        ("dout", dout, shape),
        ("out", out, shape),
        ("softmax_lse", lse, lse_shape),
    ):
        if tensor.shape != expected:
            raise InputError(f"{name} must have shape {expected}, got shape {tuple(tensor.shape)}")
        if name != "softmax_lse" and tensor.dtype != q.dtype:
            raise InputTypeError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")


def _softmax_d(dout: Tensor, out: Tensor) -> Tensor:
    dtype = compute_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(dim=-1)
