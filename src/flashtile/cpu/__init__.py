"""The CPU engine: exact attention, forward and backward, as Numba kernels over SIMD values."""

from .engine import backward, forward

__all__ = ["backward", "forward"]
