"""Tables for the kernels of calls whose sequences have lengths of their own (see sequences.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .sequences import SCHEDULE_FIELDS, SEQUENCE_FIELDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..problem import AttentionProblem

    Integers = NDArray[np.int64]


class Sequences(NamedTuple):
    """Every sequence, in the order of the batch."""

    table: Integers  # (B, SEQUENCE_FIELDS), what the kernels read
    queries: Integers  # (B,)
    keys: Integers  # (B,)

    @property
    def pairs(self) -> float:
        """Scores of one head: the sum of queries times keys."""
        return float(np.dot(self.queries, self.keys))

    def only(self, chosen: Integers) -> Sequences:
        """Some of them, by number."""
        return Sequences(self.table[chosen], self.queries[chosen], self.keys[chosen])


def sequences_of(problem: AttentionProblem) -> Sequences:
    table = np.zeros((problem.sequences, SEQUENCE_FIELDS), dtype=np.int64)
    query_start, queries, key_start, keys, entry = table.T
    queries[:] = problem.query.shape[2]
    if problem.query_starts is not None:
        starts = problem.query_starts.numpy()
        query_start[:], queries[:] = starts[:-1], np.diff(starts)
    if problem.key_starts is not None:
        starts = problem.key_starts.numpy()
        key_start[:], keys[:] = starts[:-1], np.diff(starts)
    elif problem.key_lengths is not None:
        keys[:] = problem.key_lengths.numpy()
        index = problem.batch_index
        entry[:] = np.arange(len(table)) if index is None else index.numpy()
    return Sequences(table, queries, keys)


class Schedule(NamedTuple):
    """The tasks of one kernel run, sequence by sequence, those with the most keys first."""

    table: Integers  # (rows, SCHEDULE_FIELDS), what the kernels read
    tasks: int
    places: int  # what all sequences take of SPACE


def schedule(
    sequences: Sequences, tasks: Integers, tiles: Integers, splits: Integers, places: Integers
) -> Schedule:
    """``tasks`` and ``places`` of each sequence, and ``tiles`` and ``splits`` of each of its heads.

    Sequences without tasks are left out.
    """
    # The backward pass counts on this order: who shares a bias has at least the splits of those behind it.
    order = np.argsort(-sequences.keys, kind="stable")
    table = np.zeros((len(order), SCHEDULE_FIELDS), dtype=np.int64)
    table[:, 0] = np.cumsum(tasks[order]) - tasks[order]
    table[:, 1], table[:, 2], table[:, 3] = order, tiles[order], splits[order]
    table[:, 4] = np.cumsum(places[order]) - places[order]
    return Schedule(table[tasks[order] > 0], int(tasks.sum()), int(places.sum()))


def in_rounds(plan: Schedule, most: int) -> list[Schedule]:
    """The schedule in parts that take at most ``most`` places each, or that are one sequence."""
    table, rounds, first = plan.table, [], 0
    ends = np.append(table[1:, 4], plan.places)  # places of the sequences up to each
    while first < len(table):
        last = max(first + 1, int(np.searchsorted(ends, table[first, 4] + most, side="right")))
        part = table[first:last].copy()
        tasks = (table[last, 0] if last < len(table) else plan.tasks) - part[0, 0]
        part[:, 0] -= part[0, 0]
        part[:, 4] -= part[0, 4]
        rounds.append(Schedule(part, int(tasks), int(ends[last - 1] - table[first, 4])))
        first = last
    return rounds


class Extent(NamedTuple):
    """What a backward pass runs over."""

    batch: int
    queries: int  # of the longest sequence
    keys: int
    pairs: float  # queries times keys, over all sequences
    tiles: int  # of rows, the most that a key head has
    splits: int  # of keys, the most that a key head has
    places: int  # tiles of all sequences and key heads of a round, the most
    tasks: int  # of a round, the most
    rounds: tuple[Schedule, ...]  # of sequences with lengths of their own, one run after the other
    sequences: Sequences | None  # the call points to their table, and nobody else holds it
