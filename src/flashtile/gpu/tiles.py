"""How large the tiles are, and how many warps and stages work on them: by architecture and head_dim.

What bounds a tile: its keys and values, once per stage, must fit into the shared memory of a block, and its
scores and outputs into the registers of its warps (255 of 32 bits per thread). The compile matrix in
tests/gpu/test_compile.py holds the tables to that.
"""

from __future__ import annotations

from typing import NamedTuple

from .target import Target


class Tile(NamedTuple):
    """A launch of a kernel: queries and keys of a tile, warps, and stages of the software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


# (queries, keys, warps, stages) by family and by the wider head_dim, padded, up to 64, 128, 256 and 512.
_WIDTHS = (64, 128, 256, 512)
_HALF = {
    "sm75": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1)),
    "sm80": ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
    "sm86": ((128, 64, 4, 3), (128, 32, 8, 2), (64, 32, 8, 2), (32, 16, 8, 2)),
    "sm90": ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2)),
    "sm100": ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
    "gfx9": ((128, 64, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1), (32, 16, 4, 1)),
    "gfx11": ((64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
}
_INTERPRETED = Tile(32, 32, 4, 1)
_INTERPRETED_DECODE = Tile(16, 32, 4, 1)


def width_of(head_dim: int) -> int:
    """A head_dim padded to what a tile holds: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def forward_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the forward pass."""
    if target.name == "interpreter":
        return Tile(32, 32, 4, 1)
    raise NotImplementedError(target)


def decode_tile(target: Target, itemsize: int, head_dim: int, value_dim: int, rows: int) -> Tile:
    """Tiles of decoding, for so many packed rows."""
    if target.name == "interpreter":
        return Tile(16, 32, 4, 1)
    raise NotImplementedError(target)


def key_gradient_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of dK and dV."""
    if target.name == "interpreter":
        return Tile(16, 64, 4, 1)
    raise NotImplementedError(target)


def query_gradient_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of dQ."""
    if target.name == "interpreter":
        return Tile(64, 16, 4, 1)
    raise NotImplementedError(target)


def bias_gradient_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the bias gradient."""
    if target.name == "interpreter":
        return Tile(32, 32, 4, 1)
    raise NotImplementedError(target)


def row_number_tile(target: Target, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the preparation of the backward pass; the keys matter where a LSE is large."""
    if target.name == "interpreter":
        return Tile(32, 32, 4, 1)
    raise NotImplementedError(target)
