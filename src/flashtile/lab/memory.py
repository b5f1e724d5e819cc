"""The machine of the papers: a large slow memory, a small fast one, and a count of everything that happens.

An algorithm reads the large memory (HBM on a GPU) with `Memory.load` and writes it with `Memory.store`. What
is loaded is a `Block`, which lies on the chip (SRAM) and counts the arithmetic done with it. Nothing is
estimated: bytes are those of the blocks that move, FLOPs those of the blocks that are computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flashtile.checks import check_sizes


@dataclass
class Counts:
    """What an algorithm did. A FLOP is one addition, multiplication or comparison of two numbers.

    A reduction over n numbers counts n. Masking and dropping are selections and count nothing; scaling what
    dropout keeps is a multiplication.
    """

    read: int = 0  # bytes from the large memory
    written: int = 0  # bytes to it
    matmul: int = 0  # FLOPs of matrix products, 2 m n k each
    exponentials: int = 0  # exponentials and logarithms
    divisions: int = 0
    rescaling: int = 0  # multiplications by exp(old maximum - new maximum): the price of working online
    arithmetic: int = 0  # all other FLOPs
    intermediate: int = 0  # bytes of the large memory taken by what is neither input nor result
    on_chip: int = 0  # bytes: the most that lay in the small memory at once

    @property
    def traffic(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def other(self) -> int:
        """All FLOPs outside matrix products."""
        return self.exponentials + self.divisions + self.rescaling + self.arithmetic

    @property
    def flops(self) -> int:
        return self.matmul + self.other

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte of traffic; 0 where nothing moved."""
        return self.flops / self.traffic if self.traffic else 0.0

    def __add__(self, after: Counts) -> Counts:
        """Both, one after the other: the small memory is used again."""
        sums = {f.name: getattr(self, f.name) + getattr(after, f.name) for f in fields(Counts)}
        return Counts(**sums | {"on_chip": max(self.on_chip, after.on_chip)})

    def times(self, heads: int) -> Counts:
        """The counts of as many heads, which share nothing; each has the small memory for itself."""
        products = {f.name: getattr(self, f.name) * heads for f in fields(Counts)}
        return Counts(**products | {"on_chip": self.on_chip})


class Memory:
    """The large memory: every access to it is counted in `counts`.

    ``element_size`` is the bytes of one number, 2 as in the papers, whatever dtype the tensors have; the
    statistics of the rows count as much as every other number.
    """

    def __init__(self, element_size: int = 2) -> None:
        check_sizes(element_size=element_size)
        self.element_size = element_size
        self.counts = Counts()

    def load(self, tensor: Tensor) -> Block:
        """Read a tensor, or the part of one that an index selects, onto the chip."""
        self.counts.read += tensor.numel() * self.element_size
        return Block(tensor.clone(), self.counts)

    def store(self, target: Tensor, block: Block) -> None:
        """Write a block over (a part of) a tensor of the same shape."""
        if target.shape != block.tensor.shape:
            raise ValueError(
                f"block must have the shape of target, {tuple(target.shape)}, got {tuple(block.tensor.shape)}"
            )
        self.counts.written += target.numel() * self.element_size
        target.copy_(block.tensor)

    def result(self, shape: tuple[int, ...], like: Tensor, fill: float | None = None) -> Tensor:
        """A tensor in the large memory for results; to ``fill`` it is to write all of it."""
        if fill is not None:
            self.counts.written += math.prod(shape) * self.element_size
        return like.new_full(shape, math.nan if fill is None else fill)

    def scratch(self, shape: tuple[int, ...], like: Tensor, fill: float | None = None) -> Tensor:
        """The same for an intermediate, whose space counts."""
        self.counts.intermediate += math.prod(shape) * self.element_size
        return self.result(shape, like, fill)

    def fresh(self, shape: tuple[int, ...], like: Tensor, fill: float) -> Block:
        """A block made on the chip, to accumulate in."""
        return Block(like.new_full(shape, fill), self.counts)

    def resident(self, *blocks: Block) -> None:
        """Say that these lie on the chip at once; what takes the place of a block is not listed beside it."""
        size = sum(block.tensor.numel() for block in blocks) * self.element_size
        self.counts.on_chip = max(self.counts.on_chip, size)


class Block:
    """A matrix on the chip. Its operators are PyTorch's, and add what they did to `counts`.

    Statistics of rows are columns of shape (rows, 1), so that they broadcast over the rows of a matrix.
    """

    def __init__(self, tensor: Tensor, counts: Counts) -> None:
        self.tensor = tensor
        self.counts = counts

    @property
    def T(self) -> Block:  # noqa: N802 - as in PyTorch
        return self.with_tensor(self.tensor.mT)

    def with_tensor(self, tensor: Tensor) -> Block:
        """A block of this tensor, for what counts no FLOPs: selections."""
        return Block(tensor, self.counts)

    def __matmul__(self, other: Block) -> Block:
        rows, inner = self.tensor.shape
        self.counts.matmul += 2 * rows * inner * other.tensor.shape[1]
        return self.with_tensor(self.tensor @ other.tensor)

    def __add__(self, other: Block) -> Block:
        return self._arithmetic(self.tensor + other.tensor)

    def __sub__(self, other: Block) -> Block:
        return self._arithmetic(self.tensor - other.tensor)

    def __mul__(self, other: Block | float) -> Block:
        return self._arithmetic(self.tensor * (other.tensor if isinstance(other, Block) else other))

    def __truediv__(self, other: Block) -> Block:
        self.counts.divisions += self.tensor.numel()
        return self.with_tensor(self.tensor / other.tensor)

    def rescaled(self, factor: Block) -> Block:
        """``self * factor`` where the factor is what a changed maximum makes necessary."""
        self.counts.rescaling += self.tensor.numel()
        return self.with_tensor(self.tensor * factor.tensor)

    def exp(self) -> Block:
        self.counts.exponentials += self.tensor.numel()
        return self.with_tensor(self.tensor.exp())

    def log(self) -> Block:
        self.counts.exponentials += self.tensor.numel()
        return self.with_tensor(self.tensor.log())

    def maximum(self, other: Block) -> Block:
        return self._arithmetic(torch.maximum(self.tensor, other.tensor))

    def row_max(self) -> Block:
        self.counts.arithmetic += self.tensor.numel()
        return self.with_tensor(self.tensor.amax(dim=1, keepdim=True))

    def row_sum(self) -> Block:
        self.counts.arithmetic += self.tensor.numel()
        return self.with_tensor(self.tensor.sum(dim=1, keepdim=True))

    def finite(self) -> Block:
        """0 for -inf: what to subtract from a row that sees no key, whose exponentials then become 0."""
        return self.with_tensor(self.tensor.masked_fill(self.tensor == -math.inf, 0.0))

    def or_one(self) -> Block:
        """1 for 0: what to divide a row by that sees no key, whose output then becomes 0."""
        return self.with_tensor(self.tensor.masked_fill(self.tensor == 0.0, 1.0))

    def _arithmetic(self, result: Tensor) -> Block:
        self.counts.arithmetic += result.numel()
        return self.with_tensor(result)
