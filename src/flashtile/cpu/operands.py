"""K and V as the products read them: where they lie if possible, else one tile staged into scratch."""

from __future__ import annotations

from .call import AT_PAGES, GRAD_OUT, HEAD_DIM, QUERY, VALUE_DIM, field
from .gemm import Operand
from .kinds import Kind, compute_size, is_pairs, is_widened, itemsize, lanes
from .native import native
from .rows import COUNT, GRAD_OUT_ROW, QUERY_ROW
from .sequences import key_at, run_length
from .simd import all_lanes, load_stored, peek_int64, read, splat
from .stage import copy_numbers, padded, stage_natural, stage_row_pairs, stage_stored


@native
def _rows_of_tile(
    kind: Kind,
    call: int,
    scratch: int,
    tensor: int,
    batch: int,
    kv_head: int,
    first: int,
    keys: int,
    dim: int,
) -> tuple[int, int, int]:
    """Address of a tile of keys or values and the steps to the next row and number: where it lies, or copied
    together from several pages.
    """
    count, step = field(call, dim), field(call, tensor + 4)
    if run_length(call, first, keys) == keys:
        return key_at(call, tensor, batch, kv_head, first), field(call, tensor + 3), step
    size, target, done = itemsize(kind), scratch + field(call, AT_PAGES), 0
    row, row_step = count * size, field(call, tensor + 3)
    while done < keys:
        run = run_length(call, first + done, keys - done)
        source = key_at(call, tensor, batch, kv_head, first + done)
        for j in range(run):
            copy_numbers(kind, source + j * row_step, step, count, target + (done + j) * row)
        done += run
    return target, row, size


@native
def key_operand(
    kind: Kind,
    call: int,
    scratch: int,
    tensor: int,
    batch: int,
    kv_head: int,
    first: int,
    keys: int,
    dim: int,
    space: int,
) -> Operand:
    """Keys (or values) as A of scores = K Q^T."""
    count = field(call, dim)
    source, row_step, step = _rows_of_tile(kind, call, scratch, tensor, batch, kv_head, first, keys, dim)
    if is_pairs(kind):
        if count % 2 == 0 and step == 2:
            return Operand(source, row_step, 4, count // 2)
        row = padded(kind, count + 1) * 2
        stage_stored(kind, source, row_step, step, keys, count, space, row)
        return Operand(space, row, 4, (count + 1) // 2)
    if is_widened(kind):
        row = padded(kind, count) * compute_size(kind)
        stage_natural(kind, source, row_step, step, keys, count, space, row)
        return Operand(space, row, compute_size(kind), count)
    return Operand(source, row_step, step, count)


@native
def columns_operand(
    kind: Kind,
    call: int,
    scratch: int,
    tensor: int,
    batch: int,
    kv_head: int,
    first: int,
    keys: int,
    dim: int,
    space: int,
) -> Operand:
    """Values (or keys) as A of O^T += V^T P^T, which sums over keys (or pairs of keys)."""
    count, row = field(call, dim), padded(kind, field(call, dim)) * compute_size(kind)
    source, row_step, step = _rows_of_tile(kind, call, scratch, tensor, batch, kv_head, first, keys, dim)
    if is_pairs(kind):
        stage_row_pairs(kind, source, row_step, step, keys, count, space, row)
        return Operand(space, 4, row, (keys + 1) // 2)
    if is_widened(kind):
        stage_natural(kind, source, row_step, step, keys, count, space, row)
        return Operand(space, compute_size(kind), row, keys)
    return Operand(source, step, row_step, keys)


@native
def all_finite(
    kind: Kind, call: int, tensor: int, batch: int, kv_head: int, first: int, rows: int, dim: int
) -> bool:
    """Whether a tile of keys or values holds no NaN and no infinity (their product with 0 would be NaN)."""
    row_step, step, count, done = field(call, tensor + 3), field(call, tensor + 4), field(call, dim), 0
    while done < rows:
        run = run_length(call, first + done, rows - done)
        source = key_at(call, tensor, batch, kv_head, first + done)
        if not rows_finite(kind, source, row_step, step, run, count):
            return False
        done += run
    return True


@native
def lanes_finite(kind: Kind, call: int, table: int) -> bool:
    """The same for the rows of Q and dO that the lanes hold."""
    for lane in range(peek_int64(table + COUNT)):
        query, grad_out = (
            peek_int64(table + QUERY_ROW + 8 * lane),
            peek_int64(table + GRAD_OUT_ROW + 8 * lane),
        )
        if not rows_finite(kind, query, 0, field(call, QUERY + 4), 1, field(call, HEAD_DIM)):
            return False
        if not rows_finite(kind, grad_out, 0, field(call, GRAD_OUT + 4), 1, field(call, VALUE_DIM)):
            return False
    return True


@native
def rows_finite(kind: Kind, source: int, row_step: int, step: int, rows: int, count: int) -> bool:
    total, zero = splat(kind, 0.0), splat(kind, 0.0)
    whole = count // lanes(kind) * lanes(kind) if step == itemsize(kind) else 0
    rest = 0.0
    for row in range(rows):
        at = source + row * row_step
        for d in range(0, whole, lanes(kind)):
            total = total + load_stored(kind, at + d * step) * zero
        for d in range(whole, count):
            rest += read(kind, at + d * step) * 0.0
    return rest == 0.0 and all_lanes(total == zero)
