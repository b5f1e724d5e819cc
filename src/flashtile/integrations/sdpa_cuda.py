"""The GPU half of the provider behind ``scaled_dot_product_attention``: PyTorch's CUDA flash operators.

What PyTorch sends to its flash kernel (float16 and bfloat16, no mask, head_dim up to 256, square if causal)
goes to flashtile's kernels; what it sends to its other kernels, cuDNN's among them, stays there. The
operators get head_dims padded to a multiple of 8, and key heads that are not repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import dispatch
from flashtile.dropout import draw_seed
from flashtile.gpu import target
from flashtile.problem import AttentionProblem, Gradients, default_scale

_cuda: Any = torch.backends.cuda
_FLASH = "_scaled_dot_product_flash_attention"
# What PyTorch returns, in this order: output, LSE, the starts of packed queries and keys, their longest
# lengths, seed and offset of the dropout, and the dropout mask if it is asked for.
Results = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]


def register(library: Any) -> None:
    """Override PyTorch's operators in ``library``, if this PyTorch knows GPUs and Triton compiles for them.

    The GPU itself is looked at when it is called. Looking now would start CUDA, which a program that only
    uses CPUs does not want, nor one that is about to fork.
    """
    if _cuda.is_built() and target.triton_reason() is None:
        library.impl(_FLASH, flash_forward, "CUDA")
        library.impl(f"{_FLASH}_backward", flash_backward, "CUDA")


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    """``aten::_scaled_dot_product_flash_attention``: query (B, Hq, Sq, D), key and value (B, Hkv, Sk, D).

    The output has the strides of query; the LSE is (B, Hq, Sq) float32, of the scaled scores.
    """
    if return_debug_mask:
        raise RuntimeError(_message("there is no dropout mask to return; see flashtile.dropout_mask"))
    seed = _drawn(query, dropout_p)
    problem = _problem(query, key, value, dropout_p, is_causal, scale, seed)
    _check_served(problem, backward=False)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if out.numel():
        dispatch.backend(problem).forward(problem, out, lse)
    offset, debug_mask = seed.new_empty(()), query.new_empty(0)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, debug_mask


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_scaled_dot_product_flash_attention_backward``: gradients with the strides of their inputs."""
    problem = _problem(query, key, value, dropout_p, is_causal, scale, philox_seed)
    _check_served(problem, backward=True)
    grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    gradients = Gradients(grad_query, grad_key, grad_value, bias=None, alibi_slopes=None, sinks=None)
    if out.numel():
        backend = dispatch.backend(problem, backward=True)
        backend.backward(problem, out, logsumexp, grad_out, None, gradients)
    else:
        for gradient in (grad_query, grad_key, grad_value):
            gradient.zero_()
    return grad_query, grad_key, grad_value


def _drawn(query: Tensor, dropout_p: float) -> Tensor:
    """The seed in the form in which compiled code expects PyTorch's own: two words, on AMD's GPUs one."""
    shape, dtype = ((), torch.int64) if torch.version.hip else ((2,), torch.uint64)
    if dropout_p == 0.0:
        return torch.empty(shape, dtype=dtype, device=query.device)
    bits = draw_seed(query.device)
    return bits.expand(shape or (1,)).contiguous().view(dtype).reshape(shape)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: Tensor,
) -> AttentionProblem:
    return AttentionProblem(
        query,
        key,
        value,
        default_scale(query) if scale is None else scale,
        upper=0 if is_causal else None,
        dropout_p=dropout_p,
        seed=seed.reshape(-1)[:1].view(torch.int64),
    )


def _check_served(problem: AttentionProblem, *, backward: bool) -> None:
    """PyTorch has asked for a flash kernel: nothing else may answer, not even PyTorch's own other kernels."""
    query = problem.query
    reason = target.unsupported_reason(
        query.device, query.shape[3], problem.value.shape[3], backward=backward
    )
    if reason is not None:
        raise RuntimeError(_message(f"{reason}; flashtile.deactivate() gives PyTorch's kernel back"))


def _message(reason: str) -> str:
    return f"scaled_dot_product_attention (flashtile, CUDA flash operator): {reason}"
