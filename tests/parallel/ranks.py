"""Processes that form a gloo group on this machine and run jobs for the tests.

They are forked from one server process that has imported everything: eight of them start as fast as one.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.conftest import poison_fresh_memory
from tests.parallel import jobs

_CONTEXT = multiprocessing.get_context("forkserver")
_ANSWER_S = 120.0


class Ranks:
    """``size`` processes, groups of the first n of them for every n in ``sizes``, meshes of these shapes."""

    def __init__(
        self,
        size: int,
        sizes: Sequence[int] = (),
        meshes: Sequence[tuple[int, int]] = (),
        timeout_s: float = 20.0,
    ) -> None:
        _CONTEXT.set_forkserver_preload(["tests.parallel.warm"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(theirs, store, rank, size, sizes, meshes, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], size: int | None = None, **arguments: Any) -> list[Any]:
        """What ``job(group, **arguments)`` returns on every rank of the group of ``size``, without errors."""
        outcomes = self.outcomes(job, size, **arguments)
        failed = {rank: one for rank, one in enumerate(outcomes) if isinstance(one, BaseException)}
        assert not failed, "\n".join(f"rank {rank}: {''.join(one.__notes__)}" for rank, one in failed.items())
        return outcomes

    def outcomes(self, job: Callable[..., Any], size: int | None = None, **arguments: Any) -> list[Any]:
        """The same, with the error of a rank in the place of its result; None where the rank has died."""
        size = len(self._connections) if size is None else size
        message = pickle.dumps((job, size, arguments))
        for connection in self._connections[:size]:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(message)
        return [self._answer(rank) for rank in range(size)]

    def _answer(self, rank: int) -> Any:
        connection = self._connections[rank]
        if not connection.poll(_ANSWER_S):
            raise AssertionError(f"rank {rank} did not answer within {_ANSWER_S} s")
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            return None

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(
    connection: Connection,
    store: str,
    rank: int,
    size: int,
    sizes: Sequence[int],
    meshes: Sequence[tuple[int, int]],
    timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in sizes}
    groups[size] = dist.group.WORLD
    for shape in meshes:
        jobs.meshes[shape] = DeviceMesh("cpu", torch.arange(shape[0] * shape[1]).view(shape))
    with pytest.MonkeyPatch.context() as patch:
        poison_fresh_memory(patch)
        while True:
            try:
                job, group_size, arguments = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)  # nobody waits for the others: they may have died
            connection.send_bytes(pickle.dumps(_outcome(job, groups[group_size], arguments)))


def _outcome(job: Callable[..., Any], group: Any, arguments: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        try:
            return job(group, **arguments)
        except Exception as error:
            error.__notes__ = [traceback.format_exc()]
            return error
