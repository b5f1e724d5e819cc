"""The kernels compiled for GPUs that are not here: registers, shared memory, tensor-core instructions.

One process per architecture compiles the chosen cases (compiling.py); each is judged by a test of its own.
The whole matrix takes an hour, and runs where it is asked for: pytest -m matrix.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.compiling import FEATURES, TARGETS, WITHOUT_PRODUCTS, Case, Compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# What multiplies tiles of 16-bit numbers; Triton knows no tensor cores of sm75.
PRODUCTS = {
    "sm80": "mma.sync", "sm86": "mma.sync", "sm89": "mma.sync", "sm90": "wgmma.mma_async",
    "sm100": "tcgen05.mma", "sm120": "mma.sync", "gfx90a": "v_mfma", "gfx942": "v_mfma", "gfx1100": "v_wmma",
}  # fmt: skip
# Loops of the main shapes that 255 registers do not quite hold: how often they may move one to the stack.
SPILLS = {("sm100", "attention_forward", 64): 2, ("sm120", "key_gradients", 128): 17}
NOT_JUDGED = ("sm75", "gfx1100")  # they spill, at any size of the tiles


# Which registers spill differs from one Triton to the next; the tables of tiles were made with this one.
TUNED = importlib.util.find_spec("triton") is not None and importlib.metadata.version("triton").startswith(
    "3.9."
)


def chosen(architecture: str) -> list[Case]:
    """Every kernel for every architecture; for some more head_dims, features and kinds of products."""
    dtype = "float16" if architecture == "sm75" else "bfloat16"
    cases = [
        Case("forward", dtype, 128, "causal"), Case("decode", dtype, 128, "plain"),
        Case("backward", dtype, 128, "causal"),
    ]  # fmt: skip
    if architecture in ("sm80", "sm90", "sm100", "gfx942"):
        cases += [Case("forward", dtype, 64, "causal"), Case("forward", dtype, 128, "plain")]
    if architecture in ("sm80", "sm90", "gfx942"):
        cases += [
            Case("forward", "float32", 64, "causal"), Case("single", dtype, 64, "plain"),
            Case("backward", dtype, 64, "everything"),
        ]  # fmt: skip
    if architecture == "gfx942":
        cases.append(Case("forward", dtype, 64, "everything"))
    if architecture == "sm90":
        cases += [
            Case("forward", "float16", 64, "plain"), Case("forward", dtype, 128, "bias"),
            Case("forward", dtype, 256, "causal"), Case("forward", dtype, 512, "causal"),
            Case("decode", dtype, 256, "everything"), Case("backward", dtype, 256, "causal"),
            Case("forward", dtype, 64, "everything in a part"),
            Case("backward", dtype, 64, "everything in a part"), Case("backward", dtype, 64, "packed"),
            Case("forward", dtype, 128, "packed"), Case("forward", dtype, 128, "paged"),
            Case("forward", dtype, 64, "rare dropout"),
        ]  # fmt: skip
    return cases


def matrix(architecture: str) -> list[Case]:
    """The cases that `chosen` leaves out."""
    dtypes = ("float16", "float32") if architecture == "sm75" else ("bfloat16", "float32")
    every = [
        Case(kernel, dtype, head_dim, features)
        for kernel in ("forward", "decode", "backward")
        for dtype in dtypes
        for head_dim in (64, 128, 256)
        for features in FEATURES
    ]
    impossible = {("backward", "paged")}  # a cache has no gradients
    left = [case for case in every if (case.kernel, case.features) not in impossible]
    return [case for case in left if case not in chosen(architecture)]


@functools.cache
def compiled(architecture: str, select: Any) -> dict[str, dict[str, Any]]:
    """What came of the cases, from a process of its own: this one may interpret, or drive a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, "-m", "tests.gpu.compiling", architecture, *map(str, select(architecture))],
            cwd=Path(__file__).parents[2],
            env={**environment, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            timeout=1800,
        )
    assert process.returncode == 0, process.stderr[-5000:]
    return {found["case"]: found for found in map(json.loads, process.stdout.splitlines())}


def check(architecture: str, case: Case, select: Any) -> None:
    found = compiled(architecture, select)[str(case)]
    assert found["error"] is None, found["error"]
    kernels = [Compiled(**kernel) for kernel in found["kernels"]]
    assert kernels
    for kernel in kernels:
        assert kernel.shared <= TARGETS[architecture].shared_memory, kernel
        if (
            case.kernel == "backward"
            and case.features in ("plain", "causal")
            and architecture.startswith("sm")
        ):
            # Else P of scores of thousands is not what its row was summed from.
            assert kernel.exponentials.get("fma", 0) > 0, kernel
            assert "mul" not in kernel.exponentials, kernel
        if case.dtype == "float32" or kernel.kernel in WITHOUT_PRODUCTS or architecture not in PRODUCTS:
            continue
        # Tiles of decoding and of wide heads have too few rows for the instructions of sm90 and sm100.
        few = case.kernel in ("decode", "single") or case.head_dim > 256
        wanted = "mma.sync" if few and architecture in ("sm90", "sm100") else PRODUCTS[architecture]
        assert kernel.products.get(wanted, 0) > 0, kernel
        if case.main and not kernel.repair and architecture not in NOT_JUDGED and TUNED:
            assert kernel.spilled is not None
            assert kernel.spilled <= SPILLS.get((architecture, kernel.kernel, case.head_dim), 0), kernel


def parameters(select: Any) -> list[Any]:
    return [
        # a group runs in one process of several, which then compiles its cases once
        pytest.param(
            architecture, case, id=f"{architecture}:{case}", marks=pytest.mark.xdist_group(architecture)
        )
        for architecture in TARGETS
        for case in select(architecture)
    ]


@pytest.mark.parametrize(("architecture", "case"), parameters(chosen))
def test_compiles(architecture: str, case: Case) -> None:
    check(architecture, case, chosen)


@pytest.mark.matrix
@pytest.mark.parametrize(("architecture", "case"), parameters(matrix))
def test_whole_matrix(architecture: str, case: Case) -> None:
    check(architecture, case, matrix)
