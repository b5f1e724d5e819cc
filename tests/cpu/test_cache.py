"""Compiled kernels on disk: found again, healed, shared between processes, never from another source."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from numba.core import event

import flashtile
from flashtile.cpu import cache, engine, entries
from flashtile.cpu.backward import row_deltas
from flashtile.cpu.kinds import FLOAT32
from tests.cpu.processes import python, start
from tests.oracle import random_gradients, random_problem, results_of_backend

PACKAGE = Path(flashtile.__file__).parent

# The smallest kernel stands for all of them.
ENTRY = """
from numba.core import event
with event.install_recorder("numba:compile") as compiled:
    from flashtile.cpu.backward import row_deltas
    from flashtile.cpu.entries import entry
    from flashtile.cpu.kinds import FLOAT32
    entry(row_deltas, FLOAT32)
from flashtile.cpu import cache
print(len(compiled.buffer), cache.folder())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing loaded yet in this process."""
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()


def forget() -> None:
    cache.folder.cache_clear()
    entries.entry.cache_clear()


def compilations() -> int:
    """How many functions Numba compiles for the smallest kernel."""
    entries.entry.cache_clear()
    with event.install_recorder("numba:compile") as compiled:
        entries.entry(row_deltas, FLOAT32)
    return len(compiled.buffer)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_second_process_compiles_nothing(tmp_path):
    environment = {"FLASHTILE_CACHE_DIR": str(tmp_path / "cache")}
    assert int(python(ENTRY, **environment).split()[0]) > 0
    before = files(tmp_path / "cache")
    assert [name.split("-")[0] for name in before] == ["row_deltas"]
    assert int(python(ENTRY, **environment).split()[0]) == 0
    assert files(tmp_path / "cache") == before


def test_kernels_that_nobody_loads_are_deleted(folder):
    compilations()
    (kept,) = folder.glob("*.bin")
    month = 30 * 24 * 3600
    stale = [folder / f"forward-float32-{'0a' * 16}.bin", folder / "tmp8xq.flashtile-part"]
    foreign = [folder / name for name in ("pytorch_model.bin", "x-y.bin", "notes.txt", "tmp8xq")]
    for file in (*stale, *foreign, kept):
        file.touch()
        age = month - 60 if file == kept else month + 60
        os.utime(file, (file.stat().st_atime, time.time() - age))
    cache.DiskCache("another").save_overload((), Reducible())
    assert not any(file.exists() for file in stale)
    assert all(file.exists() for file in (*foreign, kept))

    before = kept.stat().st_mtime
    assert compilations() == 0
    assert kept.stat().st_mtime > before


class Reducible:
    """What is saved of a compile result."""

    def _reduce(self):
        return ()


def test_warm_process_runs_every_kernel_without_compiling():
    sizes = ({"query_length": 40}, {"query_length": 1, "key_length": 1100})
    calls = """
import torch
from numba.core import event
with event.install_recorder("numba:compile") as compiled:
    from flashtile import cpu
    from tests.oracle import random_gradients, random_problem, results_of_backend
    for options in ({"query_length": 40}, {"query_length": 1, "key_length": 1100}):
        problem = random_problem(**options)
        results_of_backend(cpu, problem, *random_gradients(problem))
print(len(compiled.buffer))
"""
    for options in sizes:  # warms it
        problem = random_problem(**options)
        results_of_backend(engine, problem, *random_gradients(problem))
    assert python(calls).split() == ["0"]


def test_compiling_is_announced_at_a_terminal_only(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    compilations()
    assert "flashtile: compiling row_deltas-float32" in capsys.readouterr().err
    compilations()  # found on disk
    assert capsys.readouterr().err == ""
    (path,) = folder.iterdir()
    path.unlink()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    compilations()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", ["empty", "short", "one byte short", "a flipped bit", "something else"])
def test_damaged_file_is_replaced(folder, damage):
    compilations()
    (path,) = folder.iterdir()
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    damaged = {
        "empty": b"",
        "short": good[: len(good) // 3],
        "one byte short": good[:-1],
        "a flipped bit": bytes(flipped),
        "something else": b"\x80\x04no pickle at all",
    }[damage]
    path.write_bytes(damaged)
    assert compilations() > 0
    assert path.read_bytes() != damaged
    assert compilations() == 0


def test_four_processes_at_once_on_an_empty_cache(tmp_path):
    processes = [start(ENTRY, FLASHTILE_CACHE_DIR=str(tmp_path / "cache")) for _ in range(4)]
    for process in processes:
        _, error = process.communicate(timeout=200)
        assert process.returncode == 0, error
    assert len(files(tmp_path / "cache")) == 1  # no half-written file is left either
    assert int(python(ENTRY, FLASHTILE_CACHE_DIR=str(tmp_path / "cache")).split()[0]) == 0


def test_edit_of_any_file_changes_the_key(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "source" / "flashtile", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
from pathlib import Path
import flashtile
from flashtile.cpu import cache
assert str(Path(flashtile.__file__)).startswith(__import__("sys").argv[1])
sources = sorted(Path(cache.__file__).parent.glob("*.py"))
seen = {cache._environment()}
for source in sources:
    source.write_text(source.read_text() + "# edited\\n")
    cache._environment.cache_clear()
    seen.add(cache._environment())
print(len(sources), len(seen))
"""
    source = tmp_path / "source"
    sources, seen = (int(word) for word in python(code, str(source), source=source).split())
    assert sources == len(list((PACKAGE / "cpu").glob("*.py")))
    assert seen == sources + 1


def test_edited_kernel_is_compiled_anew(tmp_path):
    """And nothing is ever written beside the sources, which may be read-only."""
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "flashtile", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {"FLASHTILE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    python(ENTRY, source=source, **environment)
    edited = source / "flashtile" / "cpu" / "tiles.py"
    edited.write_text(edited.read_text() + "# another instruction\n")
    assert int(python(ENTRY, source=source, **environment).split()[0]) > 0
    assert len(files(tmp_path / "cache")) == 2
    found = {path.relative_to(source / "flashtile") for path in (source / "flashtile").rglob("*")}
    given = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts}
    assert found == given


def test_another_instruction_set_has_its_own_key():
    code = "from flashtile.cpu import cache; print(cache._environment().hex())"
    assert python(code).strip() == cache._environment().hex()
    restricted = python(code, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert restricted.strip() != cache._environment().hex()


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.delenv(name, raising=False)
    cache.folder.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME is for Linux")
def test_unwritable_home_falls_back_to_the_temporary_folder(tmp_path, monkeypatch, folder):
    without(monkeypatch, "FLASHTILE_CACHE_DIR")
    (tmp_path / "file").write_text("no folder can be made in here, not even by root")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache.folder() == tmp_path / f"flashtile-{os.getuid()}"
    assert compilations() > 0
    assert compilations() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME is for Linux")
def test_home_is_used_where_it_can_be(tmp_path, monkeypatch, folder):
    without(monkeypatch, "FLASHTILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    assert cache.folder() == tmp_path / "users" / "flashtile"
    assert cache.folder().stat().st_mode & 0o077 == 0


def test_user_without_a_home(tmp_path, monkeypatch, folder):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    without(monkeypatch, "FLASHTILE_CACHE_DIR", "XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache.folder().parent == tmp_path
    assert compilations() > 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners and modes here")
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_folder_that_others_can_write_to_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.warns(UserWarning, match="only you can write"):
        assert cache.folder() is None
    assert compilations() > 0
    assert not files(folder)


def test_chosen_folder_that_cannot_be_made(tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="FLASHTILE_CACHE_DIR"):
        assert compilations() > 0


def test_folder_that_vanishes_or_fills_up(folder, monkeypatch):
    assert cache.folder() == folder
    shutil.rmtree(folder)
    assert compilations() > 0
    folder.mkdir()

    def full(source: str, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert compilations() > 0
    assert not files(folder)
    assert compilations() > 0
    assert compilations() == 0


def test_relative_folder_stays_where_it_was(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", "here")
    assert compilations() > 0
    monkeypatch.chdir("/")
    assert compilations() == 0
    assert len(files(tmp_path / "here")) == 1


def test_code_outlives_what_compiled_it(folder):
    """A kernel goes on working when nothing refers to its dispatcher any longer."""
    problem = random_problem(query_length=40)
    gradients = random_gradients(problem)
    expected = results_of_backend(engine, problem, *gradients)
    kept = entries.entry(row_deltas, FLOAT32)
    forget()
    gc.collect()
    for _ in range(3):
        found = results_of_backend(engine, problem, *gradients)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept.pointer
