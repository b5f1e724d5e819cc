"""One product serves every matrix multiplication of attention: C[m][lanes] (+)= A[m, k] * B[k][lanes].

A is read number by number (pair by pair for bfloat16 dot products), each broadcast to all lanes, so its
strides are free: K and V are used where they lie. B and C are packed rows of vectors.
"""

from __future__ import annotations

from typing import Any

from .kinds import TARGET, Kind, lanes, native, vector_size
from .tiles import tile_operations


def _make_product(rows: int, columns: int) -> Any:
    zeros, add_tile, store_tile, rank1 = tile_operations(rows, columns)

    @native
    def product(
        kind: Kind,
        a: int,
        a_row: int,
        a_col: int,
        b: int,
        b_row: int,
        c: int,
        c_row: int,
        first: int,
        count: int,
        depth: int,
        accumulate: bool,
    ) -> int:
        """Rows [first, count) in steps of `rows`; returns the first row not computed."""
        while first + rows <= count:
            tile = zeros(kind)
            column = a + first * a_row
            for k in range(depth):
                tile = rank1(kind, tile, column + k * a_col, a_row, b + k * b_row)
            # Sums of a block, then the sum of blocks: long sums lose fewer digits.
            if accumulate:
                add_tile(kind, tile, c + first * c_row, c_row)
            else:
                store_tile(kind, tile, c + first * c_row, c_row)
            first += rows
        return first

    return product


ROWS, COLUMNS = TARGET.rows, TARGET.columns
_product = _make_product(ROWS, COLUMNS)
_product_single_row = _make_product(1, COLUMNS)
_product_narrow = _make_product(2 * ROWS, 1)
_product_narrow_single_row = _make_product(1, 1)


@native
def multiply(
    kind: Kind,
    a: int,
    a_row: int,
    a_col: int,
    b: int,
    b_row: int,
    c: int,
    c_row: int,
    rows: int,
    depth: int,
    vectors: int,
    accumulate: bool,
) -> None:
    """c[rows][vectors] (+)= a[rows, depth] @ b[depth][vectors]; all strides in bytes."""
    column = 0
    while column + COLUMNS <= vectors:
        shift = column * vector_size(kind)
        done = _product(kind, a, a_row, a_col, b + shift, b_row, c + shift, c_row, 0, rows, depth, accumulate)
        _product_single_row(
            kind, a, a_row, a_col, b + shift, b_row, c + shift, c_row, done, rows, depth, accumulate
        )
        column += COLUMNS
    while column < vectors:
        shift = column * vector_size(kind)
        done = _product_narrow(
            kind, a, a_row, a_col, b + shift, b_row, c + shift, c_row, 0, rows, depth, accumulate
        )
        _product_narrow_single_row(
            kind, a, a_row, a_col, b + shift, b_row, c + shift, c_row, done, rows, depth, accumulate
        )
        column += 1


@native
def row_bytes(kind: Kind, width: int) -> int:
    """Bytes of a packed row of `width` lanes."""
    return width // lanes(kind) * vector_size(kind)
