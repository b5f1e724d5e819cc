"""Exact tiled attention (FlashAttention, FlashAttention-2) for PyTorch in pure Python."""

__version__ = "0.1.0"
