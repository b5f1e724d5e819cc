"""torch.func.vmap over the attention operators: the mapped dimension is folded into the batch.

One kernel call serves all slices. Where that would change the meaning (dropout numbers the heads of the
whole batch; sinks and their gradient have no batch dimension; packed sequences and caches have lengths of
their own) every slice is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_InDims = Sequence[int | None]
# Positions in the operator's problem arguments (see torch_ops).
_FIRST, _LAST, _MASK, _BIAS, _SLOPES, _SINKS, _DROPOUT = 3, 4, 5, 6, 7, 8, 19
_RAGGED = slice(10, 15)


def forward_rule(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The batching rule of ``attention_forward``."""

    def rule(info: Any, in_dims: _InDims, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size: int = info.batch_size
        if _needs_loop(arguments, in_dims):
            return _loop(operator, size, in_dims, arguments)
        batch = _batch(arguments[0], in_dims[0])
        folded = _fold_problem(size, batch, in_dims, arguments, wanted=(False,) * 6)
        out, lse = operator(*folded)
        return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)

    return rule


def backward_rule(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The batching rule of ``attention_backward``."""

    def rule(info: Any, in_dims: _InDims, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size: int = info.batch_size
        wanted: list[bool] = arguments[4]
        problem, problem_dims = arguments[5:], in_dims[5:]
        if wanted[5] or _needs_loop(problem, problem_dims):
            return _loop(operator, size, in_dims, arguments)
        batch = _batch(problem[0], problem_dims[0])
        tensors = [_fold(arguments[i], in_dims[i], size, batch) for i in range(4)]
        folded = _fold_problem(size, batch, problem_dims, problem, wanted)
        gradients = list(operator(*tensors, wanted, *folded))
        for i, flag in enumerate(wanted):
            gradients[i] = gradients[i].unflatten(0, (size, batch)) if flag else gradients[i].expand(size, 0)
        for i, position in ((3, _BIAS), (4, _SLOPES)):
            if wanted[i] and batch > 1 and _batch(problem[position], problem_dims[position]) == 1:
                gradients[i] = gradients[i].sum(1, keepdim=True)
        return tuple(gradients), (0,) * 6

    return rule


def _needs_loop(problem: Sequence[Any], in_dims: _InDims) -> bool:
    ragged = any(tensor is not None for tensor in problem[_RAGGED])
    return ragged or problem[_DROPOUT] > 0 or in_dims[_SINKS] is not None


def _batch(tensor: Tensor, in_dim: int | None) -> int:
    return tensor.shape[0 if in_dim is None or in_dim > 0 else 1]


def _fold_problem(
    size: int, batch: int, in_dims: _InDims, problem: Sequence[Any], wanted: Sequence[bool]
) -> list[Any]:
    folded = list(problem)
    for i in range(3):
        folded[i] = _fold(problem[i], in_dims[i], size, batch)
    for i in (_FIRST, _LAST, _MASK, _BIAS, _SLOPES):
        own_gradient = (i == _BIAS and wanted[3]) or (i == _SLOPES and wanted[4])
        shared = in_dims[i] is None and problem[i] is not None and problem[i].shape[0] == 1
        if not shared or own_gradient:
            folded[i] = _fold(problem[i], in_dims[i], size, batch)
    return folded


def _fold(tensor: Tensor | None, in_dim: int | None, size: int, batch: int) -> Tensor | None:
    """(batch or 1, ...) with the mapped dimension anywhere or missing -> (size * batch, ...)."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0) if in_dim is None else tensor.movedim(in_dim, 0)
    return tensor.expand(size, batch, *tensor.shape[2:]).flatten(0, 1)


def _loop(
    operator: Callable[..., Any], size: int, in_dims: _InDims, arguments: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    slices = [
        operator(
            *(
                argument.select(in_dim, index) if isinstance(in_dim, int) else argument
                for argument, in_dim in zip(arguments, in_dims, strict=True)
            )
        )
        for index in range(size)
    ]
    results = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
    return results, (0,) * len(results)
