"""One set of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and "ranks" in item.fixturenames:
        item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(8, sizes=(1, 2, 3, 4), meshes=[(2, 2), (4, 2)])
    yield ranks
    ranks.close()
