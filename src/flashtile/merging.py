"""``flashtile.merge``: partial attention results over disjoint keys become the result over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.arguments import shape_of
from flashtile.problem import SUPPORTED_DTYPES, compute_dtype


def merge(outputs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from N results over disjoint parts of them: exact, and differentiable.

    Each part is weighed by its share of the softmax's denominator, ``exp(lse - lse of all)``: what the online
    softmax does between two tiles (FlashAttention, section 3.1). Averaging would be wrong.

    Args:
        outputs: N outputs of the same queries, (..., L, Dv) each, as a sequence or stacked in one tensor
            (N, ..., L, Dv).
        lses: their LSEs, (..., L) each, in the compute dtype (float32; float64 for float64 outputs) as
            ``return_lse=True`` gives them; of ``attention_varlen``, turned: ``lse.mT``.

    Returns:
        ``(out, lse)`` over the union of the keys, (..., L, Dv) in the outputs' dtype and (..., L). A query
        that saw no key in any part has output 0 and LSE -inf; a part in which it saw none does not count,
        whatever its output holds. A sink belongs to one part only: in two it would count twice. An LSE of
        infinity, by such a sink, takes everything.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: no parts, or shapes that do not fit together.
    """
    parts, rows = _tensors("outputs", outputs), _tensors("lses", lses)
    if len(parts) != len(rows):
        raise ValueError(f"lses must have one LSE per output, {len(parts)}, got {len(rows)}")
    dtype = parts[0].dtype
    if dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"outputs must have one of the dtypes {names}, got {dtype}")
    for name, tensors, expected in (
        ("outputs", parts, parts[0].shape),
        ("lses", rows, parts[0].shape[:-1]),
    ):
        wanted = dtype if name == "outputs" else compute_dtype(dtype)
        for tensor in tensors:
            if tensor.dtype != wanted:
                raise TypeError(f"{name} must have the dtype {wanted}, got {tensor.dtype}")
            if tensor.device != parts[0].device:
                raise ValueError(f"{name} must all be on {parts[0].device}, got {tensor.device}")
            if tensor.shape != expected:
                raise ValueError(f"{name} must have shape {tuple(expected)} each, got {shape_of(tensor)}")
    out, lse = combine(parts, rows)
    return out.to(dtype), lse


def combine(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What ``merge`` computes, in the dtype of the LSEs."""
    lse = torch.stack(tuple(lses))
    seen, infinite = lse != -torch.inf, lse == torch.inf
    # By a sink of infinity, which leaves nothing to the others; a NaN stays.
    taken = infinite.any(dim=0) & ~lse.isnan().any(dim=0)
    weighed = seen.any(dim=0) & ~taken
    counted = seen & weighed
    # Infinities never reach an exponential: it would have no gradient (inf - inf, 0 x inf).
    total = torch.logsumexp(
        torch.where(counted | ~weighed, lse.masked_fill(~weighed, 0.0), -torch.inf), dim=0
    )
    share = torch.exp(torch.where(counted, lse.masked_fill(~seen, 0.0) - total, 0.0))
    weight = torch.where(counted, share, (taken & infinite).to(share.dtype))
    out = (torch.where(seen[..., None], torch.stack(tuple(outputs)), 0.0) * weight[..., None]).sum(dim=0)
    otherwise = torch.where(taken, torch.where(infinite, lse, 0.0).sum(dim=0), -torch.inf)
    return out, torch.where(weighed, total, otherwise)


def _tensors(name: str, values: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if not isinstance(values, (Tensor, Sequence)):
        raise TypeError(f"{name} must be a tensor or a sequence of tensors, got {type(values).__name__}")
    tensors = list(values.unbind() if isinstance(values, Tensor) and values.dim() else values)
    if not tensors:
        raise ValueError(f"{name} must hold at least one tensor, got none")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must hold tensors, got {type(tensor).__name__}")
    return tensors
