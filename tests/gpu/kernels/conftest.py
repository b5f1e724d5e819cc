"""These tests run on a GPU, or in a process whose kernels Triton interprets; elsewhere they are skipped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Hidden scores are -inf, sums of nothing 0, and NaN is among the inputs: NumPy warns, a GPU does not.
_ARITHMETIC = ("divide by zero encountered", "invalid value encountered", "overflow encountered", "All-NaN")


def pytest_itemcollected(item: pytest.Item) -> None:
    if not INTERPRETED:
        item.add_marker(pytest.mark.gpu)
        return
    for message in _ARITHMETIC:
        item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}:RuntimeWarning"))


@pytest.hookimpl(tryfirst=True)  # before those that are slow are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted, a case runs in one of its two dtypes, which take turns; in the other it is slow."""
    seen: Counter[Any] = Counter()
    for item in items:
        if INTERPRETED and isinstance(item, pytest.Function) and "dtype" in item.fixturenames:
            case, second = divmod(seen[item.function], 2)
            seen[item.function] += 1
            if second != case % 2:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def language_patched_once_a_launch() -> None:
    """The interpreter puts its own functions into `triton.language` whenever a function calls another, which
    takes it more than a third of its time. Once for a launch is enough.
    """
    if INTERPRETED:
        interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    patched: set[int] = set()  # the functions' namespaces

    def patch_once(function: Any) -> Any:
        namespace = id(function.__globals__)
        if namespace in patched:
            return None
        is_launch = not patched
        patched.add(namespace)
        scope = patch(function)
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                restore()
                patched.clear()

            scope.restore = restore_all
        return scope

    return patch_once
