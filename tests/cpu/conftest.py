"""Scratch memory full of NaN between guards, so that a kernel that reads or writes beside its parts shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from flashtile.cpu import workers

_GUARD = 4096
_PATTERN = 0xFF  # NaN in every float dtype


class _Scratch:
    """Scratch memory of one kernel call on one thread."""

    def __init__(self, size: int) -> None:
        self.memory = np.full(size + 2 * _GUARD + 64, _PATTERN, dtype=np.uint8)
        base = self.memory.ctypes.data + _GUARD
        self.address = (base + 63) // 64 * 64
        start = self.address - self.memory.ctypes.data
        self.outside = self.memory[:start], self.memory[start + size :]

    def is_intact(self) -> bool:
        return all(bool((part == _PATTERN).all()) for part in self.outside)


@pytest.fixture(autouse=True)
def guarded_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test whose kernel wrote outside its scratch memory."""
    given: list[_Scratch] = []

    def scratch_memory(size: int) -> int:
        given.append(_Scratch(size))
        return given[-1].address

    monkeypatch.setattr(workers, "scratch_memory", scratch_memory)
    yield
    assert all(scratch.is_intact() for scratch in given), "a kernel wrote outside its scratch memory"
