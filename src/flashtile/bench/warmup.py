"""`flashtile warmup`: compile the CPU kernels before anybody waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

import flashtile
from flashtile.bench.cases import DTYPES
from flashtile.bench.console import Progress, table
from flashtile.cache_folder import folder


def _forward(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 1, 64, 16, dtype=dtype)
    flashtile.attention(query, query, query)


def _backward(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 1, 64, 16, dtype=dtype, requires_grad=True)
    torch.autograd.backward(flashtile.attention(query, query, query).sum())


def _decode(dtype: torch.dtype) -> None:
    """One query, and so many keys that they are split and merged."""
    query, key = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 4096, 16, dtype=dtype)
    flashtile.attention(query, key, key)


PASSES = {"forward": _forward, "backward": _backward, "decode": _decode}


def run(dtypes: Iterable[str]) -> dict[str, Any]:
    """Seconds that the first call of every pass and dtype took, and the folder where its kernels are kept.

    The folder is None where none can be written to: then each process compiles for itself.
    """
    work = [(dtype, name) for dtype in dtypes for name in PASSES]
    seconds: dict[str, dict[str, float]] = {}
    with Progress("compiling", len(work)) as progress:
        for dtype, name in work:
            progress.step(f"{dtype} {name}")
            start = time.monotonic()
            PASSES[name](DTYPES[dtype])
            seconds.setdefault(dtype, {})[name] = round(time.monotonic() - start, 2)
    place = folder()
    return {"seconds": seconds, "cache_folder": None if place is None else str(place)}


def report(result: dict[str, Any]) -> str:
    """A table of the seconds, and where the kernels are."""
    rows = [[dtype, *(f"{of[name]:.1f} s" for name in PASSES)] for dtype, of in result["seconds"].items()]
    kept = result["cache_folder"]
    where = (
        f"kept in {kept}" if kept else "kept nowhere: no folder could be written to; see FLASHTILE_CACHE_DIR"
    )
    return f"{table(['first call', *PASSES], rows)}\n  {where}"
