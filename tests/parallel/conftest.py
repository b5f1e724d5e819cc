"""One set of processes for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.ranks import Ranks


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and "ranks" in item.fixturenames:
        item.add_marker(pytest.mark.xdist_group("ranks"))


_running: list[Ranks] = []


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    if not _running:
        _running.append(Ranks(8, sizes=(1, 2, 3, 4), meshes=[(2, 2), (4, 2)]))
    return _running[0]


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ranks that wait for each other take time from the tests of other folders."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _close()


def pytest_sessionfinish() -> None:
    _close()


def _close() -> None:
    while _running:
        _running.pop().close()
