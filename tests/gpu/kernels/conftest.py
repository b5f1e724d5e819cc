"""These tests run on a GPU, or in a process whose kernels Triton interprets; elsewhere they are skipped."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import dtype_name

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
    """Interpreted, a case that has several dtypes runs in one of them; in the others it is slow."""
    cases: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        if not INTERPRETED or not isinstance(item, pytest.Function) or "dtype" not in item.fixturenames:
            continue
        if Path(__file__).parent in item.path.parents:
            case = item.callspec.id.replace(dtype_name(item.callspec.params["dtype"]), "")
            cases.setdefault((item.function, case), []).append(item)
    for (_, case), in_dtypes in cases.items():
        chosen = zlib.crc32(case.encode()) % len(in_dtypes)
        for index, item in enumerate(in_dtypes):
            if index != chosen:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def faster_interpreter() -> None:
    """Spares what takes the interpreter most of its time, and these tests nothing.

    It puts its own functions into `triton.language` whenever a function calls another: once for a launch is
    enough. It computes sums and products of integers twice, to find what 32 bits do not hold, and keeps it to
    itself unless it debugs. It makes a table of all dtypes whenever it looks one up, and checks the shape of
    every tensor anew.
    """
    if INTERPRETED:
        interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
        if importlib.metadata.version("triton").startswith("3.9."):  # whose constructors these are
            _remember_shapes(importlib.import_module("triton.language.core"))


def _remember_shapes(core: Any) -> None:
    """Types of tensors are checked once for each dtype and shape, and know what tensors say of themselves."""
    construct, known = core.block_type.__init__, {}

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        try:
            fields = known.get(key := (element_ty.name, *shape))
        except TypeError:  # sizes that are no numbers yet
            key = fields = None
        if fields is None:
            construct(self, element_ty, shape)
            self.of_tensor = core.tuple([core.constexpr(n) for n in self.shape]), core.constexpr(self.numel)
            if key is not None:
                known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(fields, element_ty=element_ty)

    of_scalar = core.tuple([]), core.constexpr(1)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    core.block_type.__init__, core.tensor.__init__ = type_once, tensor


def _by_name(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype.scalar)
        return found[name]

    return look_up_once


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    patched: set[int] = set()  # the functions' namespaces

    def patch_once(function: Any) -> Any:
        namespace = id(function.__globals__)
        if namespace in patched:
            return None
        scope = patch(function)
        is_launch = not patched
        patched.add(namespace)
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                restore()
                patched.clear()

            scope.restore = restore_all
        return scope

    return patch_once
