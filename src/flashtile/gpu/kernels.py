"""Both passes of the Triton kernels, as ``flashtile.dispatch`` calls them."""

from .engine import forward
from .engine_backward import backward

__all__ = ["backward", "forward"]
