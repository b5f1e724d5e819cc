"""Tiles chosen by a clock, where FLASHTILE_AUTOTUNE=1 asks for it, and kept on disk.

The first call of a kind times a handful of tiles and waits for the device; every later one, in this process
or another, takes what it found.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flashtile.cache_folder import folder

from .tiles import Tile

ENABLED = os.environ.get("FLASHTILE_AUTOTUNE") == "1"
_RUNS = 5
_chosen: dict[str, Tile] = {}

Launch = Callable[[Tile], None]
Timer = Callable[[Callable[[], None]], float]


def chosen(
    tiles: Sequence[Tile],
    kind: Sequence[object],
    device: torch.device,
    launch: Launch,
    timer: Timer | None = None,
) -> Tile:
    """The fastest of the tiles for a kind of call; the first of them unless tuning is asked for.

    kind: kernel, dtype, head_dims and what else tells calls apart. timer: milliseconds of a launch.
    """
    if not ENABLED or len(tiles) == 1:
        return tiles[0]
    key = " ".join(map(str, (*_environment(device), *kind)))
    if not _chosen:
        _chosen.update(_read())
    if key not in _chosen:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return tiles[0]
        times = [_time(functools.partial(launch, tile), timer or _milliseconds) for tile in tiles]
        _chosen[key] = tiles[times.index(min(times))]
        _write(_read() | {key: _chosen[key]})
    return _chosen[key]


def _time(run: Callable[[], None], timer: Timer) -> float:
    from triton.runtime.errors import OutOfResources

    try:
        return timer(run)
    except OutOfResources:  # more shared memory than there is
        return float("inf")


def _milliseconds(run: Callable[[], None]) -> float:
    """The fastest of a few runs, by the device's own clock."""
    run()
    times = []
    for _ in range(_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return min(times)


@functools.cache
def _environment(device: torch.device) -> tuple[str, str]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name.replace(" ", "_"), triton.__version__


def _file() -> Path | None:
    place = folder()
    return None if place is None else place / "tiles.json"


def _read() -> dict[str, Tile]:
    file = _file()
    if file is None:
        return {}
    try:
        found = json.loads(file.read_text())
        return {key: Tile(*map(int, tile)) for key, tile in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or not ours
        return {}


def _write(tiles: dict[str, Tile]) -> None:
    file = _file()
    if file is None:
        return
    with contextlib.suppress(OSError):  # a full disk: the next process times again
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json", delete=False) as part:
            json.dump(tiles, part, indent=1)
        os.replace(part.name, file)
