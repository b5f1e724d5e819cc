"""Sequences with lengths of their own: cumulative lengths, cache lengths, block tables, and their checks.

Values are checked where they can be looked at: at the front door for tensors in host memory, and again by the
operators, because a compiled graph passes the front door without values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashtile.masks.arguments import shown_value, values_known
from flashtile.problem import AttentionProblem


def integer_tensor(
    name: str, values: object, dims: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor or nested list of integers with ``dims`` dimensions on ``device``."""
    if isinstance(values, Sequence) and not isinstance(values, str):
        try:
            values = torch.tensor(values, dtype=torch.int64 if len(values) == 0 else None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must hold integers, got {values!r}") from error
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor or a list of integers, got {type(values).__name__}")
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must have the dtype int32 or int64, got {values.dtype}")
    if values.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension(s), got shape {tuple(values.shape)}")
    return values.to(device, dtype).contiguous()


def block_table_rows(block_table: object, batch: int, device: torch.device) -> Tensor:
    """(batch, P), the pages of each sequence; int32 if they came so, which spares a GPU the conversions."""
    given = isinstance(block_table, Tensor) and block_table.dtype == torch.int32
    table = integer_tensor("block_table", block_table, 2, device, torch.int32 if given else torch.int64)
    if table.shape[0] != batch:
        raise ValueError(
            f"block_table must have one row per sequence, {batch}, got shape {tuple(table.shape)}"
        )
    return table


def page_numbers(block_table: Tensor) -> Tensor:
    """int32 and contiguous, as kernels read it; what int32 cannot hold stays a page that does not exist."""
    if block_table.dtype == torch.int32:
        return block_table
    return block_table.clamp(-1, 2**31 - 1).to(torch.int32).contiguous()


def cumulative_lengths(
    name: str, values: object, total: int, device: torch.device, heads: int | None = None
) -> Tensor:
    """int64 (B + 1,): 0, then the ends of the sequences among ``total`` packed rows. B is at least 1."""
    starts = integer_tensor(name, values, 1, device)
    if starts.shape[0] == 0:
        raise ValueError(f"{name} must hold 0 and the end of every sequence, got an empty tensor")
    if values_known(starts):
        check_starts(name, starts, total, heads)
    return torch.cat((starts, starts)) if starts.shape[0] == 1 else starts


def check_starts(name: str, starts: Tensor, total: int, heads: int | None = None) -> None:
    """``heads``, where it is known, tells rows that lie behind the heads."""
    if int(starts[0]) != 0:
        raise ValueError(f"{name} must start at 0, got {shown_value(starts)}")
    if bool((starts.diff() < 0).any()):
        raise ValueError(f"{name} must not decrease, got {shown_value(starts)}")
    if int(starts[-1]) > total:
        hint = "; rows come first, then heads: pass tensor.transpose(0, 1)" if starts[-1] == heads else ""
        raise ValueError(
            f"{name} must end at most at the number of rows, {total}, got {int(starts[-1])}{hint}"
        )


def check_range(name: str, values: Tensor, low: int, high: int, meaning: str) -> None:
    """Refuses values outside low..high."""
    if values.numel() and (int(values.min()) < low or int(values.max()) > high):
        raise ValueError(f"{name} must be in {low}..{high}, {meaning}, got {shown_value(values)}")


def check_block_table(block_table: Tensor, lengths: Tensor, page_size: int, pages: int) -> None:
    """Refuses pages that do not exist, among those that the first ``lengths`` keys lie in."""
    table = block_table.numpy()  # NumPy's small calls take a fraction of the time of PyTorch's
    used = np.arange(table.shape[1]) < -(-lengths.numpy()[:, None] // page_size)
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        sequence, place = (int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(
            f"block_table must hold pages in 0..{pages - 1}, got {int(table[sequence, place])} "
            f"at [{sequence}, {place}]"
        )


def check_problem(problem: AttentionProblem) -> None:
    """What the front doors check, for calls whose values they could not see."""
    longest = [problem.query.shape[2], problem.most_keys]
    if problem.query_starts is not None:
        check_starts("cu_seqlens_q", problem.query_starts, problem.query.shape[2])
        longest[0] = int(problem.query_starts.diff().max())
    if problem.key_starts is not None:
        check_starts("cu_seqlens_k", problem.key_starts, problem.key.shape[2])
        longest[1] = int(problem.key_starts.diff().max())
    if problem.key_lengths is not None:
        check_range("cache_lengths", problem.key_lengths, 0, problem.most_keys, "the places of the cache")
        longest[1] = max(problem.key_lengths.tolist(), default=0)
    if problem.batch_index is not None:
        last = problem.key.shape[0] - 1
        check_range("batch_index", problem.batch_index, 0, last, "the entries of the cache")
    if problem.block_table is not None and problem.key_lengths is not None:
        check_block_table(
            problem.block_table, problem.key_lengths, problem.key.shape[2], problem.key.shape[0]
        )
    _check_rows(problem)
    for name, plane in (("mask", problem.mask), ("bias", problem.bias)):
        if plane is not None and any(
            size != 1 and size < most for size, most in zip(plane.shape[2:], longest, strict=True)
        ):
            raise ValueError(
                f"{name} must broadcast to the longest sequences, {tuple(longest)}, got {tuple(plane.shape)}"
            )


def _check_rows(problem: AttentionProblem) -> None:
    """One row of every table per sequence."""
    starts = problem.key_starts
    tables = {
        "cu_seqlens_k": None if starts is None else starts[1:],
        "cache_lengths": problem.key_lengths,
        "batch_index": problem.batch_index,
        "block_table": problem.block_table,
    }
    for name, table in tables.items():
        if table is not None and table.shape[0] != problem.sequences:
            raise ValueError(
                f"{name} must describe {problem.sequences} sequences, as query does, got {table.shape[0]}"
            )
    if problem.block_table is not None and problem.block_table.dtype != torch.int32:
        raise TypeError(f"block_table must reach the operator as int32, got {problem.block_table.dtype}")
