"""What is raised for an argument that is refused, in the terms of the function that was called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

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
_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b(?![ -](?:heads|dimension))")


def named(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """``function(*arguments, **options)``; what it refuses, it refuses by the names flash-attn uses."""
    if torch.compiler.is_compiling():
        return function(*arguments, **options)
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError) as error:
        _raise_named(error)


def _raise_named(error: TypeError | ValueError) -> NoReturn:
    message = _NAME.sub(lambda match: _NAMES[match[0]], str(error))
    raise (InputTypeError if isinstance(error, TypeError) else InputError)(message) from error
