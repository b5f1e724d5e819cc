"""Exact tiled attention (FlashAttention, FlashAttention-2) for PyTorch in pure Python."""

from flashtile import masks
from flashtile.attention import attention
from flashtile.dropout import dropout_mask
from flashtile.integrations.sdpa import activate, activated, deactivate
from flashtile.masks import Mask

__version__ = "0.1.0"
__all__ = ["Mask", "activate", "activated", "attention", "deactivate", "dropout_mask", "masks"]
