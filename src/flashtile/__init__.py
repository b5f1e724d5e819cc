"""Exact tiled attention (FlashAttention, FlashAttention-2) for PyTorch in pure Python."""

from flashtile import masks, reference, rotary
from flashtile.attention import attention
from flashtile.dropout import dropout_mask
from flashtile.integrations.sdpa import activate, activated, deactivate
from flashtile.kvcache import attention_kvcache
from flashtile.masks import Mask
from flashtile.merging import merge
from flashtile.varlen import attention_varlen

__version__ = "0.1.0"
__all__ = [
    "Mask",
    "activate",
    "activated",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "deactivate",
    "dropout_mask",
    "masks",
    "merge",
    "reference",
    "rotary",
]
