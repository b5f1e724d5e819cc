"""Closed forms for what the algorithms of the lab do: exact, for any lengths, blocks and masks, at once.

One head has N queries and N_k keys, head dims d (query, key) and d_v (value). Of the tiles of B_r x B_c let

    A = sum of B_r B_c      R = sum of B_r      C = sum of B_c

over all that are visited: N N_k, N ceil(N_k / B_c) and N_k ceil(N / B_r) where nothing is masked, whether or
not the blocks divide the lengths. In numbers rather than bytes, with d_v = d and N_k = N, the traffic is

                        forward                       backward
    standard            4 N^2 + 4 N d                 7 N^2 + 8 N d
    FlashAttention      (3 R + 3 N) d + 4 R + 2 N     (5 R + 7 N) d + 2 R
    FlashAttention-2    (2 C + 2 N) d + N             (4 R + 7 N) d + 2 R + N

With blocks from a small memory of M numbers (`block_sizes`), R and, in the last line, C are about
4 N^2 d / M: Theta(N d + N^2) for standard attention against Theta(N^2 d^2 / M), Theorem 2 of the first paper.
Setting the first paper's results to 0 in the large memory is part of it: N d forward, 3 N d backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Literal

from flashtile.checks import check_choice, check_sizes
from flashtile.lab.algorithms import ALGORITHMS, Algorithm
from flashtile.lab.memory import Counts
from flashtile.lab.setting import Blocks, check_blocks

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One head: lengths, head dims, visible keys as in `lab.Setting`, whether there is dropout."""

    query_length: int
    key_length: int
    head_dim: int
    value_head_dim: int
    lower: int | None = None
    upper: int | None = None
    dropout: bool = False


@dataclass(frozen=True)
class Tiles:
    """The tiles that are visited, summed up."""

    area: int  # A
    rows: int  # R
    columns: int  # C
    keys: int  # keys of the blocks in which any tile is visited
    sizes: frozenset[tuple[int, int]]  # (rows, columns) of the largest ones


@dataclass(frozen=True)
class Moves:
    """Numbers that move to and from the large memory in one pass, by what they are: which term dominates?"""

    scores: int = 0  # matrices of N x N_k
    once: int = 0  # inputs and results, so many times whatever the blocks are
    per_block: int = 0  # inputs and results, once for each block of the other side
    statistics: int = 0  # row sums, row maxima, LSE, delta

    @property
    def total(self) -> int:
        return self.scores + self.once + self.per_block + self.statistics

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(vars(self).items(), key=lambda term: term[1])[0]

    def __add__(self, other: Moves) -> Moves:
        return Moves(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Pass:
    """One pass of one head: what it reads and writes, in numbers, and its counts in bytes and FLOPs."""

    read: Moves
    written: Moves
    counts: Counts

    @property
    def moves(self) -> Moves:
        return self.read + self.written


def block_sizes(
    algorithm: Algorithm, direction: Direction, sram: int, head_dim: int, element_size: int = 2
) -> Blocks:
    """Block sizes for ``sram`` bytes of small memory: line 1 of the first paper's algorithms.

    With M numbers in it, B_c = ceil(M / 4 d) and B_r = min(B_c, d), so that a block each of Q, K, V and O
    fits. The second paper gives no rule. The side of its outer loop is read once and the other side once for
    each of its blocks, so the outer side gets the large ones here: forward the same rule with rows and
    columns exchanged, backward the first paper's. Standard attention does not use its blocks.
    """
    check_sizes(sram=sram, head_dim=head_dim, element_size=element_size)
    numbers = sram // element_size
    if numbers < 1:
        raise ValueError(f"sram must hold at least one number of {element_size} bytes, got {sram} bytes")
    large = -(-numbers // (4 * head_dim))
    small = min(large, head_dim)
    return Blocks(large, small) if (algorithm, direction) == ("flash2", "forward") else Blocks(small, large)


def leading_traffic(
    algorithm: Algorithm, direction: Direction, length: int, head_dim: int, sram: float
) -> float:
    """What the traffic tends to for long sequences, in numbers, with ``sram`` numbers of small memory.

    Equal lengths and head dims, no mask, blocks from `block_sizes`. FlashAttention's forward pass moves
    12 N^2 d^2 / M and standard attention 4 N^2: the first is less where M > 3 d^2.
    """
    if algorithm == "standard":
        return {"forward": 4.0, "backward": 7.0}[direction] * length**2
    times = {"flash1": {"forward": 12, "backward": 20}, "flash2": {"forward": 8, "backward": 16}}
    return times[algorithm][direction] * length**2 * head_dim**2 / sram


def saved_by_flash2(shape: Shape, blocks: Blocks) -> int:
    """How many fewer FLOPs outside matrix products FlashAttention-2's forward pass does, on equal blocks.

    Each visit to a tile, FlashAttention multiplies P V and its row sums by exp(tile maximum - new maximum),
    with one more exponential and one more difference a row, and divides the output; FlashAttention-2 takes a
    logarithm, an addition and a division for each row once: R (d_v + 1) + (R - N) (d_v + 2).
    """
    rows, value_head_dim = tiles(shape, blocks).rows, shape.value_head_dim
    return rows * (value_head_dim + 1) + (rows - shape.query_length) * (value_head_dim + 2)


@lru_cache(maxsize=256)
def tiles(shape: Shape, blocks: Blocks) -> Tiles:
    """The visited tiles: products without a mask, a sum over the blocks of queries with one."""
    queries, keys = shape.query_length, shape.key_length
    row_blocks, column_blocks = -(-queries // blocks.rows), -(-keys // blocks.columns)
    if shape.lower is None and shape.upper is None:
        size = min(blocks.rows, queries), min(blocks.columns, keys)
        return Tiles(queries * keys, queries * column_blocks, keys * row_blocks, keys, frozenset({size}))
    area = rows = columns = seen = done = 0
    sizes = set()
    for start in range(0, queries, blocks.rows):
        height = min(blocks.rows, queries - start)
        first, end = 0, column_blocks
        if shape.lower is not None:
            if start + shape.lower >= keys:  # may be within the last block, but behind the last key
                break
            first = max(first, (start + shape.lower) // blocks.columns)
        if shape.upper is not None:
            end = min(end, (start + height - 1 + shape.upper) // blocks.columns + 1)
        if first >= end:
            continue
        stop = min(end * blocks.columns, keys)
        width = stop - first * blocks.columns
        area, rows, columns = area + height * width, rows + height * (end - first), columns + width
        # Bands move to the right with the queries: what is new of this one begins where the last one ended.
        seen += max(0, stop - max(first, done) * blocks.columns)
        done = max(done, end)
        sizes.add((height, min(blocks.columns, width)))
    return Tiles(area, rows, columns, seen, frozenset(sizes))


def one_pass(
    algorithm: Algorithm, direction: Direction, shape: Shape, blocks: Blocks, element_size: int = 2
) -> Pass:
    """What one pass of one head does, exactly as `lab.run` counts it."""
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("direction", direction, DIRECTIONS)
    check_blocks("blocks", blocks)
    found = _PASSES[algorithm, direction](shape, tiles(shape, blocks))
    counts = found.counts
    return replace(
        found,
        counts=replace(
            counts,
            read=found.read.total * element_size,
            written=found.written.total * element_size,
            intermediate=counts.intermediate * element_size,
            on_chip=counts.on_chip * element_size,
        ),
    )


def _standard_forward(shape: Shape, _: Tiles) -> Pass:
    n, k, d, e = _sizes(shape)
    return Pass(
        read=Moves(scores=2 * n * k, once=n * d + k * d + k * e),
        written=Moves(scores=2 * n * k, once=n * e),
        counts=Counts(
            matmul=2 * n * k * (d + e),
            exponentials=n * k,
            divisions=n * k,
            arithmetic=(4 + shape.dropout) * n * k,
            intermediate=2 * n * k,
        ),
    )


def _standard_backward(shape: Shape, _: Tiles) -> Pass:
    n, k, d, e = _sizes(shape)
    return Pass(
        read=Moves(scores=5 * n * k, once=2 * n * e + k * e + k * d + n * d),
        written=Moves(scores=2 * n * k, once=n * d + k * d + k * e),
        counts=Counts(
            matmul=4 * n * k * (d + e),
            arithmetic=(4 + 2 * shape.dropout) * n * k + n * d + k * d,
            intermediate=2 * n * k,
        ),
    )


def _flash1_forward(shape: Shape, tiles: Tiles) -> Pass:
    n, _, d, e = _sizes(shape)
    A, R = tiles.area, tiles.rows
    return Pass(
        read=Moves(once=tiles.keys * (d + e), per_block=R * (d + e), statistics=2 * R),
        written=Moves(once=n * e, per_block=R * e, statistics=2 * n + 2 * R),
        counts=Counts(
            matmul=2 * A * (d + e),
            exponentials=A + 2 * R,
            divisions=R * e,
            rescaling=2 * R * (e + 1),
            arithmetic=(4 + shape.dropout) * A + R * (e + 4),
            intermediate=2 * n,
            on_chip=_forward_on_chip(tiles, d, e),
        ),
    )


def _flash2_forward(shape: Shape, tiles: Tiles) -> Pass:
    n, _, d, e = _sizes(shape)
    A, R = tiles.area, tiles.rows
    return Pass(
        read=Moves(once=n * d, per_block=tiles.columns * (d + e)),
        written=Moves(once=n * e, statistics=n),
        counts=Counts(
            matmul=2 * A * (d + e),
            exponentials=A + R + n,
            divisions=n * e,
            rescaling=R * (e + 1),
            arithmetic=(4 + shape.dropout) * A + R * (e + 3) + n,
            intermediate=n,
            on_chip=_forward_on_chip(tiles, d, e),
        ),
    )


def _flash1_backward(shape: Shape, tiles: Tiles) -> Pass:
    n, k, d, e = _sizes(shape)
    A, R = tiles.area, tiles.rows
    return Pass(
        read=Moves(once=tiles.keys * (d + e), per_block=2 * R * (d + e), statistics=2 * R),
        written=Moves(once=n * d + (k + tiles.keys) * (d + e), per_block=R * d),
        counts=Counts(
            matmul=A * (6 * d + 4 * e),
            exponentials=A,
            divisions=A,
            arithmetic=_backward_arithmetic(shape, tiles) + 2 * R * e,
            on_chip=_backward_on_chip(tiles, d, e, of_query=2 * d + 2 * e),
        ),
    )


def _flash2_backward(shape: Shape, tiles: Tiles) -> Pass:
    n, k, d, e = _sizes(shape)
    A, R = tiles.area, tiles.rows
    return Pass(
        read=Moves(once=2 * n * e + tiles.keys * (d + e), per_block=R * (2 * d + e), statistics=2 * R),
        written=Moves(once=n * d + k * (d + e), per_block=R * d, statistics=n),
        counts=Counts(
            matmul=A * (6 * d + 4 * e),
            exponentials=A,
            arithmetic=_backward_arithmetic(shape, tiles) + 2 * n * e,
            intermediate=n,
            on_chip=_backward_on_chip(tiles, d, e, of_query=2 * d + e),
        ),
    )


_PASSES: dict[tuple[Algorithm, Direction], Callable[[Shape, Tiles], Pass]] = {
    ("standard", "forward"): _standard_forward,
    ("standard", "backward"): _standard_backward,
    ("flash1", "forward"): _flash1_forward,
    ("flash1", "backward"): _flash1_backward,
    ("flash2", "forward"): _flash2_forward,
    ("flash2", "backward"): _flash2_backward,
}


def _sizes(shape: Shape) -> tuple[int, int, int, int]:
    return shape.query_length, shape.key_length, shape.head_dim, shape.value_head_dim


def _backward_arithmetic(shape: Shape, tiles: Tiles) -> int:
    """All but delta: scaling, S - LSE, dP - D and P * (dP - D); scaling and adding up dQ, dK, dV."""
    d, e = shape.head_dim, shape.value_head_dim
    return (4 + 2 * shape.dropout) * tiles.area + 2 * tiles.rows * d + tiles.columns * (2 * d + e)


def _forward_on_chip(tiles: Tiles, d: int, e: int) -> int:
    """Q, O and two statistics; K and V; the scores."""
    return max(
        (rows * (d + e + 2) + columns * (d + e) + rows * columns for rows, columns in tiles.sizes), default=0
    )


def _backward_on_chip(tiles: Tiles, d: int, e: int, of_query: int) -> int:
    """What a query has with two statistics; K, V and their gradients; P and dP."""
    return max(
        (rows * (of_query + 2) + 2 * columns * (d + e) + 2 * rows * columns for rows, columns in tiles.sizes),
        default=0,
    )
