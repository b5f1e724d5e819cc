"""For code written for flash-attn: its functions, and ``install()``: ``import flash_attn`` finds them."""

from flashtile.compat.errors import InputError, InputTypeError
from flashtile.compat.finder import install, uninstall

__all__ = ["InputError", "InputTypeError", "install", "uninstall"]
