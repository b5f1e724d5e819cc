"""These tests run on a GPU, or in a process whose kernels Triton interprets; elsewhere they are skipped."""

from __future__ import annotations

import os

import pytest

# Hidden scores are -inf, sums of nothing 0, and NaN is among the inputs: NumPy warns, a GPU does not.
_ARITHMETIC = ("divide by zero encountered", "invalid value encountered", "overflow encountered", "All-NaN")


def pytest_itemcollected(item: pytest.Item) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        item.add_marker(pytest.mark.gpu)
        return
    for message in _ARITHMETIC:
        item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}:RuntimeWarning"))
