"""What the page shows and does not compute itself: traces and counts of `flashtile.lab`."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from flashtile import masks
from flashtile.explain.code import listing
from flashtile.lab import theory
from flashtile.lab.algorithms import ALGORITHMS, Algorithm, band
from flashtile.lab.memory import Counts
from flashtile.lab.occupancy import MULTIPROCESSORS
from flashtile.lab.recording import Event, record
from flashtile.lab.setting import Blocks
from flashtile.lab.theory import DIRECTIONS, Direction, Shape

LENGTH, HEAD_DIM, BLOCKS = 32, 4, (4, 8, 16)
REAL_LENGTHS, REAL_HEAD_DIM, REAL_SRAM = (1024, 4096, 16384, 65536), 64, 192 * 1024
MASKS = ("none", "causal", "window", "causal-window")


@cache
def gather() -> dict[str, Any]:
    """Everything, ready for JSON; the same for every call, and not to be changed."""
    return {
        "length": LENGTH,
        "headDim": HEAD_DIM,
        "blocks": BLOCKS,
        "race": {direction: _race(direction) for direction in DIRECTIONS},
        "real": [_real(length) for length in REAL_LENGTHS],
        "skipping": {str(size): _skipping(size) for size in BLOCKS},
        "multiprocessors": MULTIPROCESSORS,
        "code": listing(),
    }


def _race(direction: Direction) -> dict[str, Any]:
    """Recordings of a pass: {algorithm: {block size: recording}}."""
    return {
        algorithm: {str(size): _recording(algorithm, direction, size) for size in BLOCKS}
        for algorithm in ALGORITHMS
    }


def _recording(algorithm: Algorithm, direction: Direction, size: int) -> dict[str, Any]:
    recording = record(algorithm, direction, LENGTH, HEAD_DIM, Blocks(size, size))
    return {"events": [_event(event) for event in recording.events], "counts": _counts(recording.counts)}


def _event(event: Event) -> list[Any]:
    """[kind, name, first row, row behind the last, bytes, FLOPs done before, and of a tile its columns]"""
    found = [event.kind, event.name, event.rows.start, event.rows.stop, event.size, event.flops]
    return [*found, event.columns.start, event.columns.stop] if event.kind == "tile" else found


def _counts(counts: Counts) -> dict[str, int]:
    return {**asdict(counts), "traffic": counts.traffic, "other": counts.other}


def _real(length: int) -> dict[str, Any]:
    """Counts of one head of a real size, by theory, on the small memory of an A100."""
    shape = Shape(
        query_length=length, key_length=length, head_dim=REAL_HEAD_DIM, value_head_dim=REAL_HEAD_DIM
    )
    found: dict[str, Any] = {"length": length}
    for direction in DIRECTIONS:
        found[direction] = {
            algorithm: _counts(theory.one_pass(algorithm, direction, shape, blocks).counts)
            for algorithm in ALGORITHMS
            for blocks in [theory.block_sizes(algorithm, direction, REAL_SRAM, REAL_HEAD_DIM)]
        }
    return found


def _skipping(size: int) -> dict[str, list[dict[str, Any]]]:
    """By mask and by the window's size, from 0 on: which tiles are visited, and what that costs forward."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in MASKS:
        windows = range(LENGTH) if "window" in name else range(1)
        found[name] = [_skipped(size, _mask(name, window)) for window in windows]
    return found


def _mask(name: str, window: int) -> masks.Mask | None:
    if name == "none":
        return None
    if name == "causal":
        return masks.causal()
    both = masks.window(left=window, right=window)
    return both if name == "window" else masks.causal() & both


def _skipped(size: int, mask: masks.Mask | None) -> dict[str, Any]:
    """Tiles row by row as letters: full, partial or empty; the band of visible keys; bytes and FLOPs."""
    lower, upper = band(mask, LENGTH, LENGTH)
    visible = (
        torch.ones(LENGTH, LENGTH, dtype=torch.bool) if mask is None else mask.dense(1, LENGTH, LENGTH)[0, 0]
    )
    tiles = visible.unfold(0, size, size).unfold(1, size, size).flatten(2)
    letters = ["f" if bool(tile.all()) else "p" if bool(tile.any()) else "e" for row in tiles for tile in row]
    shape = Shape(
        query_length=LENGTH,
        key_length=LENGTH,
        head_dim=HEAD_DIM,
        value_head_dim=HEAD_DIM,
        lower=lower,
        upper=upper,
    )
    blocks = Blocks(size, size)
    counts = {name: theory.one_pass(name, "forward", shape, blocks).counts for name in ALGORITHMS[1:]}
    return {
        "tiles": "".join(letters),
        "lower": lower,
        "upper": upper,
        "traffic": [count.traffic for count in counts.values()],
        "matmul": counts["flash2"].matmul,
    }
