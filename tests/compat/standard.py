"""Standard attention as flash-attn describes it, in its layout; and its calls as the oracle's problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashtile.problem import AttentionProblem, compute_dtype

# Sizes are (batch, sq, sk, heads, kv_heads, head_dim).
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 33, 47, 3, 3, 16), {}),
    "scale": ((1, 9, 9, 2, 2, 40), {"softmax_scale": 0.3}),
    "causal, more keys": ((2, 17, 40, 4, 2, 24), {"causal": True}),
    "causal, more queries": ((2, 40, 17, 4, 1, 24), {"causal": True}),
    "window": ((1, 65, 70, 2, 2, 59), {"window_size": (12, 7)}),
    "window of one key": ((1, 33, 33, 2, 2, 8), {"window_size": (0, 0)}),
    "window on the left": ((2, 40, 64, 2, 1, 32), {"window_size": (9, -1)}),
    "window on the right": ((2, 40, 33, 2, 1, 32), {"window_size": (-1, 3)}),
    "window right beyond sk, more queries": ((1, 50, 9, 2, 2, 16), {"window_size": (-1, 11)}),
    "window both beyond sk, more queries": ((1, 50, 9, 2, 2, 16), {"window_size": (20, 10)}),
    "causal window": ((2, 48, 60, 4, 2, 16), {"causal": True, "window_size": (10, 5)}),
    "softcap": ((2, 20, 30, 2, 2, 16), {"softcap": 1.5, "causal": True}),
    "alibi": ((2, 20, 30, 6, 2, 16), {"alibi_slopes": "heads", "causal": True}),
    "alibi of the batch": ((2, 30, 20, 4, 2, 16), {"alibi_slopes": "batch"}),
    "sinks": ((2, 20, 30, 4, 2, 16), {"learnable_sink": "heads", "window_size": (4, 0)}),
    "one query": ((3, 1, 70, 8, 2, 111), {"causal": True}),
    "no queries": ((2, 0, 5, 2, 1, 8), {"causal": True}),
    "no keys": ((2, 5, 0, 2, 1, 8), {}),
    "no batch": ((0, 5, 7, 2, 1, 8), {}),
}
LEAVES = {"q": "query", "k": "key", "v": "value", "alibi_slopes": "alibi_slopes", "learnable_sink": "sinks"}


def inputs_of(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of flash_attn_func for a call of ``CALLS``; whatever is differentiable asks for it."""
    (batch, sq, sk, heads, kv_heads, head_dim), options = CALLS[name]
    arguments: dict[str, Any] = {
        "q": torch.randn(batch, sq, heads, head_dim),
        "k": torch.randn(batch, sk, kv_heads, head_dim),
        "v": torch.randn(batch, sk, kv_heads, head_dim),
    }
    arguments = {name: tensor.to(dtype).requires_grad_() for name, tensor in arguments.items()}
    for option, value in options.items():
        if isinstance(value, str):
            shape = (batch, heads) if value == "batch" else (heads,)
            value = torch.rand(shape, dtype=compute_dtype(dtype)).div(4).requires_grad_()
        arguments[option] = value
    return arguments


def leaves_of(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: arguments[name] for name in LEAVES if arguments.get(name) is not None}


def problem_of(arguments: Mapping[str, Any], **fields: Any) -> AttentionProblem:
    """The same call for the oracle, (batch, heads, length, head_dim)."""
    q, k, v = (arguments[name].detach() for name in "qkv")
    left, right = arguments.get("window_size", (-1, -1))
    right = 0 if arguments.get("causal") else right
    diagonal = k.shape[1] - q.shape[1]
    slopes, sinks = (arguments.get(name) for name in ("alibi_slopes", "learnable_sink"))
    return AttentionProblem(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        scale=arguments.get("softmax_scale", q.shape[3] ** -0.5),
        softcap=arguments.get("softcap"),
        lower=None if left < 0 else diagonal - left,
        upper=None if right < 0 else diagonal + right,
        alibi_slopes=None if slopes is None else slopes.detach().reshape(-1, q.shape[2]),
        sinks=None if sinks is None else sinks.detach(),
        **fields,
    )


def standard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, probabilities)`` by the definition: (b, sq, h, d), (b, h, sq), (b, h, sq, sk)."""
    sq, sk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[3] ** -0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    offset = torch.arange(sk) - (torch.arange(sq)[:, None] + sk - sq)  # of a key from the query's own
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(-1, q.shape[2], 1, 1) * offset.abs()
    left, right = window_size
    hidden = (offset > 0) & torch.tensor(causal)
    hidden = hidden | ((offset < -left) if left >= 0 else False)
    hidden = hidden | ((offset > right) if right >= 0 else False)
    weights = scores.exp().masked_fill(hidden, 0.0)
    total = weights.sum(-1)
    if learnable_sink is not None:
        total = total + learnable_sink.exp()[:, None]
    probabilities = weights / total.clamp(min=torch.finfo(q.dtype).tiny)[..., None]
    dropped = probabilities if kept is None else probabilities * kept / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", dropped, v), total.log(), probabilities
