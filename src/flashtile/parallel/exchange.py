"""Messages between the ranks of a group, each with a name, so that a failure says which step it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


class Sent:
    """What this rank has sent to others of keys, values, queries, outputs and gradients."""

    bytes = 0

    def add(self, tensor: Tensor, times: int = 1) -> None:
        self.bytes += times * tensor.numel() * tensor.element_size()


_counting: list[Sent] = []
_overlapping = True


@contextlib.contextmanager
def counted() -> Iterator[Sent]:
    """Counts what this rank sends inside the block, in every thread; for benchmarks and their model."""
    sent = Sent()
    _counting.append(sent)
    try:
        yield sent
    finally:
        _counting.remove(sent)


@contextlib.contextmanager
def without_overlap() -> Iterator[None]:
    """Inside the block a rank waits for what it sends and receives before it computes on: for benchmarks."""
    global _overlapping
    before, _overlapping = _overlapping, False
    try:
        yield
    finally:
        _overlapping = before


def _count(tensor: Tensor, times: int = 1) -> None:
    for sent in _counting:
        sent.add(tensor, times)


@contextlib.contextmanager
def named(step: str) -> Iterator[None]:
    """Failures of the transport (a rank that died, a timeout) say which step they interrupted."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{step} failed: {error}") from error


class Batch:
    """Messages that travel together, while the caller computes; ranks are those of the group."""

    def __init__(self, group: Group | None, step: str) -> None:
        self._group, self._step = group, step
        self._messages: list[dist.P2POp] = []
        self._said: list[str] = []
        self._works: list[dist.Work] = []

    def send(self, tensor: Tensor, to: int) -> None:
        _count(tensor)
        self._add(dist.isend, tensor, to, "sending to")

    def receive(self, tensor: Tensor, source: int) -> None:
        self._add(dist.irecv, tensor, source, "receiving from")

    def _add(self, kind: Callable[..., Any], tensor: Tensor, rank: int, doing: str) -> None:
        assert self._group is not None  # a rank alone has nobody to talk to
        peer = dist.get_global_rank(self._group, rank)
        self._messages.append(dist.P2POp(kind, tensor, peer, self._group))
        self._said.append(f"{doing} rank {rank}")

    def start(self) -> None:
        if self._messages:
            with named(f"{self._step} ({', '.join(self._said)})"):
                self._works = dist.batch_isend_irecv(self._messages)
        if not _overlapping:
            self.wait()

    def wait(self) -> None:
        with named(f"{self._step} ({', '.join(self._said)})"):
            for work in self._works:
                work.wait()
        self._works, self._messages = [], []  # nobody needs the sent tensors any more


def exchange(
    group: Group,
    outgoing: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    step: str,
) -> list[list[Tensor]]:
    """All-to-all: rank r is sent the tensors ``outgoing[r]``, and sends tensors of the shapes ``shapes[r]``.

    All of one dtype; the messages to one rank are one.
    """
    pieces = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in outgoing]
    sizes = [[torch.Size(shape).numel() for shape in some] for some in shapes]
    received = pieces[0].new_empty(sum(map(sum, sizes)))
    for rank, piece in enumerate(pieces):
        _count(piece, int(rank != dist.get_rank(group)))
    with named(step):
        dist.all_to_all_single(
            received,
            torch.cat(pieces),
            [sum(some) for some in sizes],
            [len(piece) for piece in pieces],
            group,
        )
    flat = iter(received.split_with_sizes([size for some in sizes for size in some]))
    return [[next(flat).view(tuple(shape)) for shape in some] for some in shapes]


def _sendable(tensor: Tensor) -> Tensor:
    """Neither NCCL nor gloo knows int16: bytes of it travel."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.int16 else tensor


def gather(group: Group, tensor: Tensor, lengths: Sequence[int], step: str) -> list[Tensor]:
    """The tensors (L, ...) of every rank, whose first sizes are ``lengths`` and whose others are the same."""
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    received = [torch.empty_like(padded) for _ in lengths]
    if padded.numel():  # gloo cannot gather nothing
        _count(padded, len(lengths) - 1)
        with named(step):
            dist.all_gather([_sendable(one) for one in received], _sendable(padded), group)
    return [one[:length] for one, length in zip(received, lengths, strict=True)]
