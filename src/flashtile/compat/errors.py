"""What is raised for an argument that is refused, in the terms of the function that was called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch


class InputError(ValueError, RuntimeError):
    """A wrong shape, value, dtype or device.

    flash-attn refuses inputs with a RuntimeError, flashtile with a ValueError: code written for either
    catches this one.
    """


class InputTypeError(InputError, TypeError):
    """An argument of a wrong type or dtype."""


# What flashtile's own functions call flash-attn's arguments.
_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    "cache_lengths": "cache_seqlens",
    "batch_index": "cache_batch_idx",
    "left_padding": "cache_leftpad",
    "scale": "softmax_scale",
    "sinks": "learnable_sink",
}


def named(
    function: Callable[..., Any], /, *arguments: Any, names: Mapping[str, str] | None = None, **options: Any
) -> Any:
    """``function(*arguments, **options)``, refused with flash-attn's names of the arguments, or ``names``."""
    if torch.compiler.is_compiling():
        return function(*arguments, **options)
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError) as error:
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        raise kind(_renamed(str(error), _NAMES | dict(names or {}))) from error


def _renamed(message: str, names: Mapping[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], message)
