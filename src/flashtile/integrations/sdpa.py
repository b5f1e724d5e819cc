"""Flashtile behind ``torch.nn.functional.scaled_dot_product_attention``; no model needs a change.

``activate()`` replaces PyTorch's flash kernels and their backward in the dispatcher, through PyTorch's
registry of attention providers where it has one: the CPU's, and where there are kernels for it the GPU's
(sdpa_cuda.py). On CPU it also serves the eager calls that PyTorch would send to its quadratic path (dropout,
Ev != E, a mask that needs a gradient, 3-D inputs). ``deactivate()`` puts PyTorch's own kernels back.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from flashtile import dispatch
from flashtile.arguments import inputs_agree
from flashtile.attention import attention
from flashtile.integrations import active, sdpa_cuda
from flashtile.masks import Mask, causal
from flashtile.problem import AttentionProblem, Gradients, compute_dtype, default_scale

# PyTorch's registry of attention providers; older versions have none.
_registry: Any = torch.nn.attention if hasattr(torch.nn.attention, "register_flash_attention_impl") else None

NAME = "flashtile"
_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_TOP_LEFT = causal(alignment="top-left")


def activate() -> None:
    """Serve ``scaled_dot_product_attention`` from now on, in every thread; once is enough.

    On CPU every call; on GPUs those that PyTorch sends to its flash kernel, where Triton is installed and no
    other provider is active.
    """
    global _before_blocks
    with _lock:
        _before_blocks = True
        if _handle is None:
            _turn_on()


def deactivate() -> None:
    """Give the calls back to PyTorch's own kernels; inside an ``activated()`` block, when the block ends."""
    global _before_blocks
    with _lock:
        _before_blocks = False
        if not _blocks and _handle is not None:
            _turn_off()


@contextlib.contextmanager
def activated() -> Iterator[None]:
    """Serve ``scaled_dot_product_attention`` inside the block; blocks nest, also across threads."""
    global _blocks, _before_blocks
    with _lock:
        if not _blocks:
            _before_blocks = _handle is not None
        if _handle is None:
            _turn_on()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and not _before_blocks and _handle is not None:
                _turn_off()


def is_active() -> bool:
    """Whether ``scaled_dot_product_attention`` is served by flashtile at this moment."""
    return _handle is not None


class _Handle:
    """What PyTorch's registry keeps of an active provider."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        global _handle
        self._library._destroy()
        _handle = None


_lock = threading.RLock()
_handle: _Handle | None = None
_blocks = 0  # activated() blocks entered and not left, in all threads
_before_blocks = False  # whether the kernels stay after the last block


def _turn_on() -> None:
    if _registry is None:
        _register()
    elif _registry.current_flash_attention_impl() is not None:
        _register(gpu=False)  # another provider, whose device that is, stays active
    else:
        _registry.activate_flash_attention_impl(NAME)


def _turn_off() -> None:
    if _registry is not None and _registry.current_flash_attention_impl() == NAME:
        _registry.restore_flash_attention_impl()
    elif _handle is not None:
        _handle.remove()


def _register(*, gpu: bool = True) -> _Handle:
    global _handle
    with _lock:
        if _handle is None:
            library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():  # PyTorch warns of every first override; this one was asked for
                warnings.simplefilter("ignore")
                library.impl(_FLASH, _flash_forward, "CPU")
                library.impl(f"{_FLASH}_backward", _flash_backward, "CPU")
                for key in ("CPU", "AutogradCPU"):
                    library.impl("scaled_dot_product_attention", _scaled_dot_product_attention, key)
                if gpu:
                    sdpa_cuda.register(library)
            _handle = _Handle(library)
        return _handle


if _registry is not None:
    _registry.register_flash_attention_impl(NAME, register_fn=_register)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel of ``aten::scaled_dot_product_attention``; what it does not serve goes on as usual."""
    if (context := active.current()) is not None:
        refusal = _refused_in_parts(query, key, value, attn_mask, enable_gqa)
        seen = causal() if is_causal else None
        return context.attend(query, key, value, refusal, mask=seen, scale=scale, dropout_p=dropout_p)
    if not _servable(query, key, value, attn_mask, is_causal, enable_gqa):
        return _SDPA.decompose(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    mask: Mask | Tensor | None = _TOP_LEFT if is_causal else None
    bias = None
    if attn_mask is not None:
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    out = attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    if query.is_contiguous():
        return out
    # In any other memory order PyTorch's flash kernel follows the query, its quadratic path does not.
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out if choice == SDPBackend.FLASH_ATTENTION.value else out.contiguous()


def _refused_in_parts(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> Exception | None:
    """Why a call is none of one sequence on all ranks of ``context_parallel``."""
    tensors = (query, key, value)
    if attn_mask is not None or any(type(tensor) is not Tensor for tensor in tensors):
        return ValueError(
            "context_parallel serves scaled_dot_product_attention of plain tensors without attn_mask"
        )
    if query.dim() != 4 or query.shape[-2] != key.shape[-2]:
        return ValueError(
            "context_parallel serves scaled_dot_product_attention of 4-D tensors with as many keys as "
            f"queries, got shapes {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return ValueError(f"{query.shape[1]} query heads on {key.shape[1]} key heads need enable_gqa=True")
    return None


def _servable(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether flashtile gives what PyTorch would, for a plain eager call whose backend nobody restricted."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not (torch._C._get_flash_sdp_enabled() and torch._C._get_math_sdp_enabled())
    ):
        return False
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_cpu for tensor in tensors):
        return False
    if not (inputs_agree(query, key, value) and query.numel() and key.numel()):
        return False
    if query.shape[:-2] != key.shape[:-2] and not (enable_gqa and query.dim() == 4):
        return False
    if attn_mask is None:
        return True
    return not is_causal and _mask_fits(attn_mask, query, key, (torch.bool, query.dtype))


def _mask_fits(mask: Tensor, query: Tensor, key: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    shape = (*query.shape[:-1], key.shape[-2])
    return (
        mask.dtype in dtypes
        and mask.layout is torch.strided
        and mask.dim() <= len(shape)
        and all(size in (1, full) for size, full in zip(reversed(mask.shape), reversed(shape), strict=False))
    )


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel of the CPU flash operator: output with the strides of query, LSE stored as (B, L, H)."""
    problem = _problem(query, key, value, dropout_p, is_causal, attn_mask, scale)
    batch, heads, length, _ = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty(batch, length, heads, dtype=compute_dtype(query.dtype)).transpose(1, 2)
    if out.numel():
        wide_out = out if problem.query.dtype == query.dtype else torch.empty_like(problem.query)
        dispatch.backend(problem).forward(problem, wide_out, lse)
        if wide_out is not out:
            out.copy_(wide_out)
    return out, lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of the CPU flash operator: gradients stored as (B, L, H, E), as the operator promises."""
    problem = _problem(query, key, value, dropout_p, is_causal, attn_mask, scale)
    dtype = problem.query.dtype
    wide_out, wide_grad = out.to(dtype), grad_out.to(dtype)
    grad_query, grad_key, grad_value = (_stored_by_length(tensor, dtype) for tensor in (query, key, value))
    if out.numel():
        gradients = Gradients(grad_query, grad_key, grad_value, bias=None, alibi_slopes=None, sinks=None)
        backend = dispatch.backend(problem, backward=True)
        backend.backward(problem, wide_out, logsumexp, wide_grad, None, gradients)
    else:
        for gradient in (grad_query, grad_key, grad_value):
            gradient.zero_()
    return grad_query.to(query.dtype), grad_key.to(query.dtype), grad_value.to(query.dtype)


def _stored_by_length(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, length, head_dim = tensor.shape
    return tensor.new_empty(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> AttentionProblem:
    """The call as a problem, widened to float32 where a float32 mask would lose its precision otherwise."""
    _check_flash_call(query, key, value, dropout_p, attn_mask)
    scale = default_scale(query) if scale is None else scale
    problem = AttentionProblem(query, key, value, scale, upper=0 if is_causal else None)
    if attn_mask is not None:
        mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if mask.dtype == torch.bool:
            problem.mask = mask
        else:
            problem.bias = mask
            if mask.dtype != query.dtype:
                problem.query, problem.key, problem.value = (t.to(mask.dtype) for t in (query, key, value))
    return problem


def _check_flash_call(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, attn_mask: Tensor | None
) -> None:
    """What PyTorch's kernel refuses, as it refuses it: with a RuntimeError."""

    def check(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"scaled_dot_product_attention (flashtile, CPU flash operator): {message}")

    check(
        inputs_agree(query, key, value) and query.dim() == 4,
        "query, key and value must be 4-D, of matching shapes and dtypes",
    )
    check(query.shape[3] == value.shape[3], "key and value must have the same head_dim")
    check(dropout_p == 0.0, "dropout is not supported here")
    if attn_mask is not None:
        dtypes = (torch.bool, query.dtype, query.dtype if query.dtype == torch.float64 else torch.float32)
        check(
            _mask_fits(attn_mask, query, key, dtypes),
            "attn_mask must be bool, float32 or of query's dtype, and broadcast",
        )
