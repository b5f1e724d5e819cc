"""What the command line accepts: argparse types whose messages say what was expected and what came."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def device(text: str) -> str:
    """An argparse type: a device that torch knows the name of."""
    import torch

    try:
        return str(torch.device(text))
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}") from error


def subset(allowed: Sequence[str]) -> Any:
    """An argparse type: some of `allowed`, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for item in chosen:
            if item not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {item!r}")
        return chosen

    return parse


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def dtypes(text: str) -> list[str]:
    """An argparse type: some of fp32, bf16, fp16 and fp64, separated by commas; or by torch's names."""
    short = {long: short for short, long in _DTYPES.items()}
    chosen: list[str] = subset(tuple(_DTYPES))(",".join(short.get(item, item) for item in text.split(",")))
    return chosen


def dtype(text: str) -> str:
    """An argparse type: one of them."""
    chosen = dtypes(text)
    if len(chosen) != 1:
        raise argparse.ArgumentTypeError(f"expected one of {','.join(_DTYPES)}, got {text!r}")
    return chosen[0]


def shape(text: str) -> tuple[int, int, int, int]:
    try:
        batch, heads, length, head_dim = (positive(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected BATCH,HEADS,LENGTH,HEAD_DIM, got {text!r}") from None
    return batch, heads, length, head_dim


def size_in_bytes(text: str) -> int:
    """An argparse type: 65536, 64k or 1m, in bytes."""
    digits, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in ("k", "m") else (text, "")
    try:
        return positive(digits) * {"": 1, "k": 2**10, "m": 2**20}[unit]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected bytes such as 196608, 192k or 1m, got {text!r}") from None


def tile(text: str) -> tuple[int, int]:
    try:
        rows, columns = (positive(part) for part in text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"expected ROWSxCOLUMNS such as 64x128, got {text!r}") from None
    return rows, columns


def positive_number(text: str) -> float:
    """An argparse type: a number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def thread_count(text: str) -> int:
    """An argparse type: as many threads as the machine has processors, at most."""
    threads, processors = positive(text), os.cpu_count() or 1
    if threads > processors:
        raise argparse.ArgumentTypeError(
            f"expected at most {processors}, the processors of this machine, got {threads}"
        )
    return threads


def new_folder(text: str) -> Path:
    """An argparse type: a folder to write into, which is there or can be made."""
    folder = Path(text).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"expected a folder to write into, got {text!r}: {there} is none that can be written to"
        )
    return Path(text)
