"""Peak memory of a call beyond its inputs, measured in a process of its own.

`python -m flashtile.bench.memory LIBRARY` reads cases (JSON lines) on stdin and answers with bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from flashtile.bench.cases import Case
from flashtile.bench.runs import LIBRARIES, make_run


def reset_peak() -> None:
    """Give freed memory back and forget the highest resident set so far, where the system can (Linux)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return


def peak_bytes() -> int:
    """The highest resident set of this process, in bytes, since it was last reset."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def growth(library: str, case: Case) -> int:
    """Bytes by which this process grows at most while `library` runs `case`, its results included.

    Kernels are compiled and threads started by a short call before.
    """
    short = replace(case, query_length=min(case.query_length, 128), key_length=min(case.keys, 128))
    for warm_up in (short, replace(short, direction="forward")):
        make_run(LIBRARIES[library](warm_up), warm_up)()
    run = make_run(LIBRARIES[library](case), case)
    reset_peak()
    before = peak_bytes()
    run()
    return peak_bytes() - before


def measure(library: str, cases: Iterable[Case]) -> list[int]:
    """`growth` of each case, in a fresh process."""
    lines = "".join(json.dumps(asdict(case)) + "\n" for case in cases)
    command = [sys.executable, "-m", __name__, library]
    answer = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"measuring the memory of {library} failed:\n{answer.stderr}")
    return [int(line) for line in answer.stdout.split()]


if __name__ == "__main__":
    for line in sys.stdin:
        print(growth(sys.argv[1], Case(**json.loads(line))), flush=True)
