"""A call whose sequence lies on several ranks, and the problems it falls into: pairs of chunks.

Within a chunk positions are consecutive, so that every mask stays an interval of keys in closed form: a band
moves by the difference of the positions. Pairs of chunks of which no query sees a key are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtile.masks import Intervals
from flashtile.parallel.layouts import Chunk, consecutive
from flashtile.problem import AttentionProblem, Part


class Pair(NamedTuple):
    """A chunk of queries and one of keys: their positions, and where they lie in the shards."""

    queries: Chunk
    keys: Chunk
    rows: slice
    key_rows: slice


class Whole:
    """The call on all ranks. ``queries`` and ``keys`` are the chunks of every rank."""

    def __init__(
        self,
        queries: list[list[Chunk]],
        keys: list[list[Chunk]],
        lengths: tuple[int, int],
        intervals: Intervals,
        *,
        scale: float,
        softcap: float | None = None,
        dropout_p: float = 0.0,
        seed: int = 0,
        head: int = 0,
        heads: int = 0,
    ) -> None:
        """``lengths`` of all queries and keys; ``head`` and ``heads`` as in ``problem.Part``."""
        self.queries, self.keys, self.intervals = queries, keys, intervals
        self._scale, self._softcap, self._dropout_p, self._seed = scale, softcap, dropout_p, seed
        self._head, self._heads = head, heads
        self._query_length, self._key_length = lengths

    def pairs(self, query_rank: int, key_rank: int) -> Iterator[Pair]:
        """The pairs of chunks of two ranks of which some query may see some key."""
        keys = self.keys[key_rank]
        key_places = consecutive([chunk.length for chunk in keys])
        ends = [chunk.end for chunk in keys]
        for index, row_chunk in enumerate(consecutive([chunk.length for chunk in self.queries[query_rank]])):
            low, high = self._extents[query_rank][index]
            for number in range(bisect_right(ends, low), len(keys)):
                chunk = keys[number]
                if chunk.start >= high:
                    break
                if max(low, chunk.start) < min(high, chunk.end):
                    yield Pair(
                        self.queries[query_rank][index], chunk, row_chunk.span, key_places[number].span
                    )

    def needs(self, query_rank: int, key_rank: int) -> bool:
        """Whether some query of one rank may see some key of another."""
        return next(self.pairs(query_rank, key_rank), None) is not None

    @cached_property
    def _extents(self) -> list[list[tuple[int, int]]]:
        """For every chunk of queries, bounds [low, high) of the keys that some of them see."""
        lower, upper, first, last, _ = self.intervals
        low = [[0 if lower is None else max(0, chunk.start + lower) for chunk in own] for own in self.queries]
        high = [
            [self._key_length if upper is None else min(self._key_length, chunk.end + upper) for chunk in own]
            for own in self.queries
        ]
        if first is not None and last is not None:
            low, high = self._extents_by_row(first, last)
        return [
            [
                (begin, end) if chunk.length else (0, 0)
                for chunk, begin, end in zip(own, begins, ends, strict=True)
            ]
            for own, begins, ends in zip(self.queries, low, high, strict=True)
        ]

    def _extents_by_row(self, first: Tensor, last: Tensor) -> list[list[list[int]]]:
        """The lowest and the highest key that the rows of every chunk see, band and intervals together."""
        lower, upper, *_ = self.intervals
        rows = torch.arange(self._query_length, dtype=torch.int64, device=first.device)
        begin, end = first.long().expand(-1, len(rows)), last.long().expand(-1, len(rows))
        if lower is not None:
            begin = torch.maximum(begin, rows + lower)
        if upper is not None:
            end = torch.minimum(end, rows + upper + 1)
        nothing = begin >= end
        begin, end = begin.masked_fill(nothing, self._key_length), end.masked_fill(nothing, 0)
        chunks = [chunk for own in self.queries for chunk in own]
        lows = _of_chunks(np.minimum, begin.amin(0) if len(begin) else begin.new_zeros(len(rows)), chunks)
        highs = _of_chunks(np.maximum, end.amax(0) if len(end) else end.new_zeros(len(rows)), chunks)
        sizes = [len(own) for own in self.queries]
        return [[list(islice(bounds, size)) for size in sizes] for bounds in (iter(lows), iter(highs))]

    def problem(
        self, pair: Pair, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None
    ) -> AttentionProblem:
        """The problem of a pair; the tensors are whole shards of the two ranks."""
        queries, keys, rows, key_rows = pair
        lower, upper, first, last, dense = self.intervals
        shift = queries.start - keys.start
        lower = None if lower is None or lower + shift <= 1 - queries.length else lower + shift
        upper = None if upper is None or upper + shift >= keys.length - 1 else upper + shift
        part = Part(queries.start, keys.start, self._head, self._heads, self._key_length - self._query_length)
        return AttentionProblem(
            query[:, :, rows], key[:, :, key_rows], value[:, :, key_rows], self._scale, self._softcap, lower,
            upper, _seen_from(first, pair), _seen_from(last, pair),
            mask=None if dense is None else _cut(_cut(dense, 2, queries), 3, keys), alibi_slopes=slopes,
            dropout_p=self._dropout_p, seed=self._seed, part=part,
        )  # fmt: skip

    def without_keys(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> AttentionProblem:
        """A part that has the sinks, which count once in a row, and no key."""
        part = Part(heads=self._heads)
        return AttentionProblem(
            query, key[:, :, :0], value[:, :, :0], self._scale, self._softcap, sinks=sinks, part=part
        )


def _of_chunks(reduce: np.ufunc, bounds: Tensor, chunks: list[Chunk]) -> list[int]:
    """The least or the largest bound of the rows of every chunk; anything for an empty one."""
    padded = np.append(bounds.cpu().numpy(), 0)  # so that an index may be the number of rows
    limits = np.array([(chunk.start, chunk.end) for chunk in chunks]).reshape(-1)
    found: list[int] = reduce.reduceat(padded, limits)[::2].tolist()
    return found


def _seen_from(bound: Tensor | None, pair: Pair) -> Tensor | None:
    """A bound of the intervals, in key positions of the whole, for the rows of the pair in its own keys."""
    if bound is None:
        return None
    return (_cut(bound, 1, pair.queries) - pair.keys.start).clamp(0, pair.keys.length)


def _cut(tensor: Tensor, dim: int, chunk: Chunk) -> Tensor:
    """A chunk of a dimension that is of full size, or 1."""
    return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, *chunk)
