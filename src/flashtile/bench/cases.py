"""The calls that are measured: shapes, dtypes and passes, with their cost in operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """One attention call: sizes, dtype, causal or not, and which pass of it is timed."""

    group: str
    batch: int
    heads: int
    query_length: int
    head_dim: int
    dtype: str = "fp32"
    causal: bool = False
    direction: str = "forward"
    kv_heads: int | None = None
    key_length: int | None = None

    @property
    def keys(self) -> int:
        return self.key_length or self.query_length

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def name(self) -> str:
        sizes = f"{self.batch}x{self.heads}x{self.query_length}x{self.head_dim}"
        if self.kv_heads or self.key_length:
            sizes += f" kv {self.kv_heads or self.heads}x{self.keys}"
        causal = " causal" if self.causal else ""
        return f"{self.direction} {self.dtype}{causal} {sizes}"

    @property
    def flops(self) -> float:
        """4 B H Sq Sk D, half of it when causal; the backward pass counts 2.5 times as much."""
        work = 4.0 * self.batch * self.heads * self.query_length * self.keys * self.head_dim
        return work * (0.5 if self.causal else 1.0) * (2.5 if self.direction == "backward" else 1.0)

    @property
    def key_value_bytes(self) -> int:
        """Bytes of keys and values, which a decode step has to read once."""
        kv_heads = self.kv_heads or self.heads
        return 2 * self.batch * kv_heads * self.keys * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def result_bytes(self) -> int:
        """Bytes of what a pass returns: the output, or the gradients of query, key and value."""
        of_query = self.batch * self.heads * self.query_length * self.head_dim
        size = DTYPES[self.dtype].itemsize
        return size * of_query if self.direction == "forward" else size * of_query + self.key_value_bytes

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, key, value and the gradient of the output: standard normal, the same for every library."""
        generator = torch.Generator().manual_seed(seed)
        query_shape = (self.batch, self.heads, self.query_length, self.head_dim)
        key_shape = (self.batch, self.kv_heads or self.heads, self.keys, self.head_dim)
        shapes = (query_shape, key_shape, key_shape, query_shape)
        query, key, value, grad = (
            torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for shape in shapes
        )
        return query, key, value, grad

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Case:
        """The case that `as_dict` describes."""
        return cls(**{name: value for name, value in fields.items() if name != "name"})


def long_cases(length: int = 4096, heads: int = 8) -> list[Case]:
    """The main table: both head dims, three dtypes, causal and not, forward and backward."""
    return [
        Case("long", 1, heads, length, head_dim, dtype, causal, direction)
        for direction in PASSES
        for dtype in ("fp32", "bf16", "fp16")
        for head_dim in (64, 128)
        for causal in (False, True)
    ]


def decode_cases(keys: int = 8192) -> list[Case]:
    """One new token against a cache: 32 query heads over 8 key heads."""
    return [
        Case("decode", 1, 32, 1, 128, dtype, kv_heads=8, key_length=keys)
        for dtype in ("fp32", "bf16", "fp16")
    ]


def small_cases() -> list[Case]:
    """Many short sequences, a vision transformer's, one short sequence, and a call that is nearly nothing."""
    shapes = [(32, 12, 128, 64), (8, 12, 197, 64), (1, 8, 128, 64), (1, 1, 16, 64)]
    return [Case("small", *shape, dtype) for shape in shapes for dtype in ("fp32", "bf16")]


def all_cases(quick: bool = False) -> list[Case]:
    """Every case of the benchmarks; `quick` shortens the sequences to an eighth."""
    if quick:
        return long_cases(512) + decode_cases(1024) + small_cases()
    return long_cases() + decode_cases() + small_cases()
