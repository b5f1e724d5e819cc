"""How large the tiles are, and how many warps and stages work on them: by architecture and head_dim."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """A launch of a kernel: queries and keys of a tile, warps, and stages of the software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


def width_of(head_dim: int) -> int:
    """A head_dim padded to what a tile holds: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def forward_tile(target: str, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the forward pass."""
    if target == "interpreter":
        return Tile(32, 32, 4, 1)
    raise NotImplementedError(target)


def decode_tile(target: str, itemsize: int, head_dim: int, value_dim: int, rows: int) -> Tile:
    """Tiles of decoding, for so many packed rows."""
    if target == "interpreter":
        return Tile(16, 32, 4, 1)
    raise NotImplementedError(target)


def key_gradient_tile(target: str, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of dK and dV."""
    if target == "interpreter":
        return Tile(16, 32, 4, 1)
    raise NotImplementedError(target)


def query_gradient_tile(target: str, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of dQ."""
    if target == "interpreter":
        return Tile(32, 16, 4, 1)
    raise NotImplementedError(target)


def bias_gradient_tile(target: str, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the bias gradient."""
    if target == "interpreter":
        return Tile(32, 16, 4, 1)
    raise NotImplementedError(target)


def row_number_tile(target: str, itemsize: int, head_dim: int, value_dim: int) -> Tile:
    """Tiles of the preparation of the backward pass; the keys matter where a LSE is large."""
    if target == "interpreter":
        return Tile(32, 32, 4, 1)
    raise NotImplementedError(target)
