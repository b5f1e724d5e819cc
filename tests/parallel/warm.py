"""Imported once, by the process from which all ranks are forked: kernels are loaded, or compiled, here."""

from __future__ import annotations

import torch

import flashtile
import flashtile.parallel
from tests.conftest import DTYPES
from tests.parallel import jobs, models  # noqa: F401

torch.set_num_threads(1)
for dtype in DTYPES:
    for length in (2, 9):  # decoding has kernels of its own
        query = torch.zeros(1, 1, length, 4, dtype=dtype, requires_grad=True)
        flashtile.attention(query, query, query).sum().backward()
