"""What all tests share: poisoned memory, the dtypes, and thread counts that do not leak from test to test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


def needs_torch_2_9(before: str) -> pytest.MarkDecorator:
    """Skips a test where torch is older; ``before``: what it cannot do there."""
    return pytest.mark.skipif(torch.__version__ < "2.9", reason=f"before torch 2.9 {before}")


combines_masks_in_a_graph = needs_torch_2_9("torch.compile does not know the operator & of masks")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `dtype` runs once for each supported dtype unless it says which it wants."""
    chosen = any(
        "dtype" in str(mark.args[0]).split(",") for mark in metafunc.definition.iter_markers("parametrize")
    )
    if "dtype" in metafunc.fixturenames and not chosen:
        metafunc.parametrize("dtype", DTYPES, ids=dtype_name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        no_gpu = pytest.mark.skip(reason="torch sees no GPU here")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_fresh_memory(monkeypatch)


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN (integers: their lowest value; bytes: 255, NaN in every float dtype), so that an
    element nobody wrote shows."""

    def poisoning(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def create_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            return poison(create(*args, **kwargs))

        return create_poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(Tensor, name, poisoning(getattr(Tensor, name)))


def poison(tensor: Tensor) -> Tensor:
    """`tensor`, filled in place; fake and meta tensors and exotic dtypes are left alone."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).min)
        elif tensor.dtype == torch.uint8:  # kernels' working memory
            tensor.fill_(255)
    return tensor


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def inactive_after() -> Iterator[None]:
    import flashtile

    yield
    flashtile.deactivate()


@pytest.fixture
def launched_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment that torchrun gives the only process of a group."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
