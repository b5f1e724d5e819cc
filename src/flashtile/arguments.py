"""Checks that the front doors share: every refusal names the argument, what was expected and what came."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from flashtile import masks
from flashtile.dropout import draw_seed, filled_seed
from flashtile.masks import Intervals, Mask
from flashtile.masks.lengths import Lengths
from flashtile.problem import SUPPORTED_DTYPES, compute_dtype


def checked_inputs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The inputs of ``attention``, in the autocast dtype where that is on."""
    check_tensor("query", query)
    check_tensor("key", key)
    check_tensor("value", value)
    query, key, value, bias = autocast(query, key, value, bias)
    if not inputs_agree(query, key, value):
        _refuse_inputs(query, key, value)
    return query, key, value, bias


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


def check_tensor(name: str, argument: object) -> None:
    if not isinstance(argument, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(argument).__name__}")
    if argument.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one; flashtile.attention_varlen takes .values(), "
            "as (total, heads, head_dim), and .offsets() of one with layout torch.jagged"
        )


def _refuse_inputs(query: Tensor, key: Tensor, value: Tensor) -> NoReturn:
    inputs = {"query": query, "key": key, "value": value}
    layout = "(batch, heads, length, head_dim) or (batch, length, head_dim)"
    if query.dim() not in (3, 4):
        raise ValueError(f"query must be {layout}, got {shape_of(query)}")
    for name, tensor in inputs.items():
        if tensor.dim() != query.dim():
            raise ValueError(
                f"{name} must have the number of dimensions of query, {query.dim()}, got {shape_of(tensor)}"
            )
        check_alike(name, tensor, query)
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} must have the batch size of query, {query.shape[0]}, got {shape_of(tensor)}"
            )
    check_shapes(query, key, value, heads_at=(1, 1))
    raise AssertionError("inputs that agree were refused")


def check_alike(name: str, tensor: Tensor, query: Tensor) -> None:
    """Layout, dtype and device of one of the inputs."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
    if tensor.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"{name} must have one of the dtypes {names}, got {tensor.dtype}")
    if tensor.dtype != query.dtype:
        raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
    check_device(name, tensor, query)


def check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads_at: tuple[int, int],
    names: tuple[str, str] = ("key", "value"),
) -> None:
    """Heads and head_dims: heads lie in these dimensions of query and of key, head_dim in the last."""
    for name, tensor in zip(("query", *names), (query, key, value), strict=True):
        if tensor.shape[-1] < 1:
            raise ValueError(f"{name} must have a head_dim of at least 1, got {shape_of(tensor)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{names[0]} must have the head_dim of query, {query.shape[-1]}, got {shape_of(key)}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{names[1]} must have all sizes of {names[0]} but the last, {tuple(key.shape[:-1])}, "
            f"got {shape_of(value)}"
        )
    heads, kv_heads = query.shape[heads_at[0]], key.shape[heads_at[1]]
    if not heads_share(heads, kv_heads):
        raise ValueError(
            f"{names[0]} and {names[1]} must have a number of heads that divides query's {heads}, "
            f"got {shape_of(key)}{_other_layout(query, key, heads_at)}"
        )


def heads_share(heads: int, kv_heads: int) -> bool:
    """Whether every key head belongs to as many query heads as any other."""
    return heads == kv_heads or (kv_heads > 0 and heads % kv_heads == 0)


def check_together(**pair: object) -> None:
    """Refuses one of two arguments without the other."""
    missing = [name for name, value in pair.items() if value is None]
    if len(missing) == 1:
        given = next(name for name in pair if name not in missing)
        raise ValueError(f"{missing[0]} must be given together with {given}, got None")


def _other_layout(query: Tensor, key: Tensor, heads_at: tuple[int, int]) -> str:
    """A hint, where heads would agree if key, or both, had heads and lengths the other way round."""
    swapped = [(0, 1) if tensor.dim() == 3 else (1, 2) for tensor in (query, key)]
    heads, kv_heads = (
        tensor.shape[sum(pair) - at % tensor.dim()]
        for tensor, pair, at in zip((query, key), swapped, heads_at, strict=True)
    )
    if kv_heads == 0 or (heads % kv_heads and query.shape[heads_at[0]] % kv_heads):
        return ""
    length_at, dims = heads_at[1] % key.dim(), ", ".join(map(str, swapped[1]))
    return f"; if dimension {length_at} of these tensors is the length, pass tensor.transpose({dims})"


def autocast(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What PyTorch does for its own operators under autocast: float64 stays, integers stay."""
    if not (torch.is_autocast_enabled("cpu") if query.is_cpu else _autocast_enabled(query.device)):
        return query, key, value, bias
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast(tensor: Tensor) -> Tensor:
        eligible = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast(query), cast(key), cast(value), None if bias is None else cast(bias)


def _autocast_enabled(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


class Sizes(NamedTuple):
    """What masks and biases broadcast to. A length that nobody knows (None) is not checked."""

    batch: int
    heads: int
    query_length: int | None
    key_length: int | None


def checked_options(
    query: Tensor,
    sizes: Sizes,
    *,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    three_dims: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """bias, alibi_slopes and sinks as a problem takes them."""
    if scale is not None:
        _check_number("scale", scale)
    if softcap is not None:
        _check_number("softcap", softcap, above=0.0)
    return (
        None if bias is None else _checked_bias(bias, query, sizes, three_dims),
        None if alibi_slopes is None else _checked_slopes(alibi_slopes, query, sizes),
        None if sinks is None else _checked_sinks(sinks, query, sizes),
    )


def checked_intervals(
    mask: Mask | Tensor, query: Tensor, sizes: Sizes, lengths: Lengths, three_dims: bool = False
) -> Intervals:
    if not isinstance(mask, Mask):
        return Intervals(dense=_checked_mask(mask, query, sizes, three_dims))
    intervals = mask.intervals(lengths)
    if intervals.dense is not None:  # a mask checks every size but this one, which it is not told
        size = intervals.dense.shape[1]
        if size != 1 and size != sizes.heads:
            raise ValueError(
                f"mask must have as many heads as query, {sizes.heads}, or 1, got {size}: {mask!r}"
            )
    return intervals


def refuse_mask(mask: object) -> NoReturn:
    """Raises the TypeError of what is neither a mask nor a tensor."""
    got = type(mask).__name__
    if any(mask is one for one in vars(masks).values()):
        got = f"the function itself; call it, as in masks.{getattr(mask, '__name__', got)}(...)"
    elif callable(mask):
        got += "; functions of positions are not supported, but masks.from_dense takes what they give"
    raise TypeError(f"mask must be a flashtile.Mask or a bool tensor, got {got}")


def _checked_mask(mask: object, query: Tensor, sizes: Sizes, three_dims: bool) -> Tensor:
    if not isinstance(mask, Tensor):
        refuse_mask(mask)
    if mask.dtype != torch.bool:
        hint = (
            "pass an additive mask as bias"
            if mask.dtype.is_floating_point
            else "make mask.bool()[:, None, None] of a padding mask (batch, keys), or use masks.key_lengths"
        )
        raise TypeError(
            f"mask must be a flashtile.Mask or a bool tensor (True = attend), got a {mask.dtype} tensor; "
            + hint
        )
    return _broadcastable("mask", mask, query, sizes, three_dims)


def _checked_bias(bias: Tensor, query: Tensor, sizes: Sizes, three_dims: bool) -> Tensor:
    check_tensor("bias", bias)
    if bias.dtype != query.dtype:
        hint = "pass a bool mask as mask" if bias.dtype == torch.bool else f"pass bias.to({query.dtype})"
        raise TypeError(f"bias must have the dtype of query, {query.dtype}, got {bias.dtype}; {hint}")
    return _broadcastable("bias", bias, query, sizes, three_dims)


def _broadcastable(name: str, tensor: Tensor, query: Tensor, sizes: Sizes, three_dims: bool) -> Tensor:
    """``tensor`` with four dimensions, each of full size or 1."""
    check_device(name, tensor, query)
    batch, heads, query_length, key_length = sizes
    full = (batch, query_length, key_length) if three_dims else (batch, heads, query_length, key_length)
    shape = tensor.shape
    # Not `size in (1, expected)`: torch.compile decides membership of symbolic sizes by identity.
    if len(shape) > len(full) or any(
        size != 1 and expected is not None and size != expected
        for size, expected in zip(shape, full[len(full) - len(shape) :], strict=True)
    ):
        names = "batch, query_length, key_length" if three_dims else "batch, heads, query_length, key_length"
        message = f"{name} must broadcast to ({names}) = {full}, got {shape_of(tensor)}"
        if tuple(shape) == (batch, key_length):
            message += f"; if that is (batch, keys), pass {name}[:, {'' if three_dims else 'None, '}None, :]"
            message += " or masks.key_lengths(...)" if name == "mask" else ""
        raise ValueError(message)
    if three_dims and len(shape) == 3:
        return tensor.unsqueeze(1)
    return tensor[(None,) * (4 - len(shape))] if len(shape) < 4 else tensor


def _checked_slopes(slopes: Tensor, query: Tensor, sizes: Sizes) -> Tensor:
    slopes = _checked_floats("alibi_slopes", slopes, query)
    batch, heads = sizes.batch, sizes.heads
    rows = slopes.shape[0] if slopes.dim() == 2 else 1
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads or (rows != 1 and rows != batch):
        raise ValueError(
            f"alibi_slopes must have shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), "
            f"got {shape_of(slopes)}"
        )
    return slopes if slopes.dim() == 2 else slopes.unsqueeze(0)


def _checked_sinks(sinks: Tensor, query: Tensor, sizes: Sizes) -> Tensor:
    sinks = _checked_floats("sinks", sinks, query)
    if sinks.dim() != 1 or sinks.shape[0] != sizes.heads:
        raise ValueError(f"sinks must have shape (heads,) = ({sizes.heads},), got {shape_of(sinks)}")
    return sinks


def _checked_floats(name: str, tensor: Tensor, query: Tensor) -> Tensor:
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {tensor.dtype}")
    check_device(name, tensor, query)
    return tensor.to(compute_dtype(query.dtype))


def check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")


# What other attention functions call it, where it has no similar name here.
_OTHER_NAMES = {
    "is_causal": "mask=masks.causal()",
    "causal": "mask=masks.causal()",
    "attn_mask": "mask=, where True means that a query sees the key, or bias= for numbers to add",
    "attention_mask": "mask=masks.key_lengths(...) or masks.key_starts(...) for padding",
    "key_padding_mask": "mask=masks.key_lengths(...) or masks.key_starts(...)",
    "block_mask": "mask= with one of flashtile.masks, such as masks.documents(...)",
    "enable_gqa": "nothing: key heads are shared where there are fewer of them",
    "deterministic": "nothing: it always is",
    "softmax_scale": "scale=",
    "s_aux": "sinks=",
    "window_size": "mask=masks.window(left, right)",
    "return_attn_probs": "return_lse=True; nobody has the probabilities",
    "need_weights": "return_lse=True; nobody has the probabilities",
}


def refuse_unknown(function: Callable[..., object], unknown: Mapping[str, object]) -> NoReturn:
    """Raises the TypeError of an argument that does not exist, with the name of what may be meant."""
    name = next(iter(unknown))
    hint = f"; say {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else ""
    if not hint and (similar := difflib.get_close_matches(name, inspect.signature(function).parameters, n=1)):
        hint = f"; did you mean {similar[0]}?"
    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")


def _check_number(name: str, number: object, *, above: float = -math.inf) -> None:
    # A compiled graph may hold a number as a symbol, whose value nobody can ask for.
    if torch.compiler.is_compiling() or isinstance(number, (torch.SymInt, torch.SymFloat)):
        return
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be a Python float, got {_kind_of(number)}")
    if not (math.isfinite(number) and number > above):
        bound = f" and above {above:g}" if above > -math.inf else ""
        raise ValueError(f"{name} must be finite{bound}, got {number}")


def _kind_of(number: object) -> str:
    kind = type(number)
    return f"{kind.__module__}.{kind.__name__}" if kind.__module__ in ("numpy", "torch") else kind.__name__


def checked_seed(dropout_p: object, seed: object, device: torch.device) -> Tensor | None:
    """The seed as an int64 tensor of one element (drawn here if there is none), None without dropout."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a Python float, got {_kind_of(dropout_p)}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"seed must be an int or an int64 tensor of one element, got {seed.dtype} {tuple(seed.shape)}"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
            raise TypeError(f"seed must be an int or an int64 tensor, got {type(seed).__name__}")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
    if dropout_p == 0.0:
        return None
    if seed is None:
        return draw_seed(device)
    if isinstance(seed, Tensor):
        return seed.reshape(1).to(device)
    return filled_seed(seed, device)


def refuse_gradients(what: str, *inputs: object) -> None:
    """For what has no backward: an output that is cut off from its inputs would be silently wrong."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise RuntimeError(
            f"{what} has no gradient: call it under torch.no_grad(), or detach the inputs that require one"
        )


def shape_of(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
