"""Exact tiled attention (FlashAttention, FlashAttention-2) for PyTorch in pure Python."""

from flashtile.attention import attention
from flashtile.masks import Mask

__version__ = "0.1.0"
__all__ = ["Mask", "attention"]
