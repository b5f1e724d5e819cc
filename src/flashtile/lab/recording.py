"""What an algorithm does to the large memory, access by access: for pictures, and to see where bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flashtile.lab.algorithms import Algorithm, one_head
from flashtile.lab.memory import Block, Counts, Memory
from flashtile.lab.setting import Blocks, Setting
from flashtile.lab.theory import Direction

# What each pass makes in the large memory, in the order in which it does.
CREATED: dict[tuple[Algorithm, Direction], tuple[str, ...]] = {
    ("standard", "forward"): ("S", "P", "O"),
    ("standard", "backward"): ("dP", "dS", "dQ", "dK", "dV"),
    ("flash1", "forward"): ("O", "l", "m"),
    ("flash1", "backward"): ("dQ", "dK", "dV"),
    ("flash2", "forward"): ("O", "LSE"),
    ("flash2", "backward"): ("dQ", "dK", "dV", "D"),
}


@dataclass(frozen=True)
class Event:
    """One access, or a tile of the scores that is computed on the chip (of no size)."""

    kind: Literal["read", "write", "tile"]
    name: str  # of the matrix in the papers; that of a tile is S
    rows: slice  # of the matrix
    columns: slice  # of the matrix
    size: int  # bytes
    flops: int  # FLOPs done before


@dataclass(frozen=True)
class Recording:
    """One pass: its accesses in order, and their sum."""

    events: list[Event]
    counts: Counts


class Recorder(Memory):
    """A memory that keeps a list of what happens.

    ``inputs`` are the matrices that are there before, by name; ``created`` names those that the pass makes.
    The recorder of a backward pass comes ``after`` that of the forward pass, whose matrices it reads.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        created: Sequence[str],
        element_size: int = 2,
        after: Recorder | None = None,
    ) -> None:
        super().__init__(element_size)
        self.events: list[Event] = []
        # By address; the matrices are kept alive, so that no other takes their place.
        self._known: dict[int, tuple[str, Tensor]] = {} if after is None else after._known
        self._created = iter(created)
        self._last: dict[str, slice] = {}
        for name, tensor in inputs.items():
            self._know(name, tensor)

    def load(self, tensor: Tensor) -> Block:
        self._record("read", tensor)
        return super().load(tensor)

    def store(self, target: Tensor, block: Block) -> None:
        self._record("write", target)
        super().store(target, block)

    def result(self, shape: tuple[int, ...], like: Tensor, fill: float | None = None) -> Tensor:
        made = super().result(shape, like, fill)
        self._know(next(self._created), made)
        if fill is not None:
            self._record("write", made)
        return made

    def resident(self, *blocks: Block) -> None:
        super().resident(*blocks)
        self.events.append(Event("tile", "S", self._last["Q"], self._last["K"], 0, self.counts.flops))

    def _know(self, name: str, tensor: Tensor) -> None:
        self._known[tensor.untyped_storage().data_ptr()] = name, tensor

    def _record(self, kind: Literal["read", "write"], tensor: Tensor) -> None:
        name, _ = self._known[tensor.untyped_storage().data_ptr()]
        first = tensor.storage_offset() // tensor.stride(0)
        rows, columns = slice(first, first + tensor.shape[0]), slice(0, tensor.shape[1])
        self._last[name] = rows
        size = tensor.numel() * self.element_size
        self.events.append(Event(kind, name, rows, columns, size, self.counts.flops))


def record(
    algorithm: Algorithm,
    direction: Direction,
    length: int,
    head_dim: int,
    blocks: Blocks,
    *,
    lower: int | None = None,
    upper: int | None = None,
    element_size: int = 2,
) -> Recording:
    """Run one pass of one head on random numbers and write down what it does.

    ``lower`` and ``upper`` say which keys are visible, as in `Setting`; ``blocks`` mean nothing to standard
    attention.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (
        torch.randn(length, head_dim, dtype=torch.float64, generator=generator) for _ in range(4)
    )
    inputs = {"Q": query, "K": key, "V": value, "dO": grad_out}
    forward = Recorder(inputs, CREATED[algorithm, "forward"], element_size)
    backward = Recorder({}, CREATED[algorithm, "backward"], element_size, after=forward)
    setting = Setting(scale=head_dim**-0.5, lower=lower, upper=upper)
    upstream = grad_out if direction == "backward" else None
    one_head(algorithm, (query, key, value), upstream, (blocks, blocks), setting, (forward, backward))
    memory = backward if direction == "backward" else forward
    return Recording(memory.events, memory.counts)
