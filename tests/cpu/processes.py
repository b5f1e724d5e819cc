"""Running Python in a process of its own, with another environment or the right to die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(
    code: str, *arguments: str, source: Path | None = None, timeout: float = 300, **environment: str
) -> str:
    """What `code` prints; fails with what it wrote to stderr. `source` = folder to import flashtile from."""
    process = start(code, *arguments, source=source, **environment)
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children hold the pipes open
        out, error = process.communicate()
        raise AssertionError(f"not finished after {timeout} s:\n{out}\n{error}") from None
    assert process.returncode == 0, f"exit status {process.returncode}:\n{out}\n{error}"
    return out


def start(
    code: str, *arguments: str, source: Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if source is not None:
        path.insert(0, str(source))
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
