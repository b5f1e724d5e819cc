"""PyTorch's own attention where the kernels cannot serve a call and it means the same; otherwise a refusal.

Two cases. float64 tensors, which the kernels do not compute, get standard attention in plain PyTorch
(``flashtile.reference``): every option, memory quadratic in the lengths, as PyTorch's own float64 has it.
All others get PyTorch's memory-efficient kernel, which unlike its flash kernel returns the LSE on every GPU
and takes any head_dim. It has no softcap, ALiBi, sinks, windows or packed sequences, and its dropout mask has
other bits: all of that is refused. In both, as in PyTorch, a NaN behind a mask may reach every query.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from flashtile import reference

if TYPE_CHECKING:
    from torch import Tensor

    from flashtile.problem import AttentionProblem, Gradients

SERVES = (
    "float64 with every option but packed sequences and caches, its memory quadratic; other dtypes with "
    "masks and biases that are tensors, grouped heads, top-left causal"
)
_EFFICIENT: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
_DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
_vjp: Any = torch.func.vjp  # annotated as if it always returned an auxiliary output


def refusal(problem: AttentionProblem) -> str | None:
    """What PyTorch's attention would compute differently, or not at all; None if it means the same."""
    if problem.part is not None:
        return "it computes no part of a larger problem, which attention over several ranks is made of"
    if problem.ragged:
        return "it has no packed sequences and no cache that keep their lengths on the device"
    if problem.query.dtype == torch.float64:
        return None
    if problem.query.dtype == torch.bfloat16 and not torch.version.hip and _capability(problem) < (8, 0):
        return "it has no bfloat16 before compute capability 8.0"
    for used, what in (
        (problem.softcap is not None, "it has no softcap"),
        (problem.alibi_slopes is not None, "it has ALiBi only as a matrix of biases"),
        (problem.sinks is not None, "it has no sinks"),
        (problem.dropout_p > 0, "its dropout mask has other bits"),
        (problem.lower is not None, "it has windows only as a matrix"),
        (
            problem.upper not in (None, 0),
            "it has causal only top-left, and windows only as a matrix",
        ),
        (problem.first is not None, "it has intervals of keys only as a matrix"),
    ):
        if used:
            return what
    return None


def _capability(problem: AttentionProblem) -> tuple[int, int]:
    return torch.cuda.get_device_capability(problem.query.device)


def forward(problem: AttentionProblem, out: Tensor, lse: Tensor) -> None:
    """Writes O (B, Hq, Sq, Dv) and LSE (B, Hq, Sq) of one problem that is not refused."""
    if problem.query.dtype == torch.float64:
        result, result_lse = reference.attention(problem, row_by_row=False)
    elif not problem.key.numel():
        out.zero_()
        lse.fill_(-torch.inf)
        return
    else:
        inputs, nothing, causal = _efficient_inputs(problem)
        result, result_lse, *_ = _EFFICIENT(*inputs, True, 0.0, causal, scale=problem.scale)
        result = result[..., : out.shape[3]]
        result_lse = result_lse[..., : lse.shape[2]]  # the kernel rounds the length up
        if nothing is not None:
            result = result.masked_fill(nothing, 0.0)
            result_lse = result_lse.masked_fill(nothing.squeeze(3), -torch.inf)
    out.copy_(result)
    lse.copy_(result_lse)


def backward(
    problem: AttentionProblem,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    gradients: Gradients,
) -> None:
    """Writes every gradient that is wanted; computes the forward pass once more."""
    if problem.query.dtype == torch.float64:
        _backward_standard(problem, grad_out, grad_lse, gradients)
    elif not problem.key.numel():
        gradients.zero_()
    elif grad_lse is not None:
        raise NotImplementedError(
            "flashtile: PyTorch's attention, which serves this call, has no gradient of the LSE"
        )
    else:
        _backward_efficient(problem, grad_out, gradients)


def _backward_standard(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, gradients: Gradients
) -> None:
    wanted = [name for name in _DIFFERENTIABLE if getattr(gradients, name) is not None]

    def standard(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        changes: dict[str, Any] = dict(zip(wanted, tensors, strict=True))
        return reference.attention(dataclasses.replace(problem, **changes), row_by_row=False)

    # Not autograd: an operator's kernel runs below it, where nothing is recorded.
    (_, lse), pull_back = _vjp(standard, *(getattr(problem, name) for name in wanted))
    found = pull_back((grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse))
    for name, gradient in zip(wanted, found, strict=True):
        getattr(gradients, name).copy_(gradient)


def _backward_efficient(problem: AttentionProblem, grad_out: Tensor, gradients: Gradients) -> None:
    inputs, nothing, causal = _efficient_inputs(problem)
    result, result_lse, *dropout = _EFFICIENT(*inputs, True, 0.0, causal, scale=problem.scale)
    if nothing is not None:
        grad_out = grad_out.masked_fill(nothing, 0.0)
    wanted = [True, True, True, gradients.bias is not None]
    found = _EFFICIENT_BACKWARD(
        _rows(grad_out), *inputs, result, result_lse, *dropout, 0.0, wanted, causal, scale=problem.scale
    )
    gradients.query.copy_(found[0][..., : problem.query.shape[3]])
    for gradient, repeated in ((gradients.key, found[1]), (gradients.value, found[2])):
        batch, heads, length, head_dim = gradient.shape
        groups = repeated[..., :head_dim].reshape(batch, heads, -1, length, head_dim)
        gradient.copy_(groups.sum(2, dtype=torch.float32))
    if gradients.bias is not None:
        gradients.bias.copy_(found[3].to(torch.float32).sum_to_size(gradients.bias.shape))


def _efficient_inputs(
    problem: AttentionProblem,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor | None, bool]:
    """query, key, value and bias as the kernel takes them, the rows that see nothing, and whether causal.

    Rows that see nothing, bool (B or 1, H or 1, Sq or 1, 1), see everything here, so that none has a result
    that is not a number; the caller replaces it.
    """
    group = problem.query.shape[1] // problem.key.shape[1]
    key, value = (
        _rows(tensor if group == 1 else tensor.repeat_interleave(group, 1))
        for tensor in (problem.key, problem.value)
    )
    matrix = problem.bias
    if problem.mask is not None:
        visible = problem.query.new_zeros(()) if matrix is None else matrix
        matrix = torch.where(problem.mask, visible, -torch.inf)
    if matrix is None:
        return (_rows(problem.query), key, value, None), None, problem.upper is not None
    batch, heads, queries, _ = problem.query.shape
    keys = key.shape[2]
    matrix = matrix.expand(-1, -1, -1, keys)
    if problem.upper is not None:
        later = torch.ones(queries, keys, dtype=torch.bool, device=key.device).triu(1)
        matrix = matrix.masked_fill(later, -torch.inf)
    nothing = (matrix == -torch.inf).all(3, keepdim=True)
    # The kernel reads rows that begin at a multiple of 16 numbers.
    matrix = F.pad(matrix.masked_fill(nothing, 0.0), (0, -keys % 16))[..., :keys]
    matrix = matrix.expand(batch, heads, queries, keys)
    return (_rows(problem.query), key, value, matrix), nothing, False


def _rows(tensor: Tensor) -> Tensor:
    """Contiguous rows of a multiple of 8 numbers, which the kernel needs."""
    missing = -tensor.shape[3] % 8
    return (F.pad(tensor, (0, missing)) if missing else tensor).contiguous()
