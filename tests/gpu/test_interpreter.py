"""The kernels without a GPU: every file in kernels/ in a process whose kernels Triton interprets.

What is marked slow there takes longer: TRITON_INTERPRET=1 python -m pytest tests/gpu/kernels -m slow
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "kernels"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", sorted(FOLDER.glob("test_*.py")), ids=lambda file: file.stem)
def test_interpreted(file: Path) -> None:
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            str(file),
        ],
        cwd=FOLDER.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert process.returncode == 0, f"{process.stdout[-20000:]}\n{process.stderr[-5000:]}"
    assert re.search(r"\d+ passed", process.stdout), process.stdout  # not all were skipped
