"""Compiled kernels on disk.

Numba's own cache watches one source file per function; a kernel here depends on every file of this folder, so
the key covers them all, with the versions and the instruction set. One file per compiled function, written to
a temporary name and renamed: processes that start together at worst compile twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

from flashtile.cache_folder import folder

_KEPT_SECONDS = 30 * 24 * 3600
_PART = ".flashtile-part"
_OUR_NAMES = re.compile(rf".+-[0-9a-f]{{32}}\.bin|.+{re.escape(_PART)}")


@cache
def _environment() -> bytes:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    versions = (sys.version, numba.__version__, llvmlite.__version__)
    digest.update(repr((versions, cpu_target.target_context.codegen().magic_tuple())).encode())
    return digest.digest()


def _remove_unused(place: Path) -> None:
    """Deletes what no process has loaded for a month: kernels of other versions, above all.

    Only files with names that this module gives: the folder may hold others.
    """
    for file in place.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            old = file.stat().st_mtime < time.time() - _KEPT_SECONDS
            if old and _OUR_NAMES.fullmatch(file.name):
                file.unlink()


def _payload(file: Path) -> bytes | None:
    """What a file of the cache holds; None where it is missing or was cut short."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, payload = content[:32], content[32:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # used: see _remove_unused
    return payload


def _announce(name: str, file: Path | None) -> None:
    """Tells a person at a terminal why the first call takes its time."""
    if sys.stderr is not None and sys.stderr.isatty():
        often = "in every process, since no folder can keep it" if file is None else "once"
        print(f"\rflashtile: compiling {name} for this processor ({often})", file=sys.stderr, flush=True)


class DiskCache(_Cache):
    """What a Numba dispatcher asks for compiled code before it compiles."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def cache_path(self) -> str:
        return str(folder())

    def _file(self, signature: Any) -> Path | None:
        place = folder()
        if place is None:
            return None
        key = hashlib.sha256(_environment() + repr((self._name, signature)).encode()).hexdigest()
        return place / f"{self._name}-{key[:32]}.bin"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        file = self._file(sig)
        payload = None if file is None else _payload(file)
        if payload is None:
            _announce(self._name, file)
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        file = self._file(sig)
        if file is None:
            return
        payload, part = pickle.dumps(data._reduce()), None
        try:
            with tempfile.NamedTemporaryFile(dir=file.parent, suffix=_PART, delete=False) as part:
                part.write(hashlib.sha256(payload).digest() + payload)
            os.replace(part.name, file)
            _remove_unused(file.parent)
        except OSError:  # a full disk or a folder that is gone: this process has the code, the next compiles
            if part is not None:
                Path(part.name).unlink(missing_ok=True)

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...
