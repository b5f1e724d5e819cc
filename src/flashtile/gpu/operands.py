"""What the kernels are handed, grouped by meaning: the fields of an AttentionProblem as addresses and steps.

Every class is a tuple that Triton takes as one argument; a field that is None does not exist in the compiled
kernel, so that an option nobody uses costs nothing. A tuple of tuples ends with None, or Triton 3.6 loses the
steps of its last one that are 1.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.dropout import keep_scale, keep_threshold, seed_tensor
from flashtile.problem import AttentionProblem, Part

# Beyond any position; the sum with a position still fits in int32.
_UNBOUNDED = 2**30


class Rows(NamedTuple):
    """A 4-D tensor (batch, heads, rows, columns): its first number, and the steps to the next of each."""

    start: Tensor
    batch: int
    head: int
    row: int
    column: int


class Plane(NamedTuple):
    """A mask or a bias. Beyond its rows and columns nothing is seen: lengths on a device are not checked."""

    numbers: Rows
    rows: int | None  # None: no sequence has more
    columns: int | None
    nothing: None = None


class Sequences(NamedTuple):
    """How many queries and keys there are, and where they lie if sequences have lengths of their own."""

    number: int
    queries: int  # of each sequence, or of all packed ones
    keys: int  # likewise; with a block table, those that its rows have room for
    query_starts: Tensor | None  # int64 (number + 1,)
    key_starts: Tensor | None  # int64 (number + 1,)
    key_lengths: Tensor | None  # int64 (number,)
    batch_index: Tensor | None  # int64 (number,)
    block_table: Tensor | None  # int32 (number, pages)
    pages: int  # in a row of the table
    page_size: int
    entries: int  # batch entries of the cache, or pages


class Visible(NamedTuple):
    """Which keys a query sees: ``i + lower <= j <= i + upper``, ``first <= j < last``, and ``mask``."""

    lower: int | None
    upper: int | None
    first: Rows | None  # int32, indexed by batch entry and row
    last: Rows | None
    mask: Plane | None  # bytes that are 0 or 1
    nothing: None = None


class Terms(NamedTuple):
    """What is added to the scores, and dropout."""

    scale: float
    softcap: float | None
    bias: Plane | None
    slopes: Rows | None  # indexed by batch entry and head
    sinks: Tensor | None  # (heads,)
    seed: Tensor | None  # int64 (1,)
    threshold: Any  # int: the smallest random word that keeps an entry
    keep_scale: float
    part: Part | None  # where the problem lies in a larger one
    nothing: None = None


def rows_of(tensor: Tensor) -> Rows:
    """Of a 4-D tensor; a dimension of size 1 repeats."""
    sizes, strides = tensor.shape, tensor.stride()
    return Rows(tensor, *(0 if n == 1 else step for n, step in zip(sizes, strides, strict=True)))


def exact_rows_of(tensor: Tensor) -> Rows:
    """Of a 4-D tensor that is read in full: its column step stays 1 even if there is a single column."""
    return Rows(tensor, *tensor.stride())


def numbers_of(tensor: Tensor) -> Rows:
    """Of a 3-D tensor with one number for every row, such as an LSE."""
    batch, head, row = tensor.stride()
    return Rows(tensor, batch, head, row, 1)


def sequences_of(problem: AttentionProblem) -> Sequences:
    """The lengths of a problem, and the places of its keys."""
    table = problem.block_table
    return Sequences(
        number=problem.sequences,
        queries=problem.query.shape[2],
        keys=problem.most_keys,
        query_starts=problem.query_starts,
        key_starts=problem.key_starts,
        key_lengths=problem.key_lengths,
        batch_index=problem.batch_index,
        block_table=table,
        pages=1 if table is None else table.shape[1],
        page_size=problem.key.shape[2],
        entries=problem.key.shape[0],
    )


def _plane_of(tensor: Tensor, problem: AttentionProblem) -> Plane:
    rows, columns = (size if problem.ragged and size > 1 else None for size in tensor.shape[2:])
    return Plane(rows_of(tensor), rows, columns)


def visible_of(problem: AttentionProblem) -> Visible:
    """The intervals and the dense mask of a problem."""

    def bound(number: int | None) -> int | None:
        return None if number is None else max(-_UNBOUNDED, min(_UNBOUNDED, number))

    def per_row(tensor: Tensor | None) -> Rows | None:
        return None if tensor is None else rows_of(tensor[:, None, :, None])

    mask = problem.mask
    return Visible(
        lower=bound(problem.lower),
        upper=bound(problem.upper),
        first=per_row(problem.first),
        last=per_row(problem.last),
        mask=None if mask is None else _plane_of(mask.view(torch.uint8), problem),
    )


def terms_of(problem: AttentionProblem) -> Terms:
    """The terms of the scores of a problem, and its dropout."""
    bias, slopes, dropout = problem.bias, problem.alibi_slopes, problem.dropout_p > 0
    return Terms(
        scale=float(problem.scale),
        softcap=None if problem.softcap is None else float(problem.softcap),
        bias=None if bias is None else _plane_of(bias, problem),
        slopes=None if slopes is None else rows_of(slopes[:, :, None, None]),
        sinks=problem.sinks,
        seed=seed_tensor(problem.seed, problem.query.device) if dropout else None,
        # No word reaches 2**32; at that probability whatever is kept counts 0.
        threshold=min(keep_threshold(problem.dropout_p), 2**32 - 1),
        keep_scale=keep_scale(problem.dropout_p),
        part=problem.part,
    )


def tiles_of(starts: Tensor | None, sequences: int, rows: int, height: int) -> tuple[Tensor | None, int, int]:
    """How ``rows`` fall into tiles of this height: tile table, tiles, and how often each head launches them.

    Packed sequences, whose ``starts`` are given, are launched once, with tiles enough whatever their lengths.
    The table has the tiles before each sequence, int64 (sequences + 1,), on the device; else it is None.
    """
    tiles = -(-rows // height)
    if starts is None:
        return None, tiles, sequences
    before = ((starts[1:] - starts[:-1] + (height - 1)) // height).cumsum(0)
    return torch.nn.functional.pad(before, (1, 0)), tiles + sequences, 1


def on_device_of(tensor: Tensor) -> Any:
    """Triton launches on torch's current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
