"""What is timed in one process: flashtile, torch's SDPA and standard attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile import masks
from flashtile.bench.cases import Case
from flashtile.bench.timing import Run

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def flashtile_attention(case: Case) -> Attention:
    mask = masks.causal(alignment="top-left") if case.causal else None
    return lambda query, key, value: flashtile.attention(query, key, value, mask=mask)


def torch_attention(case: Case) -> Attention:
    grouped = case.groups > 1
    return lambda query, key, value: F.scaled_dot_product_attention(
        query, key, value, is_causal=case.causal, enable_gqa=grouped
    )


def standard_attention(case: Case, device: torch.device | str = "cpu") -> Attention:
    """Three lines with a matrix of scores; the heads of a group are rows of one product."""
    hidden = None
    if case.causal:
        hidden = torch.ones(case.query_length, case.keys, dtype=torch.bool, device=device).triu(1)
        hidden = hidden.repeat(case.groups, 1)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = query.reshape(*key.shape[:2], -1, case.head_dim)
        scores = rows @ key.transpose(-2, -1) * case.head_dim**-0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        out: Tensor = scores.softmax(-1) @ value
        return out.reshape(query.shape)

    return attention


LIBRARIES: dict[str, Callable[[Case], Attention]] = {
    "flashtile": flashtile_attention,
    "torch": torch_attention,
    "standard": standard_attention,
}


def make_run(attention: Attention, case: Case) -> Run:
    """The timed call: the forward pass without gradients, or the backward pass alone."""
    query, key, value, grad = case.inputs()
    if case.direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(query, key, value)

        return forward
    inputs = tuple(tensor.requires_grad_() for tensor in (query, key, value))
    out = attention(*inputs)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


NAMES = ("dquery", "dkey", "dvalue")


def outputs(attention: Attention, case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The output, and for a backward case the three gradients; `dtype` converts the case's inputs first."""
    query, key, value, grad = (tensor.to(dtype or tensor.dtype) for tensor in case.inputs())
    if case.direction == "forward":
        with torch.no_grad():
            return {"output": attention(query, key, value)}
    inputs = tuple(tensor.requires_grad_() for tensor in (query, key, value))
    out = attention(*inputs)
    gradients = torch.autograd.grad(out, inputs, grad)
    return {"output": out.detach(), **dict(zip(NAMES, gradients, strict=True))}


def oracle(case: Case) -> dict[str, Tensor]:
    """The same numbers in float64, from the inputs as the case's dtype holds them."""
    return outputs(standard_attention(case), case, torch.float64)


def largest_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Largest absolute difference of each tensor that was found."""
    return {name: (tensor.double() - exact[name]).abs().max().item() for name, tensor in found.items()}


def left_out(library: str, case: Case, memory: int, patient: bool = False) -> str | None:
    """Why standard attention should not be tried on this case, or None; the others always are.

    It needs room for its scores in `memory` bytes and, unless the caller is `patient`, an end in sight.
    """
    if library != "standard":
        return None
    scores = case.batch * case.heads * case.query_length * case.keys * (4 if case.dtype == "fp32" else 2)
    if 4 * scores > memory // 2:
        return f"its scores need {4 * scores / 2**30:.0f} GiB"
    if case.dtype == "fp16" and case.flops > 2e10 and not patient:
        return "torch's float16 products take very long"
    return None
