"""One call for any algorithm of the lab: checks, loops over heads, counts forward and backward apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from flashtile.arguments import check_shapes, check_tensor, shape_of
from flashtile.checks import check_choice
from flashtile.dropout import keep_threshold
from flashtile.lab import flash1, flash2, standard
from flashtile.lab.memory import Counts, Memory
from flashtile.lab.setting import Blocks, Setting, check_blocks
from flashtile.masks import Mask
from flashtile.masks.lengths import Uniform
from flashtile.problem import default_scale

Algorithm = Literal["standard", "flash1", "flash2"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value, or their gradients


@dataclass
class Run:
    """What an algorithm computed, and what it did for it; ``gradients`` are those of query, key and value."""

    out: Tensor
    forward: Counts
    gradients: Inputs | None = None
    backward: Counts | None = None


def run(
    algorithm: Algorithm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    *,
    blocks: Blocks,
    backward_blocks: Blocks | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    element_size: int = 2,
) -> Run:
    """Attention by one of the papers' algorithms, head by head, with every access to memory counted.

    Args:
        algorithm: "standard", "flash1" or "flash2".
        query: (B, H, N, d), any floating dtype, in which everything is computed.
        key: (B, H, N_k, d).
        value: (B, H, N_k, d_v).
        grad_out: (B, H, N, d_v), the gradient of the output: with it the backward pass runs, too.
        blocks: the tile of the two FlashAttentions; standard attention has none.
        backward_blocks: the same for the backward pass; by default those of the forward pass.
        mask: causal or a window, or both (``flashtile.masks``); FlashAttention skips the tiles that it hides.
        scale: factor of the scores; d ** -0.5 by default.
        dropout_p, seed: as in ``flashtile.attention``, whose mask this is.
        element_size: bytes of a number, for counting.

    As in the papers a hidden score is -inf and its probability 0, which does not stop a NaN or infinity in
    the value of a hidden key: unlike in ``flashtile.attention``, it reaches all rows of a tile.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    tiles = blocks, blocks if backward_blocks is None else backward_blocks
    for name, one in zip(("blocks", "backward_blocks"), tiles, strict=True):
        check_blocks(name, one)
    _check(query, key, value, grad_out)
    keep_threshold(dropout_p)  # refuses what is no probability
    lower, upper = band(mask, query.shape[2], key.shape[2])
    batch, heads = query.shape[:2]
    memories = Memory(element_size), Memory(element_size)
    outs: list[Tensor] = []
    gradients: list[Inputs] = []
    with torch.no_grad():
        for head in range(batch * heads):
            setting = Setting(
                scale=default_scale(query) if scale is None else scale,
                lower=lower, upper=upper, dropout_p=dropout_p, seed=seed, head=head,
            )  # fmt: skip
            q, k, v = (tensor.flatten(0, 1)[head] for tensor in (query, key, value))
            upstream = None if grad_out is None else grad_out.flatten(0, 1)[head]
            out, found = one_head(algorithm, (q, k, v), upstream, tiles, setting, memories)
            outs.append(out)
            if found is not None:
                gradients.append(found)

    def together(parts: Iterable[Tensor]) -> Tensor:
        stacked = torch.stack(list(parts))
        return stacked.view(batch, heads, *stacked.shape[1:])

    forward, backward = (memory.counts for memory in memories)
    if grad_out is None:
        return Run(together(outs), forward)
    grad_query, grad_key, grad_value = (together(parts) for parts in zip(*gradients, strict=True))
    return Run(together(outs), forward, (grad_query, grad_key, grad_value), backward)


def band(mask: Mask | None, query_length: int, key_length: int) -> tuple[int | None, int | None]:
    """``(lower, upper)`` of a mask: key j is visible to query i where i + lower <= j <= i + upper."""
    if mask is None:
        return None, None
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a flashtile.Mask, got {type(mask).__name__}")
    found = mask.intervals(Uniform(1, query_length, key_length, torch.device("cpu")))
    if found.first is not None or found.last is not None or found.dense is not None:
        raise ValueError(f"mask must be causal, a window or both in the lab, got {mask!r}")
    return found.lower, found.upper


def _check(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} must be (batch, heads, length, head_dim), none of them 0, got {shape_of(tensor)}"
            )
        if not tensor.is_floating_point() or tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's floating-point dtype, got {tensor.dtype}")
    check_shapes(query, key, value, heads_at=(1, 1))
    if key.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"key must have the batch and heads of query, {tuple(query.shape[:2])}, got {shape_of(key)}"
        )
    if grad_out is not None:
        check_tensor("grad_out", grad_out)
        expected = (*query.shape[:3], value.shape[3])
        if tuple(grad_out.shape) != expected or grad_out.dtype != query.dtype:
            raise ValueError(
                f"grad_out must be {expected} of {query.dtype}, got {shape_of(grad_out)} of {grad_out.dtype}"
            )


def one_head(
    algorithm: Algorithm,
    inputs: Inputs,
    grad_out: Tensor | None,
    blocks: tuple[Blocks, Blocks],
    setting: Setting,
    memories: tuple[Memory, Memory],
) -> tuple[Tensor, Inputs | None]:
    """The output and the gradients of one head; blocks and memories are those of forward and backward."""
    forward, backward = memories
    if algorithm == "standard":
        out, probabilities = standard.forward(*inputs, setting, forward)
        if grad_out is None:
            return out, None
        return out, standard.backward(*inputs, probabilities, grad_out, setting, backward)
    if algorithm == "flash1":
        out, row_sum, row_max = flash1.forward(*inputs, blocks[0], setting, forward)
        if grad_out is None:
            return out, None
        saved = out, grad_out, row_sum, row_max
        return out, flash1.backward(*inputs, *saved, blocks[1], setting, backward)
    out, lse = flash2.forward(*inputs, blocks[0], setting, forward)
    if grad_out is None:
        return out, None
    return out, flash2.backward(*inputs, out, grad_out, lse, blocks[1], setting, backward)
