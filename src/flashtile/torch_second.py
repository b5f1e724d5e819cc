"""The derivative of the backward operator, by standard attention: exact, but with memory quadratic in length.

FlashAttention has no tiled second derivative. It is asked for rarely (gradient penalties, Hessians of small
models), so the textbook formula is differentiated twice instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile import reference
from flashtile.problem import AttentionProblem, compute_dtype

_NAMES = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
_vjp: Any = torch.func.vjp  # annotated as if it always returned an auxiliary output


def differentiate_backward(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the backward operator's results, weighted by ``upstream``, with respect to its inputs.

    ``upstream`` belongs to the gradients of query, key, value, bias, alibi_slopes and sinks; what comes back
    to grad_out, grad_lse and then the same six. None stands for what is absent. All of it can be
    differentiated again.
    """
    inputs = {"grad_out": grad_out, "grad_lse": grad_lse} | {name: getattr(problem, name) for name in _NAMES}
    present = {name: tensor for name, tensor in inputs.items() if tensor is not None}

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(present, tensors, strict=True))
        weights = given.pop("grad_out"), given.pop("grad_lse", None)

        def standard(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            changed = dataclasses.replace(problem, **dict(zip(given, tensors, strict=True)))
            wide = reference.cast(changed, compute_dtype(problem.query.dtype))
            return reference.attention(wide, row_by_row=False)

        (out, lse), pull_back = _vjp(standard, *given.values())
        grad_lse = torch.zeros_like(lse) if weights[1] is None else weights[1]
        return tuple(pull_back((weights[0].to(out.dtype), grad_lse)))

    first, pull_back = _vjp(gradients, *present.values())
    names = [name for name in _NAMES if name in present]
    weighted = dict(zip(_NAMES, upstream, strict=True))
    weights = (
        torch.zeros_like(gradient) if (weight := weighted[name]) is None else weight
        for name, gradient in zip(names, first, strict=True)
    )
    second = dict(zip(present, pull_back(tuple(weights)), strict=True))
    return [second.get(name) for name in inputs]
