"""How large the tiles are, and how many warps and stages work on them: by architecture and head_dim.

What bounds a tile: its keys and values, once per stage, must fit into the shared memory of a block, and its
scores and outputs into the registers of its warps (255 of 32 bits per thread). The compile matrix in
tests/gpu/test_compile.py holds the tables to that.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .target import Target


class Tile(NamedTuple):
    """A launch of a kernel: queries and keys of a tile, warps, and stages of the software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


# (queries, keys, warps, stages) of the forward pass for 16-bit inputs, by family of architectures and by the
# wider head_dim: up to 64, 128, 256, 512.
_WIDTHS = (64, 128, 256, 512)
_FORWARD = {
    "sm80": ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
    "sm86": ((128, 64, 4, 3), (128, 32, 8, 2), (64, 32, 8, 2), (32, 16, 8, 2)),
    "sm90": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (32, 32, 8, 2)),
    "sm100": ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
    "gfx9": ((128, 64, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1), (32, 16, 4, 1)),
    "gfx11": ((64, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1)),
}
# Without tensor cores (float32, whose products are exact, and sm75, for which Triton knows none) each thread
# holds whole rows of both tiles.
_FORWARD_WITHOUT = ((32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1))
# Of the backward pass, up to 64, 128 and 256: for dK and dV, then for dQ.
_KEY_GRADIENTS = {
    "sm80": ((64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 1)),
    "sm86": ((64, 128, 8, 2), (32, 128, 8, 2), (16, 64, 8, 1)),
    "sm90": ((64, 128, 8, 3), (64, 128, 8, 2), (32, 64, 8, 2)),
    "sm100": ((64, 128, 8, 2), (64, 128, 8, 2), (32, 64, 8, 2)),
    "gfx9": ((64, 64, 4, 1), (32, 64, 4, 1), (16, 64, 4, 1)),
    "gfx11": ((32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
}
_QUERY_GRADIENTS = {
    "sm80": ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
    "sm86": ((128, 64, 8, 2), (128, 32, 8, 2), (32, 32, 8, 1)),
    "sm90": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2)),
    "sm100": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
    "gfx9": ((64, 64, 4, 1), (64, 32, 4, 1), (64, 16, 4, 1)),
    "gfx11": ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
}
_KEY_GRADIENTS_WITHOUT = ((16, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1))
_QUERY_GRADIENTS_WITHOUT = ((32, 16, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1))
_INTERPRETED = Tile(32, 32, 4, 1)
_INTERPRETED_DECODE = Tile(16, 32, 4, 1)


def width_of(head_dim: int) -> int:
    """A head_dim padded to what a tile holds: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def forward_tiles(
    target: Target, itemsize: int, head_dim: int, value_dim: int, rich: bool
) -> tuple[Tile, ...]:
    """Tiles of the forward pass: the best as far as one can tell without a clock, then others worth trying.

    rich: more than a product, a scale and intervals makes the scores; what it needs takes registers.
    """
    if target.name == "interpreter":
        return (_INTERPRETED,)
    width = max(width_of(head_dim), width_of(value_dim))
    table = _FORWARD_WITHOUT if _without_tensor_cores(target, itemsize) else _FORWARD[family_of(target)]
    queries, keys, warps, stages = table[_row(width)]
    if rich and keys * width > 64 * 64:
        keys = max(16, keys // 2)
    best = _fitting(Tile(queries, keys, warps, stages), itemsize, head_dim, value_dim, target.shared_memory)
    others = (
        best._replace(stages=stages + 1),
        best._replace(keys=2 * keys),
        best._replace(keys=max(16, keys // 2), stages=stages + 1),
        best._replace(queries=max(16, queries // 2), warps=max(4, warps // 2)),
    )
    fitting = (
        tile for tile in others if shared_bytes(tile, itemsize, head_dim, value_dim) <= target.shared_memory
    )
    return tuple(dict.fromkeys((best, *fitting)))


@cache
def decode_tile(target: Target, itemsize: int, head_dim: int, value_dim: int, rows: int) -> Tile:
    """Tiles of decoding, for so many packed rows. Reading the keys is all that takes time: many stages."""
    if target.name == "interpreter":
        return _INTERPRETED_DECODE
    width = max(width_of(head_dim), width_of(value_dim))
    if _without_tensor_cores(target, itemsize):
        return _fitting(Tile(16, 16, 8, 2), itemsize, head_dim, value_dim, target.shared_memory // 2)
    queries = min(64 if width <= 256 else 16, width_of(rows))
    tile = Tile(queries, 64 if width <= 128 else 16, 8 if queries * width > 64 * 128 else 4, 3)
    # Two blocks beside each other hide what one of them waits for.
    return _fitting(tile, itemsize, head_dim, value_dim, target.shared_memory // 2)


def _fitting(tile: Tile, itemsize: int, head_dim: int, value_dim: int, room: int) -> Tile:
    """The tile with as many of its stages as there is room for."""
    while tile.stages > 1 and shared_bytes(tile, itemsize, head_dim, value_dim) > room:
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def shared_bytes(tile: Tile, itemsize: int, head_dim: int, value_dim: int) -> int:
    """About how much shared memory a tile takes: queries, and keys and values of every stage.

    In a single stage the keys are done with when the values come.
    """
    widths = width_of(head_dim), width_of(value_dim)
    columns = max(widths) if tile.stages == 1 else tile.stages * sum(widths)
    return itemsize * (tile.queries * widths[0] + tile.keys * columns)


def family_of(target: Target) -> str:
    """Which row of the tables serves an architecture; newer ones by their shared memory."""
    if target.name.startswith("gfx"):
        return "gfx9" if target.name.startswith("gfx9") else "gfx11"
    capability, large = int(target.name[2:]), target.shared_memory > 128 * 1024
    if capability < 90 or not large:
        return "sm80" if large else "sm86"
    return "sm90" if capability < 100 else "sm100"


def _without_tensor_cores(target: Target, itemsize: int) -> bool:
    return itemsize == 4 or target.name == "sm75"


def _row(width: int) -> int:
    return next(row for row, widest in enumerate(_WIDTHS) if width <= widest)


def key_gradient_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of dK and dV, whose sums stay in registers while the queries pass by."""
    if target.name == "interpreter":
        return Tile(16, 64, 4, 1)
    without = _without_tensor_cores(target, itemsize)
    table = _KEY_GRADIENTS_WITHOUT if without else _KEY_GRADIENTS[family_of(target)]
    return Tile(*table[_row(max(width_of(head_dim), width_of(value_dim)))])


def query_gradient_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of dQ."""
    if target.name == "interpreter":
        return Tile(64, 16, 4, 1)
    without = _without_tensor_cores(target, itemsize)
    table = _QUERY_GRADIENTS_WITHOUT if without else _QUERY_GRADIENTS[family_of(target)]
    return Tile(*table[_row(max(width_of(head_dim), width_of(value_dim)))])


def bias_gradient_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the bias gradient."""
    return _small_tile(target, itemsize, head_dim, value_dim)


def row_number_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the preparation of the backward pass; their keys matter only where a LSE is large."""
    return _small_tile(target, itemsize, head_dim, value_dim)


def _small_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    if target.name == "interpreter":
        return _INTERPRETED
    wide = max(width_of(head_dim), width_of(value_dim)) * itemsize > 256
    return Tile(32, 32, 4, 1) if wide else Tile(64, 32, 4, 1)
