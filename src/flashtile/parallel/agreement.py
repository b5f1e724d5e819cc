"""What the ranks of a group tell each other before the first exchange: a mismatch is an error of all."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flashtile.parallel.exchange import Group, named
from flashtile.problem import SUPPORTED_DTYPES

DTYPES = (*SUPPORTED_DTYPES, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
ABSENT = -(2**63)  # no number: as a float, the bits of -0.0
RECORDED = ("query", "key", "value", "slopes or sinks")
REFUSALS = (TypeError, ValueError, NotImplementedError)
_Facts = TypeVar("_Facts", bound=NamedTuple)


def float_code(number: float | None) -> int:
    """A number as the integer that has its bits."""
    return ABSENT if number is None else int(struct.unpack("q", struct.pack("d", float(number)))[0])


def text_code(text: str | None) -> int:
    """A number for a text: two that differ have two but for a chance of 2**-32."""
    return ABSENT if text is None else zlib.crc32(text.encode())


def documents_code(cu_seqlens: Tensor | Sequence[int] | None) -> int:
    """A number for cumulative lengths, whatever they hold."""
    if isinstance(cu_seqlens, (Tensor, Sequence)):
        cu_seqlens = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    return text_code(None if cu_seqlens is None else repr(cu_seqlens))


def _float_of(code: int) -> float | None:
    return None if code == ABSENT else float(struct.unpack("d", struct.pack("q", code))[0])


def _dtype_of(code: int) -> torch.dtype:
    return DTYPES[code]


_SHOWN: dict[str, Callable[[int], object]] = {
    "dtype": _dtype_of,
    "layout": lambda code: ("contiguous", "zigzag")[code],
    "scale": _float_of,
    "softcap": _float_of,
    "dropout_p": _float_of,
    "recorded": bool,
    "requires_grad": lambda code: [name for bit, name in enumerate(RECORDED) if code >> bit & 1],
}


def agree(
    operation: str,
    group: Group,
    facts: _Facts,
    refusal: Exception | None,
    may_differ: Collection[str] = (),
    *,
    near: object = None,
) -> list[_Facts]:
    """The facts (a NamedTuple of ints) of every rank, which differ in nothing but ``may_differ``.

    A rank that refuses its arguments still takes part, so that the others need not wait for it: it raises
    its ``refusal``, the others an error that names it. Any other mismatch is a ValueError on every rank.
    ``near``: one of the arguments; if it is a tensor on a device, the facts travel from there.
    """
    numbers = [int(refusal is not None), *(0 if refusal else int(fact) for fact in facts)]
    own = torch.tensor(numbers, dtype=torch.int64, device=_device_of(group, near))
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with named(f"{operation}: comparing the arguments of all ranks"):
        dist.all_gather(received, own, group)
    if refusal is not None:
        raise refusal
    rows = torch.stack(received).tolist()
    refusing = [rank for rank, row in enumerate(rows) if row[0]]
    if refusing:
        ranks = " and ".join(f"rank {rank}" for rank in refusing)
        raise ValueError(f"{operation}: {ranks} refused the arguments there; the error raised there says why")
    everyone = [type(facts)(*row[1:]) for row in rows]
    for name in facts._fields:
        if name not in may_differ:
            _check_same(operation, name, [getattr(one, name) for one in everyone])
    return everyone


def _device_of(group: Group, near: object) -> torch.device | None:
    """Not simply the current device: that is cuda:0 on every rank that never set one."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    if isinstance(near, Tensor) and near.device.type != "cpu":
        return near.device
    return torch.accelerator.current_accelerator()


def agree_everywhere(
    operation: str,
    groups: Sequence[Group],
    facts: _Facts,
    refusal: Exception | None,
    *,
    near: object = None,
) -> None:
    """``agree`` in all groups of a grid: who learns of a refusal in the first passes it on to the second."""
    for group in groups:
        try:
            agree(operation, group, facts, refusal, near=near)
        except REFUSALS as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _check_same(operation: str, name: str, codes: list[int]) -> None:
    if len(set(codes)) == 1:
        return
    show: Any = _SHOWN.get(name, int)
    said = ", ".join(f"{show(code)} on rank {rank}" for rank, code in enumerate(codes))
    raise ValueError(f"{operation}: {name} must be the same on every rank, got {said}")
