"""Load tile, store tile: strided tensors to packed scratch and back, in the form the products read.

`natural` keeps rows as rows, `transposed` puts one row per lane, `row pairs` interleaves two rows of
bfloat16. Everything is padded with zeros to whole vectors.
"""

from __future__ import annotations

from .kinds import (
    Kind,
    compute_size,
    is_pairs,
    itemsize,
    lanes,
    raw_kind,
    vector_size,
)
from .native import native
from .simd import (
    copy_bytes,
    load,
    load_stored,
    peek,
    peek_int64,
    poke,
    poke_int64,
    read,
    splat,
    store,
    store_stored,
    write,
)
from .tiles import gather_block, interleave, scatter_block


@native
def padded(kind: Kind, count: int) -> int:
    """count rounded up to whole vectors."""
    return (count + lanes(kind) - 1) // lanes(kind) * lanes(kind)


@native
def stage_transposed(
    kind: Kind, addresses: int, shift: int, step: int, count: int, target: int, target_row: int, width: int
) -> None:
    """target[d][lane] = number d of lane's row, at addresses[lane] + shift + d * step."""
    n, size = lanes(kind), compute_size(kind)
    blocks = count // n * n if step == itemsize(kind) else 0
    for lane in range(0, width, n):
        for d in range(0, blocks, n):
            place = target + d * target_row + lane * size
            gather_block(kind, addresses + 8 * lane, shift + d * step, place, target_row)
    for lane in range(width):
        row = peek_int64(addresses + 8 * lane) + shift
        for d in range(blocks, count):
            poke(kind, target + d * target_row + lane * size, read(kind, row + d * step))


@native
def stage_query(
    kind: Kind, addresses: int, step: int, count: int, target: int, target_row: int, width: int
) -> None:
    """Rows of Q (or dO) transposed; for pair kinds the numbers d and d + 1 of a row share a lane."""
    if not is_pairs(kind):
        stage_transposed(kind, addresses, 0, step, count, target, target_row, width)
        return
    raw = raw_kind(kind)
    pairs = count // 2 if step == itemsize(kind) else 0
    stage_transposed(raw, addresses, 0, 4, pairs, target, target_row, width)
    for lane in range(width):
        row = peek_int64(addresses + 8 * lane)
        for d in range(2 * pairs, count):
            place = target + d // 2 * target_row + 4 * lane + 2 * (d % 2)
            write(kind, place, read(kind, row + d * step))
        if count % 2:
            write(kind, target + count // 2 * target_row + 4 * lane + 2, 0.0)


@native
def _stage_row(kind: Kind, at: int, step: int, count: int, to: int) -> None:
    """One row widened, zeros up to whole vectors."""
    n, size = lanes(kind), compute_size(kind)
    whole = count // n * n if step == itemsize(kind) else 0
    for d in range(0, whole, n):
        store(to + d * size, load_stored(kind, at + d * step))
    for d in range(whole, count):
        poke(kind, to + d * size, read(kind, at + d * step))
    for d in range(count, padded(kind, count)):
        poke(kind, to + d * size, 0.0)


@native
def _stage_pair(kind: Kind, low: int, high: int, step: int, count: int, to: int) -> None:
    """Two rows of bfloat16 interleaved, zeros up to whole vectors; high = 0: the row counts as zeros."""
    n = lanes(kind)
    whole = count // n * n if step == 2 else 0
    for d in range(0, whole, n):
        interleave(kind, low + 2 * d, high + 2 * d if high != 0 else 0, to + 4 * d)
    for d in range(whole, count):
        write(kind, to + 4 * d, read(kind, low + d * step))
        write(kind, to + 4 * d + 2, read(kind, high + d * step) if high != 0 else 0.0)
    for d in range(count, padded(kind, count)):
        write(kind, to + 4 * d, 0.0)
        write(kind, to + 4 * d + 2, 0.0)


@native
def stage_natural(
    kind: Kind, source: int, row_step: int, step: int, rows: int, count: int, target: int, target_row: int
) -> None:
    """target[row][d], widened, zeros up to whole vectors."""
    for row in range(rows):
        _stage_row(kind, source + row * row_step, step, count, target + row * target_row)


@native
def stage_listed(
    kind: Kind, listed: int, rows: int, step: int, count: int, target: int, target_row: int
) -> None:
    """The same for rows anywhere, whose addresses are listed; the list then says where they have gone."""
    for row in range(rows):
        _stage_row(kind, peek_int64(listed + 8 * row), step, count, target + row * target_row)
        poke_int64(listed + 8 * row, target + row * target_row)


@native
def copy_numbers(kind: Kind, source: int, step: int, count: int, target: int) -> None:
    """`count` numbers one behind the other, in storage precision and bit for bit."""
    size = itemsize(kind)
    if step == size:
        copy_bytes(source, target, count * size)
        return
    for d in range(count):
        copy_bytes(source + d * step, target + d * size, size)


@native
def stage_stored(
    kind: Kind, source: int, row_step: int, step: int, rows: int, count: int, target: int, target_row: int
) -> None:
    """target[row][d] in storage precision, contiguous, with one zero behind an odd count."""
    for row in range(rows):
        to = target + row * target_row
        copy_numbers(kind, source + row * row_step, step, count, to)
        write(kind, to + count * itemsize(kind), 0.0)


@native
def stage_row_pairs(
    kind: Kind, source: int, row_step: int, step: int, rows: int, count: int, target: int, target_row: int
) -> None:
    """target[row // 2][d] = the pair (row, row + 1) of number d."""
    for row in range(0, rows, 2):
        low = source + row * row_step
        _stage_pair(
            kind, low, low + row_step if row + 1 < rows else 0, step, count, target + row // 2 * target_row
        )


@native
def stage_lanes(
    kind: Kind, addresses: int, step: int, rows: int, count: int, target: int, target_row: int, width: int
) -> None:
    """The rows of all lanes, one behind the other (pairs of rows for pair kinds); lanes from `rows` on are
    zeros.
    """
    used = (rows + 1) // 2 if is_pairs(kind) else rows
    for i in range(used):
        if is_pairs(kind):
            low = peek_int64(addresses + 16 * i)
            high = peek_int64(addresses + 16 * i + 8) if 2 * i + 1 < rows else 0
            _stage_pair(kind, low, high, step, count, target + i * target_row)
        else:
            _stage_row(kind, peek_int64(addresses + 8 * i), step, count, target + i * target_row)
    total = width // 2 if is_pairs(kind) else width
    fill(kind, target + used * target_row, target_row, total - used, padded(kind, count), 0.0)


@native
def unstage_transposed(
    kind: Kind,
    source: int,
    source_row: int,
    factors: int,
    addresses: int,
    step: int,
    count: int,
    rows: int,
    width: int,
) -> None:
    """Row of lane, number d = source[d][lane] * factors[lane], rounded to the tensor's dtype; `rows` lanes
    count.
    """
    n, size = lanes(kind), compute_size(kind)
    whole = count // n * n if step == itemsize(kind) else 0
    for lane in range(0, width, n):
        complete = whole if lane + n <= rows else 0
        for d in range(0, complete, n):
            place = source + d * source_row + lane * size
            scatter_block(
                kind, place, source_row, load(kind, factors + lane * size), addresses + 8 * lane, d * step
            )
        for one in range(lane, min(lane + n, rows)):
            row, factor = peek_int64(addresses + 8 * one), peek(kind, factors + one * size)
            for d in range(complete, count):
                write(kind, row + d * step, peek(kind, source + d * source_row + one * size) * factor)


@native
def unstage_natural(
    kind: Kind,
    source: int,
    source_row: int,
    factor: float,
    target: int,
    row_step: int,
    step: int,
    rows: int,
    count: int,
) -> None:
    """Row, number d = source[row][d] * factor, rounded to the tensor's dtype."""
    n, size = lanes(kind), compute_size(kind)
    whole = count // n * n if step == itemsize(kind) else 0
    for row in range(rows):
        at, to = source + row * source_row, target + row * row_step
        for d in range(0, whole, n):
            store_stored(kind, to + d * step, load(kind, at + d * size) * splat(kind, factor))
        for d in range(whole, count):
            write(kind, to + d * step, peek(kind, at + d * size) * factor)


@native
def fill(kind: Kind, target: int, target_row: int, rows: int, width: int, value: float) -> None:
    """A packed tile set to one value."""
    for row in range(rows):
        for lane in range(0, width * compute_size(kind), vector_size(kind)):
            store(target + row * target_row + lane, splat(kind, value))
