"""The folder that outlives a process: compiled kernels and tuned tiles."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path


def _in_home() -> Path:
    home = Path.home()
    if sys.platform == "win32":
        users = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        users = home / "Library" / "Caches"
    else:
        users = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return users / "flashtile"


def _in_temporary() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"flashtile-{user}"


def _usable(path: Path) -> bool:
    """Writable, and by us alone: its files are executed."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):
        state = path.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            return False
    with tempfile.TemporaryFile(dir=path):
        return True


@cache
def folder() -> Path | None:
    """Where compiled kernels are kept; None if nowhere can be: they are then compiled in each process."""
    chosen = os.environ.get("FLASHTILE_CACHE_DIR")
    places: list[Callable[[], Path]] = [_in_home, _in_temporary]
    if chosen:
        places = [lambda: Path(chosen).absolute()]
    for place in places:
        # RuntimeError: a user without a home. OSError: read-only, full, or no temporary folder.
        with contextlib.suppress(OSError, RuntimeError):
            path = place()
            if _usable(path):
                return path
    if chosen:
        warnings.warn(
            f"FLASHTILE_CACHE_DIR={chosen} cannot be used: it must be a folder that only you can write to; "
            "kernels are compiled in every process",
            stacklevel=2,
        )
    return None
