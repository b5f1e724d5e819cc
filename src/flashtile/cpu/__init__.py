"""The CPU engine: exact attention, forward and backward, as Numba kernels over SIMD values."""

from .engine import backward, forward
from .kinds import TARGET

__all__ = ["backward", "describe", "forward"]


def describe() -> dict[str, str]:
    """What the kernels use on this machine: instruction set and lanes of float32."""
    return {"instruction_set": TARGET.name, "lanes": str(TARGET.lanes)}
