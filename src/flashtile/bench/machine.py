"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

import flashtile


def cpu_name() -> str:
    """The processor's own name for itself, as far as the system tells."""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        fields = {name.strip(): fact.strip() for name, _, fact in pairs}
        name = fields.get("model name", platform.machine())
        if "model" not in fields:
            return name
        return f"{name} (family {fields['cpu family']}, model {fields['model']})"
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory, or 4 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def commit() -> str | None:
    """The commit of the source tree, with '+' where files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not git("ls-files", __file__):
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(packages: tuple[str, ...] = ("torch", "numba", "llvmlite", "numpy")) -> dict[str, str]:
    """Versions of flashtile, Python and those of `packages` that are installed."""
    found = {"flashtile": flashtile.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, object]:
    """Processor, instruction set, threads, system, versions and commit, ready for JSON."""
    from flashtile import cpu

    return {
        "cpu": cpu_name(),
        **cpu.describe(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "commit": commit(),
    }


def processor(facts: Mapping[str, object]) -> str:
    """Processor and threads of `describe`."""
    plural = "" if facts["threads"] == 1 else "s"
    return f"{facts['cpu']}, {facts['threads']} thread{plural}"


def headline(facts: Mapping[str, object]) -> str:
    """Processor, threads and instruction set of `describe` in one line."""
    return f"{processor(facts)}, {facts['instruction_set']}"
