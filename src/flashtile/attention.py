"""``flashtile.attention``: validates a call once and hands it to the kernels."""

from __future__ import annotations

import math
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile import dispatch, torch_ops
from flashtile.masks import Intervals, Mask
from flashtile.problem import SUPPORTED_DTYPES, AttentionProblem, compute_dtype, default_scale

_NO_MASK = Intervals()


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention in tiles, forward and backward, with memory linear in the lengths.

    Computes ``dropout(softmax(softcap(scale * query @ key^T) + bias - alibi)) @ value``, the softmax over the
    keys a query sees (FlashAttention-2, algorithms 1 and 2). A query that sees none gets output 0, LSE -inf
    and gradients 0.
    Differentiable in query, key, value, bias, alibi_slopes and sinks, through the output and the LSE. A
    second derivative is exact too, but standard attention computes it, with memory quadratic in the lengths.

    Args:
        query: (B, Hq, Sq, D), or (N, L, D) for N sequences of one head; float64, float32, bfloat16 or
            float16, any strides.
        key: (B, Hkv, Sk, D), query's dtype. Hkv divides Hq: query head h reads key head ``h // (Hq // Hkv)``.
        value: (B, Hkv, Sk, Dv), query's dtype.
        mask: a ``flashtile.Mask`` (``flashtile.masks``; costs no memory), or a bool tensor that broadcasts to
            (B, Hq, Sq, Sk), True where the query may see the key.
        bias: query's dtype, broadcasts to (B, Hq, Sq, Sk); added to the scores; -inf hides a key.
        scale: factor of the scores; D ** -0.5 by default.
        softcap: bounds the scaled scores smoothly: ``softcap * tanh(score / softcap)``.
        alibi_slopes: (Hq,) or (B, Hq), any floating dtype; subtracts ``slope * |i + Sk - Sq - j|`` from score
            (i, j).
        sinks: (Hq,), any floating dtype; one more logit per head in the softmax's denominator, with no value.
        dropout_p: probability with which an entry of the softmax is dropped; the kept ones are divided by
            ``1 - dropout_p``.
        seed: 64-bit seed of the dropout mask (see ``flashtile.dropout_mask``). By default drawn from
            PyTorch's generator, so torch.manual_seed and torch.utils.checkpoint govern it.
        return_lse: also return the LSE, the natural log of the sum of exponentials of every row of scores.

    Returns:
        The output (B, Hq, Sq, Dv) in query's dtype and memory order; with ``return_lse`` also the LSE
        (B, Hq, Sq) in float32 (float64 for float64 inputs). Both lose the head dimension for 3-D inputs.

    Under autocast query, key, value and bias take the autocast dtype.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value.
        NotImplementedError: no backend serves the device.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        _refuse_types(query=query, key=key, value=value)
    if torch.is_autocast_enabled("cpu") if query.is_cpu else _autocast_enabled(query.device):
        query, key, value, bias = _autocast(query, key, value, bias)
    if not inputs_agree(query, key, value):
        _refuse_inputs(query, key, value)
    three_dims = query.dim() == 3
    if three_dims:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    if scale is not None:
        _check_number("scale", scale)
    if softcap is not None:
        _check_number("softcap", softcap, above=0.0)
    intervals = _NO_MASK
    if mask is not None:
        if isinstance(mask, Mask):
            intervals = _resolved(mask, query, key.shape[2])
        else:
            intervals = Intervals(dense=_checked_mask(mask, query, key.shape[2], three_dims))
    if bias is not None:
        bias = _checked_bias(bias, query, key.shape[2], three_dims)
    if alibi_slopes is not None:
        alibi_slopes = _checked_slopes(alibi_slopes, query)
    if sinks is not None:
        sinks = _checked_sinks(sinks, query)
    seed_tensor = None
    if dropout_p != 0.0 or seed is not None:
        seed_tensor = _seed_tensor(dropout_p, seed, query.device)

    lower, upper, first, last, dense = intervals
    plain = bias is None and alibi_slopes is None and sinks is None and dense is None and seed_tensor is None
    if plain and _undisturbed(query, key, value):
        scale = default_scale(query) if scale is None else scale
        out, lse = torch_ops.forward(
            AttentionProblem(query, key, value, scale, softcap, lower, upper, first, last)
        )
    else:
        dispatch.check_device(query.device)
        out, lse = torch_ops.attention_forward(
            query, key, value, first, last, dense, bias, alibi_slopes, sinks, seed_tensor,
            scale, softcap, lower, upper, dropout_p,
        )  # fmt: skip
    if three_dims:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


_KEYS = torch._C.DispatchKey
_INCLUDED = torch._C.DispatchKeySet(_KEYS.BackendSelect)
_INCLUDED_KEYS = (_INCLUDED.raw_repr(), _INCLUDED.add(_KEYS.ADInplaceOrView).raw_repr())


def _undisturbed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a backend may be called past PyTorch's dispatcher: nobody would notice, and it costs less.

    Nobody does if no gradient is recorded, the tensors are ordinary CPU tensors (no subclass, nothing lazy)
    and no mode, transform, tracer or profiler is active.
    """
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    ):
        return False
    return (
        type(query) is type(key) is type(value) is Tensor
        and query.is_cpu
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        and torch._C._dispatch_tls_local_include_set().raw_repr() in _INCLUDED_KEYS
        and not torch._C._len_torch_function_stack()
        and not torch._C._autograd._profiler_enabled()
        and forward_ad._current_level < 0
    )


def inputs_agree(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the three inputs fit together: decides fast; ``_refuse_inputs`` finds the reason if not."""
    shape, key_shape, value_shape = query.shape, key.shape, value.shape
    rank = len(shape)
    return (
        (rank == 4 or rank == 3)
        and query.dtype is key.dtype is value.dtype
        and query.dtype in SUPPORTED_DTYPES
        and ((query.is_cpu and key.is_cpu and value.is_cpu) or query.device == key.device == value.device)
        and query.layout is key.layout is value.layout is torch.strided
        and (
            shape == key_shape == value_shape
            or (
                rank == len(key_shape) == len(value_shape)
                and shape[0] == key_shape[0]
                and key_shape[:-1] == value_shape[:-1]
                and shape[-1] == key_shape[-1]
                and (
                    rank == 3
                    or shape[1] == key_shape[1]
                    or (key_shape[1] > 0 and shape[1] % key_shape[1] == 0)
                )
                and value_shape[-1] > 0
            )
        )
        and shape[-1] > 0
    )


def _refuse_types(**arguments: object) -> NoReturn:
    name, argument = next((name, value) for name, value in arguments.items() if not isinstance(value, Tensor))
    raise TypeError(f"{name} must be a torch.Tensor, got {type(argument).__name__}")


def _refuse_inputs(query: Tensor, key: Tensor, value: Tensor) -> NoReturn:
    inputs = {"query": query, "key": key, "value": value}
    layout = "(batch, heads, length, head_dim) or (batch, length, head_dim)"
    if query.dim() not in (3, 4):
        raise ValueError(f"query must be {layout}, got {_shape(query)}")
    for name, tensor in inputs.items():
        if tensor.dim() != query.dim():
            raise ValueError(
                f"{name} must have the number of dimensions of query, {query.dim()}, got {_shape(tensor)}"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
        if tensor.dtype not in SUPPORTED_DTYPES:
            names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
            raise TypeError(f"{name} must have one of the dtypes {names}, got {tensor.dtype}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} must have the batch size of query, {query.shape[0]}, got {_shape(tensor)}"
            )
        if tensor.shape[-1] < 1:
            raise ValueError(f"{name} must have a head_dim of at least 1, got {_shape(tensor)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the head_dim of query, {query.shape[-1]}, got {_shape(key)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"value must have batch, heads and length of key, {tuple(key.shape[:-1])}, got {_shape(value)}"
        )
    raise ValueError(
        f"key and value must have a number of heads that divides query's {query.shape[1]}, got {_shape(key)}"
    )


def _autocast_enabled(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What PyTorch does for its own operators under autocast: float64 stays, integers stay."""
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast(tensor: Tensor) -> Tensor:
        eligible = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast(query), cast(key), cast(value), None if bias is None else cast(bias)


def _resolved(mask: Mask, query: Tensor, key_length: int) -> Intervals:
    batch, heads, query_length, _ = query.shape
    intervals = mask.resolve(batch, query_length, key_length, query.device)
    if intervals.dense is not None:  # a mask checks every size but this one, which it is not told
        size = intervals.dense.shape[1]
        if size != 1 and size != heads:
            raise ValueError(f"mask must have as many heads as query, {heads}, or 1, got {size}: {mask!r}")
    return intervals


def _checked_mask(mask: object, query: Tensor, key_length: int, three_dims: bool) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a flashtile.Mask or a bool tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be a flashtile.Mask or a bool tensor (True = attend), got a {mask.dtype} tensor; "
            "pass an additive mask as bias"
        )
    return _broadcastable("mask", mask, query, key_length, three_dims)


def _checked_bias(bias: object, query: Tensor, key_length: int, three_dims: bool) -> Tensor:
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a torch.Tensor, got {type(bias).__name__}")
    if bias.dtype != query.dtype:
        hint = "; pass a bool mask as mask" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias must have the dtype of query, {query.dtype}, got {bias.dtype}{hint}")
    return _broadcastable("bias", bias, query, key_length, three_dims)


def _broadcastable(name: str, tensor: Tensor, query: Tensor, key_length: int, three_dims: bool) -> Tensor:
    """``tensor`` with four dimensions, each of full size or 1."""
    batch, heads, query_length, _ = query.shape
    _check_device(name, tensor, query)
    full: tuple[int, ...] = (batch, heads, query_length, key_length)
    shape = tensor.shape
    if three_dims:
        full = (batch, query_length, key_length)
    # Not `size in (1, expected)`: torch.compile decides membership of symbolic sizes by identity.
    if len(shape) > len(full) or any(
        size != 1 and size != expected
        for size, expected in zip(reversed(shape), reversed(full), strict=False)
    ):
        sizes = "batch, query_length, key_length" if three_dims else "batch, heads, query_length, key_length"
        raise ValueError(f"{name} must broadcast to ({sizes}) = {full}, got {_shape(tensor)}")
    if three_dims and len(shape) == 3:
        return tensor.unsqueeze(1)
    return tensor[(None,) * (4 - len(shape))] if len(shape) < 4 else tensor


def _checked_slopes(slopes: object, query: Tensor) -> Tensor:
    slopes = _checked_floats("alibi_slopes", slopes, query)
    batch, heads = query.shape[:2]
    rows = slopes.shape[0] if slopes.dim() == 2 else 1
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads or (rows != 1 and rows != batch):
        raise ValueError(
            f"alibi_slopes must have shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), "
            f"got {_shape(slopes)}"
        )
    return slopes if slopes.dim() == 2 else slopes.unsqueeze(0)


def _checked_sinks(sinks: object, query: Tensor) -> Tensor:
    sinks = _checked_floats("sinks", sinks, query)
    if sinks.dim() != 1 or sinks.shape[0] != query.shape[1]:
        raise ValueError(f"sinks must have shape (heads,) = ({query.shape[1]},), got {_shape(sinks)}")
    return sinks


def _checked_floats(name: str, tensor: object, query: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {tensor.dtype}")
    _check_device(name, tensor, query)
    return tensor.to(compute_dtype(query.dtype))


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")


def _check_number(name: str, number: object, *, above: float = -math.inf) -> None:
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(number).__name__}")
    if not (math.isfinite(number) and number > above):
        bound = f" and above {above:g}" if above > -math.inf else ""
        raise ValueError(f"{name} must be finite{bound}, got {number}")


def _seed_tensor(dropout_p: object, seed: object, device: torch.device) -> Tensor | None:
    """The seed as an int64 tensor of one element (drawn here if there is none), None without dropout."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a float, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
            raise TypeError(f"seed must be an int, got {type(seed).__name__}")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.tensor([seed if seed < 2**63 else seed - 2**64], dtype=torch.int64, device=device)


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
