"""One product serves every matrix multiplication of attention: C[m][lanes] (+)= A[m, k] * B[k][lanes].

A is read number by number (pair by pair for bfloat16 dot products), each broadcast to all lanes, so its
strides are free: K and V are used where they lie. B and C are packed rows of vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .kinds import TARGET, Kind, vector_size
from .native import native
from .tiles import tile_operations


class Operand(NamedTuple):
    """A of a product: strides of row and of number (or pair) in bytes; numbers (or pairs) to sum over."""

    address: int
    row: int
    step: int
    depth: int


class Packed(NamedTuple):
    """B or C of a product: rows of vectors, `row` bytes apart."""

    address: int
    row: int


def _make_product(rows: int, columns: int) -> Any:
    zeros, add_tile, store_tile, rank1 = tile_operations(rows, columns)

    @native
    def product(
        kind: Kind, a: Operand, b: Packed, c: Packed, first: int, count: int, accumulate: bool
    ) -> int:
        """Rows [first, count) in steps of `rows`; returns the first row not computed."""
        while first + rows <= count:
            tile, column, target = zeros(kind), a.address + first * a.row, c.address + first * c.row
            for k in range(a.depth):
                tile = rank1(kind, tile, column + k * a.step, a.row, b.address + k * b.row)
            # Sums of a block, then the sum of blocks: long sums lose fewer digits.
            if accumulate:
                add_tile(kind, tile, target, c.row)
            else:
                store_tile(kind, tile, target, c.row)
            first += rows
        return first

    return product


ROWS, COLUMNS = TARGET.rows, TARGET.columns
_product = _make_product(ROWS, COLUMNS)
_product_single_row = _make_product(1, COLUMNS)
_product_narrow = _make_product(2 * ROWS, 1)
_product_narrow_single_row = _make_product(1, 1)


@native
def multiply(kind: Kind, a: Operand, b: Packed, c: Packed, rows: int, vectors: int, accumulate: bool) -> None:
    """c[rows][vectors] (+)= a[rows, depth] @ b[depth][vectors]."""
    column = 0
    while column < vectors:
        shift = column * vector_size(kind)
        b_part, c_part = Packed(b.address + shift, b.row), Packed(c.address + shift, c.row)
        if column + COLUMNS <= vectors:
            done = _product(kind, a, b_part, c_part, 0, rows, accumulate)
            _product_single_row(kind, a, b_part, c_part, done, rows, accumulate)
            column += COLUMNS
        else:
            done = _product_narrow(kind, a, b_part, c_part, 0, rows, accumulate)
            _product_narrow_single_row(kind, a, b_part, c_part, done, rows, accumulate)
            column += 1
