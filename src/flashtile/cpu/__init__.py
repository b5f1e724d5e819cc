"""The CPU engine: exact attention, forward and backward, as Numba kernels over SIMD values."""

from flashtile.cache_folder import folder

from .engine import backward, forward
from .kinds import TARGET

__all__ = ["backward", "describe", "forward"]


def describe() -> dict[str, str]:
    """What the kernels use on this machine: instruction set, lanes of float32, and where compiled code is
    kept.
    """
    return {
        "instruction set": TARGET.name,
        "lanes": str(TARGET.lanes),
        "cache folder": str(folder() or "none is writable: kernels are compiled in every process"),
    }
