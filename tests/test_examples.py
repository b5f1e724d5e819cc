"""Every example runs as a user runs it, in a process of its own, and its own checks hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SMALLER = {"long_context_memory": ["2048"]}
LAUNCHERS = {"ring_attention": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_its_checks_hold(example):
    launcher = LAUNCHERS.get(example.stem, [])
    command = [sys.executable, "-W", "error", *launcher, str(example), *SMALLER.get(example.stem, [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples():
    assert len(EXAMPLES) >= 12
