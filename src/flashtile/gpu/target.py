"""Which device kernels are compiled for, and why one may not be served; it may lack Triton itself."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Under it kernels run on CPU tensors, in the interpreter that Triton chooses as they are decorated.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (7, 5)
WIDEST_FORWARD, WIDEST_BACKWARD = 512, 256
_LITTLE_MEMORY = 64 * 1024  # which the widest float32 tiles of 16 rows do not fit into
_AMD = re.compile(r"gfx90a|gfx94\w|gfx95\w|gfx11\w\w|gfx12\w\w")


@dataclass(frozen=True)
class Target:
    """An architecture and what one block may use of it."""

    name: str  # "sm90", "gfx942", ...; "interpreter"
    shared_memory: int  # bytes
    warp_size: int
    multiprocessors: int


INTERPRETER = Target("interpreter", 2**20, 32, 16)


def target_of(device: torch.device) -> Target:
    """The target of kernels on this device."""
    if INTERPRETED:
        return INTERPRETER
    return _target_at(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _target_at(index: int) -> Target:
    properties: Any = torch.cuda.get_device_properties(index)
    name = architecture(properties)
    block = _memory_of_a_block(name, properties)
    warp_size = getattr(properties, "warp_size", 32)
    return Target(name, block, warp_size, properties.multi_processor_count)


# Bytes of shared memory that a block may have, where torch (before 2.7) does not say so.
_SHARED_MEMORY = {
    "sm75": 65536, "sm80": 166912, "sm86": 101376, "sm87": 166912, "sm89": 101376, "sm90": 232448,
    "sm100": 232448, "sm120": 101376,
}  # fmt: skip


def _memory_of_a_block(name: str, properties: Any) -> int:
    # For AMD's devices torch gives the memory of a multiprocessor, of which a block may use all.
    for field in ("shared_memory_per_block_optin", "shared_memory_per_block"):
        if hasattr(properties, field):
            return int(getattr(properties, field))
    return _SHARED_MEMORY.get(name, 65536)  # which every device has


def architecture(properties: Any) -> str:
    """ "sm90" or "gfx942", from torch's properties of a device."""
    amd = getattr(properties, "gcnArchName", "")
    if torch.version.hip and amd:
        return str(amd.split(":")[0])
    return f"sm{properties.major}{properties.minor}"


def unsupported_reason(
    device: torch.device, head_dim: int, value_dim: int, *, backward: bool = False
) -> str | None:
    """Why the kernels cannot serve these head dims on this device; None if they can."""
    reason = triton_reason()
    if reason is not None:
        return reason
    target = target_of(device)
    reason = _architecture_reason(target.name)
    if reason is not None:
        return reason
    narrow = backward or target.shared_memory <= _LITTLE_MEMORY
    widest = WIDEST_BACKWARD if narrow else WIDEST_FORWARD
    if max(head_dim, value_dim) > widest:
        tiles = f"{'backward' if backward else 'forward'} pass holds on {target.name}"
        return f"head_dim {max(head_dim, value_dim)} is beyond {widest}, the widest that the {tiles}"
    return None


@cache
def triton_reason() -> str | None:
    """Why Triton cannot compile the kernels; None if it can."""
    wanted = ".".join(map(str, OLDEST_TRITON))
    try:
        import triton
    except ImportError:
        return f"Triton is not installed (pip install 'triton>={wanted}')"
    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if version < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {wanted}"
    if not INTERPRETED and not _finds_a_compiler():
        return (
            "Triton builds its launcher in C and finds no compiler or no Python.h "
            "(install gcc and Python's headers, or set CC)"
        )
    return None


def _finds_a_compiler() -> bool:
    """Whether Triton will find one, by its own rules, and Python's headers; on Windows it brings both."""
    from triton import knobs

    if os.name == "nt" or knobs.build.impl:
        return True
    compiler = "CC" in os.environ or shutil.which("clang") or shutil.which("gcc")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


@cache
def _architecture_reason(name: str) -> str | None:
    if name == INTERPRETER.name:
        return None
    if name.startswith("sm"):
        oldest = "".join(map(str, OLDEST_CAPABILITY))
        return None if int(name[2:]) >= int(oldest) else f"{name} is older than sm{oldest}"
    if _AMD.fullmatch(name):
        return None
    return f"{name} is not one of gfx90a, gfx94x, gfx95x, gfx11xx, gfx12xx"


def product_precision(target: Target, dtype: torch.dtype) -> str:
    """How float32 tiles are multiplied: exactly, unless torch's own setting allows TF32 and there is such."""
    without = target.name == "sm75" or not target.name.startswith(("sm", "gfx942"))
    if dtype != torch.float32 or without:
        return "ieee"
    matmul: Any = torch.backends.cuda.matmul
    try:
        allowed = matmul.fp32_precision == "tf32"
    except AttributeError:  # before torch 2.9; since then reading the old setting may warn, or raise
        allowed = matmul.allow_tf32
    return "tf32" if allowed else "ieee"
