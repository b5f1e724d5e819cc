"""What the masks share: checking arguments, and how values print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Alignment = Literal["top-left", "bottom-right"]
Integers = int | Sequence[int] | Tensor
IntegerRows = Sequence[int] | Sequence[Sequence[int]] | Tensor
LONGEST = 2**31 - 1  # positions are int32; a larger bound (sys.maxsize, say) bounds as little as this one


def checked_alignment(alignment: Alignment | None) -> Alignment | None:
    if alignment not in (None, "top-left", "bottom-right"):
        raise ValueError(f'alignment must be "top-left" or "bottom-right", got {alignment!r}')
    return alignment


def values_known(values: Tensor) -> bool:
    """Whether values can be looked at: in host memory, and neither traced, nor fake, nor mapped by vmap."""
    return (
        values.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def check_size(name: str, dimension: str, size: int, expected: int) -> None:
    if size != 1 and size != expected:  # `in` is always false between two symbolic sizes
        raise ValueError(f"{name}: the {dimension} dimension must be {expected} or 1, got {size}")


def integers(values: object, name: str, *, min_dims: int = 0, max_dims: int) -> Tensor:
    if not isinstance(values, Tensor):
        try:
            values = torch.tensor(values, dtype=torch.int64 if values == [] else None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must be an int, a list of ints or a tensor, got {values!r}") from error
    if values.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"{name} must hold integers, got {values.dtype}")
    # Narrower types could not be compared with a length.
    tensor = values if values.dtype in (torch.int32, torch.int64) else values.to(torch.int64)
    if not min_dims <= tensor.ndim <= max_dims:
        raise ValueError(
            f"{name} must have {min_dims} to {max_dims} dimensions, got shape {tuple(tensor.shape)}"
        )
    return tensor


def per_batch(values: Integers, name: str) -> Tensor:
    return integers(values, name, max_dims=1).reshape(-1, 1)


def per_position(values: object, name: str) -> Tensor:
    tensor = integers(values, name, min_dims=1, max_dims=2)
    return tensor if tensor.ndim == 2 else tensor[None]


def is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def call(name: str, *arguments: object, **options: object) -> str:
    shown = [shown_value(argument) for argument in arguments]
    shown += [f"{key}={shown_value(value)}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(shown)})"


def shown_value(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() > 16 or value.device.type != "cpu":
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    return repr((value[:, 0] if value.ndim == 2 and value.shape[1] == 1 else value).tolist())
