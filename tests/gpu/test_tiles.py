"""The tables of tiles, and tiles chosen by a clock."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from flashtile import cache_folder
from flashtile.gpu import autotune
from flashtile.gpu.target import Target
from flashtile.gpu.tiles import Tile, decode_tile, family_of, forward_tiles, shared_bytes
from tests.gpu.compiling import TARGETS

WIDTHS = (1, 16, 40, 64, 96, 128, 200, 256, 512)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_tile_fits(name, itemsize):
    target = TARGETS[name]
    widths = [width for width in WIDTHS if width <= 256 or target.shared_memory > 64 * 1024]
    for head_dim, value_dim, rich in itertools.product(widths, widths, (False, True)):
        tiles = [*forward_tiles(target, itemsize, head_dim, value_dim, rich)]
        tiles += [decode_tile(target, itemsize, head_dim, value_dim, rows) for rows in (1, 16, 17, 64)]
        for tile in tiles:
            assert all(map(is_power_of_two, tile[:3])), tile
            assert min(tile[:2]) >= 16, tile
            assert shared_bytes(tile, itemsize, head_dim, value_dim) <= target.shared_memory, tile
        assert len(set(tiles[:-4])) == len(tiles[:-4])


@pytest.mark.parametrize(
    ("name", "shared", "family"),
    [
        ("sm87", 163, "sm80"), ("sm89", 99, "sm86"), ("sm103", 227, "sm100"), ("sm121", 99, "sm86"),
        ("sm130", 300, "sm100"), ("gfx950", 160, "gfx9"), ("gfx1201", 64, "gfx11"),
    ],
)  # fmt: skip
def test_newer_architectures_find_a_row(name, shared, family):
    assert family_of(Target(name, shared * 1024, 32, 8)) == family


class Clock:
    """Takes as long as it is told for each tile."""

    def __init__(self, times: dict[Tile, float]) -> None:
        self.times, self.launched = times, []

    def launch(self, tile: Tile) -> None:
        self.launched.append(tile)

    def __call__(self, run) -> float:
        run()
        return self.times[self.launched[-1]]


SLOW, FAST = Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)
CPU = torch.device("cpu")


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tuning is asked for, and nothing is known yet."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "ENABLED", True)
    monkeypatch.setattr(autotune, "_chosen", {})
    cache_folder.folder.cache_clear()
    yield tmp_path / "cache" / "tiles.json"
    monkeypatch.undo()
    cache_folder.folder.cache_clear()


def choose(clock: Clock, *kind: object) -> Tile:
    return autotune.chosen((SLOW, FAST), kind, CPU, clock.launch, clock)


def test_the_fastest_is_chosen_once_and_kept(tuning, monkeypatch):
    clock = Clock({SLOW: 2.0, FAST: 1.0})
    assert choose(clock, "forward", 64) == FAST
    assert clock.launched == [SLOW, FAST]
    assert choose(clock, "forward", 64) == FAST
    assert len(clock.launched) == 2
    monkeypatch.setattr(autotune, "_chosen", {})  # another process
    assert choose(clock, "forward", 64) == FAST
    assert len(clock.launched) == 2
    assert choose(Clock({SLOW: 1.0, FAST: 2.0}), "forward", 128) == SLOW
    assert sorted(json.loads(tuning.read_text()).values()) == sorted([list(SLOW), list(FAST)])


def test_a_file_that_is_not_ours(tuning):
    tuning.parent.mkdir(mode=0o700)
    tuning.write_text("[1, 2")
    assert choose(Clock({SLOW: 2.0, FAST: 1.0}), "forward") == FAST


def test_a_tile_that_does_not_fit_loses(tuning):
    from triton.runtime.errors import OutOfResources

    def launch(tile: Tile) -> None:
        if tile == SLOW:
            raise OutOfResources(2, 1, "shared memory")

    clock = Clock({SLOW: 0.0, FAST: 1.0})
    clock.launched = [FAST]
    assert autotune.chosen((SLOW, FAST), ("forward",), CPU, launch, clock) == FAST


def test_nobody_asked(monkeypatch):
    monkeypatch.setattr(autotune, "ENABLED", False)
    clock = Clock({})
    assert choose(clock, "forward") == SLOW
    assert not clock.launched
