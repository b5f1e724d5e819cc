"""K Q^T for few query rows, where memory is the limit: K is read once, in whole vectors along head_dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kinds import (
    I32,
    I64,
    Kind,
    compute_size,
    lanes,
    register_bytes,
    vector_size,
)
from .llvm import (
    LINE,
    const,
    dot_pairs_value,
    fma_value,
    offset,
    pointer,
    prefetch,
    widen_value,
)
from .native import native
from .simd import peek_int64, poke
from .tiles import sum_lanes

# Cache lines that are asked for in one burst, before the work on as many that are near. On Zen 4 a core then
# reads about as fast as it can; the same requests spread over that work take 1.1 to 1.3 times as long.
BURST = 32


def _load_operand(b: ir.IRBuilder, kind: Kind, address: ir.Value) -> ir.Value:
    """One register of stored numbers: widened, or raw pairs for dot products of pairs."""
    if kind.pairs:
        return b.load(pointer(b, address, ir.VectorType(ir.FloatType(), kind.lanes)), align=2)
    return widen_value(b, kind, address, kind.lanes)


def _load_query(b: ir.IRBuilder, kind: Any, address: ir.Value) -> ir.Value:
    """One register of a query: raw pairs, or numbers that were widened once for all keys."""
    if kind.kind.pairs:
        return _load_operand(b, kind.kind, address)
    return b.load(pointer(b, address, kind.vector.llvm), align=4)


def _per_block(kind: Kind, rows: int) -> int:
    """Keys beside `rows` query rows: their sums are as many vectors as a vector has lanes."""
    return max(1, kind.lanes // rows)


def _number_at(b: ir.IRBuilder, listed: ir.Value, i: int) -> ir.Value:
    return b.load(pointer(b, b.add(listed, ir.Constant(I64, 8 * i)), I64), align=8)


def numbers(count: Callable[[Kind], int]) -> Any:
    """The first int64 of a list, as many as `count` says."""

    @intrinsic
    def addresses(tc: Any, kind: Any, listed: Any) -> Any:
        n = count(kind.kind)

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return cgutils.pack_array(b, [_number_at(b, args[1], i) for i in range(n)])

        return types.UniTuple(types.int64, n)(kind, types.int64), gen

    return addresses


def _ask_lines(lines: int) -> Any:
    @intrinsic
    def ask(tc: Any, address: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            prefetch(b, args[0], lines * LINE)
            return ctx.get_dummy_value()

        return types.void(types.int64), gen

    return ask


_ask_4, _ask_1 = _ask_lines(4), _ask_lines(1)


@native
def ask_for(rows: int, count: int, start: int, end: int) -> None:
    """Asks for the bytes [start, end) of each of `count` listed rows, in one burst."""
    whole = start + (end - start) // (4 * LINE) * (4 * LINE)
    for i in range(count):
        row = peek_int64(rows + 8 * i)
        for shift in range(start, whole, 4 * LINE):
            _ask_4(row + shift)
        for shift in range(whole, end, LINE):
            _ask_1(row + shift)


def _dot_operations(rows: int) -> tuple[Any, Any, Any]:
    """Addresses of a block of keys; accumulators += K * Q for it and `rows` query rows, one register of
    each at a time; and where their sums go.
    """

    @intrinsic
    def step(tc: Any, kind: Any, sums: Any, keys: Any, shift: Any, query: Any, query_row: Any) -> Any:
        k = kind.kind

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _, sums_value, keys_value, shift_value, query_value, query_row_value = args
            if k.lanes < rows:  # unreachable in such a kernel, yet it must compile
                return sums_value
            queries = [_load_query(b, kind, offset(b, query_value, r, query_row_value)) for r in range(rows)]
            result = []
            for i in range(k.lanes // rows):
                one = _load_operand(b, k, b.add(b.extract_value(keys_value, i), shift_value))
                for r in range(rows):
                    old = b.extract_value(sums_value, i * rows + r)
                    new = (
                        dot_pairs_value(b, old, one, queries[r])
                        if k.pairs
                        else fma_value(b, kind.vector, one, queries[r], old)
                    )
                    result.append(new)
            return cgutils.pack_array(b, result)

        tile, addresses = (
            types.UniTuple(kind.vector, k.lanes),
            types.UniTuple(types.int64, _per_block(k, rows)),
        )
        return tile(kind, tile, addresses, *[types.int64] * 3), gen

    @intrinsic
    def put(tc: Any, kind: Any, sums: Any, scores: Any, score_row: Any) -> Any:
        """The sums of a block, key by key, to the rows of its keys."""

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _, value, scores_value, row = args
            for i in range(kind.kind.lanes // rows):
                lanes_of_key = ir.Constant(ir.VectorType(I32, rows), [i * rows + r for r in range(rows)])
                part = b.shuffle_vector(value, value, lanes_of_key)
                place = offset(b, scores_value, i, row)
                b.store(part, pointer(b, place, part.type), align=4)
            return ctx.get_dummy_value()

        return types.void(kind, kind.vector, *[types.int64] * 2), gen

    return numbers(lambda kind: _per_block(kind, rows)), step, put


_DOTS = {rows: _dot_operations(rows) for rows in (1, 2, 4)}


@intrinsic
def _no_sums(tc: Any, kind: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return cgutils.pack_array(b, [const(kind.vector, 0.0)] * kind.kind.lanes)

    return types.UniTuple(kind.vector, kind.kind.lanes)(kind), gen


def _evens_of_both(n: int, run: int, group: int) -> list[int]:
    """Lanes of two vectors x, y: of every `group` lanes the even runs of x, then those of y. The odd runs
    begin `run` lanes later.
    """
    half = [first + lane for first in range(0, group, 2 * run) for lane in range(run)]
    return [start + lane for start in range(0, n, group) for lane in (*half, *(n + i for i in half))]


@intrinsic
def _sum_each(tc: Any, kind: Any, sums: Any) -> Any:
    """Lane i = the sum over the lanes of vector i, neighbours first; each of log2(lanes) rounds halves the
    vectors.
    """
    n = kind.kind.lanes
    near = 16 // kind.kind.compute_size  # lanes of 128 bits, within which shuffles are cheap

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vectors, mask, distance = [b.extract_value(args[1], i) for i in range(n)], ir.VectorType(I32, n), 1
        while distance < n:
            run, group = (1, near) if distance < near else (near, n)
            even = _evens_of_both(n, run, group)
            odd = [lane + run for lane in even]
            vectors = [
                b.fadd(
                    b.shuffle_vector(x, y, ir.Constant(mask, even)),
                    b.shuffle_vector(x, y, ir.Constant(mask, odd)),
                )
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            distance *= 2
        return vectors[0]

    return kind.vector(kind, types.UniTuple(kind.vector, n)), gen


def _make_dots(rows: int) -> Any:
    block, step, put = _DOTS[rows]

    @native
    def dots(
        kind: Kind,
        listed: int,
        ahead: int,
        asked: int,
        query: int,
        query_row: int,
        length: int,
        scores: int,
        score_row: int,
    ) -> None:
        """Scores of lanes / rows keys and `rows` query rows; length = bytes of one key, whole registers.

        Meanwhile `asked` rows are asked for.
        """
        sums, keys = _no_sums(kind), block(kind, listed)
        chunk = BURST // max(1, lanes(kind) // rows) * LINE
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            ask_for(ahead, asked, start, end)
            for shift in range(start, end, register_bytes(kind)):
                at = query + shift // register_bytes(kind) * vector_size(kind)
                sums = step(kind, sums, keys, shift, at, query_row)
        put(kind, _sum_each(kind, sums), scores, score_row)

    return dots


_dots_1, _dots_2, _dots_4 = (_make_dots(rows) for rows in (1, 2, 4))


@native
def score_rows(
    kind: Kind,
    listed: int,
    ahead: int,
    query: int,
    query_row: int,
    length: int,
    keys: int,
    rows: int,
    scores: int,
    score_row: int,
) -> None:
    """scores[key][row] = K Q^T for few rows: blocks of 4, 2 and 1 rows, as many keys as registers allow.

    `listed` holds the address of every key, `ahead` that of a row to ask for meanwhile.
    """
    row, size = 0, compute_size(kind)
    while row < rows:
        block = 4 if rows - row >= 4 and lanes(kind) >= 4 else 2 if rows - row >= 2 else 1
        per, queries, target = lanes(kind) // block, query + row * query_row, scores + row * size
        first = 0
        while first < keys:
            # The last block overlaps the one before it; where there is none, keys go one by one.
            if keys >= per:
                first = min(first, keys - per)
                own, later, place = listed + 8 * first, ahead + 8 * first, target + first * score_row
                asked = per if row == 0 else 0
                if block == 4:
                    _dots_4(kind, own, later, asked, queries, query_row, length, place, score_row)
                elif block == 2:
                    _dots_2(kind, own, later, asked, queries, query_row, length, place, score_row)
                else:
                    _dots_1(kind, own, later, asked, queries, query_row, length, place, score_row)
                first += per
            else:
                for r in range(block):
                    place = target + first * score_row + r * size
                    key = peek_int64(listed + 8 * first)
                    poke(kind, place, _dot(kind, key, queries + r * query_row, length))
                first += 1
        row += block


@native
def _dot(kind: Kind, key: int, query: int, length: int) -> float:
    total = _no_sums(kind)[0]
    for i in range(length // register_bytes(kind)):
        total = _dot_one(kind, total, key + i * register_bytes(kind), query + i * vector_size(kind))
    return sum_lanes(kind, total)


@intrinsic
def _dot_one(tc: Any, kind: Any, total: Any, key: Any, query: Any) -> Any:
    k = kind.kind

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        one, other = _load_operand(b, k, args[2]), _load_query(b, kind, args[3])
        if k.pairs:
            return dot_pairs_value(b, args[1], one, other)
        return fma_value(b, kind.vector, one, other, args[1])

    return kind.vector(kind, kind.vector, types.int64, types.int64), gen
