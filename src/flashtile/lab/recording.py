"""What an algorithm does to the large memory, access by access: for pictures, and to see where bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flashtile.arguments import shape_of
from flashtile.checks import check_choice, check_sizes
from flashtile.lab.algorithms import ALGORITHMS, Algorithm, one_head
from flashtile.lab.memory import Block, Counts, Memory
from flashtile.lab.setting import Blocks, Setting, check_blocks
from flashtile.lab.theory import DIRECTIONS, Direction

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
    Matrices are known by their addresses: they may be parts of one tensor, but share none of it (ValueError).
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
        # By addresses; the matrices are kept alive, so that no other takes their place.
        self._known: dict[range, tuple[str, Tensor]] = {} if after is None else after._known
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
        own = _addresses(tensor)
        for taken, (other, _) in self._known.items():
            if own.start < taken.stop and taken.start < own.stop:
                raise ValueError(f"inputs must share no memory, got {other} and {name} that do")
        self._known[own] = name, tensor

    def _matrix(self, part: Tensor) -> tuple[str, Tensor]:
        """The name of the matrix that a part is of, and the matrix."""
        for taken, found in self._known.items():
            if part.data_ptr() in taken:
                return found
        raise ValueError(
            f"tensor must be a part of inputs or of what was created, got one of {shape_of(part)} elsewhere"
        )

    def _record(self, kind: Literal["read", "write"], tensor: Tensor) -> None:
        name, matrix = self._matrix(tensor)
        first = (tensor.storage_offset() - matrix.storage_offset()) // matrix.stride(0)
        rows, columns = slice(first, first + tensor.shape[0]), slice(0, tensor.shape[1])
        self._last[name] = rows
        size = tensor.numel() * self.element_size
        self.events.append(Event(kind, name, rows, columns, size, self.counts.flops))


def _addresses(matrix: Tensor) -> range:
    """Those from its first to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))
    return range(matrix.data_ptr(), matrix.data_ptr() + (last + 1) * matrix.element_size())


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
    attention. A ValueError for an unknown algorithm or direction, or a size below 1.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("direction", direction, DIRECTIONS)
    check_blocks("blocks", blocks)
    check_sizes(length=length, head_dim=head_dim)
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
