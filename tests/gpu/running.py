"""The GPU engine on the device of this process: a GPU, or CPU tensors where Triton interprets the kernels."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch import Tensor

from flashtile.problem import AttentionProblem
from tests.oracle import (
    assert_close_by_sequence,
    assert_close_to_oracle,
    forward_of_backend,
    results_of_backend,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here; test_interpreter.py runs this file without", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.gpu import engine  # noqa: E402 (it needs Triton)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter multiplies the bit patterns of bfloat16.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def results(
    problem: AttentionProblem, grad_out: Tensor | None = None, grad_lse: Tensor | None = None
) -> dict[str, Tensor]:
    """What the engine writes over NaN, in host memory: `out` and `lse`, and with `grad_out` the gradients."""
    there = on_device(problem)
    if grad_out is None:
        found = forward_of_backend(engine, there)
    else:
        upstream = moved(grad_out), None if grad_lse is None else moved(grad_lse)
        found = results_of_backend(engine, there, *upstream)
    return {name: tensor.cpu() for name, tensor in found.items()}


def forward_alone(problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    """`results` of the forward pass, for checks that have gradients at hand."""
    return results(problem)


def check(problem: AttentionProblem) -> None:
    """The forward pass against the oracle."""
    compare = assert_close_by_sequence if problem.ragged else assert_close_to_oracle
    compare(results(problem), problem)


def on_device(problem: AttentionProblem) -> AttentionProblem:
    """The same problem there, every tensor with the strides and the alignment that it has here."""
    fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    tensors = {name: moved(field) for name, field in fields.items() if isinstance(field, Tensor)}
    return dataclasses.replace(problem, **tensors)


def moved(tensor: Tensor) -> Tensor:
    """A tensor on the device, with its storage around it."""
    if tensor.device == DEVICE:
        return tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(DEVICE)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
