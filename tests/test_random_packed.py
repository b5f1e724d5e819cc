"""Packed sequences with any options: every sequence gets the bits that it gets alone, forward and backward.

What it gets alone is compared with the oracle in test_random. scripts/fuzz.py --packed runs many more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile import masks
from tests.strategies import DTYPES, HEAD_DIMS

QUERY_LENGTHS = (0, 1, 2, 5, 8, 9, 16, 63, 65, 130)
KEY_LENGTHS = (*QUERY_LENGTHS, 300, 1030)


class Case(NamedTuple):
    """Sequences of these lengths, packed, and the options of the call."""

    description: str
    lengths: list[tuple[int, int]]
    inputs: tuple[Tensor, Tensor, Tensor]  # (total tokens, heads, head_dim), a few rows more than needed
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"<{self.description}>"


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    """Up to five sequences, any masks and terms that do not number the sequences as dropout does."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1), label="numbers"))
    pair = st.tuples(st.sampled_from(QUERY_LENGTHS), st.sampled_from(KEY_LENGTHS))
    lengths = draw(st.lists(pair, min_size=1, max_size=5))
    kv_heads, group = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 3, 4)))
    head_dim, value_head_dim = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(HEAD_DIMS))
    dtype, rest = draw(st.sampled_from(dtypes)), draw(st.sampled_from((0, 3)))
    queries, keys = (sum(column) + rest for column in zip(*lengths, strict=True))
    shapes = (
        (queries, kv_heads * group, head_dim),
        (keys, kv_heads, head_dim),
        (keys, kv_heads, value_head_dim),
    )
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    options = draw(_options(generator, lengths, kv_heads * group, dtype))
    shown = ", ".join(
        f"{name} {tuple(v.shape) if isinstance(v, Tensor) else v!r}" for name, v in options.items()
    )
    description = f"lengths {lengths}, {rest} rows more, {shapes}, {dtype}, {shown}"
    return Case(description, lengths, (inputs[0], inputs[1], inputs[2]), options)


@st.composite
def _options(
    draw: st.DrawFn,
    generator: torch.Generator,
    lengths: list[tuple[int, int]],
    heads: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    plane = tuple(max(1, max(column)) for column in zip(*lengths, strict=True))
    shape = (1, draw(st.sampled_from((1, heads))), draw(st.sampled_from((1, plane[0]))), plane[1])
    alignment = draw(st.sampled_from(("top-left", "bottom-right")))
    mask = draw(
        st.none()
        | st.just(masks.causal(alignment=alignment))
        | st.builds(masks.window, st.integers(0, 70), st.integers(0, 70), alignment=st.just(alignment))
        | st.builds(masks.chunks, st.integers(1, 90), alignment=st.just(alignment))
        | st.just(torch.rand(shape, generator=generator) < 0.6)
    )
    options: dict[str, Any] = {} if mask is None else {"mask": mask}
    if draw(st.booleans(), label="bias"):
        options["bias"] = torch.randn(shape, generator=generator).to(dtype)
    if draw(st.booleans(), label="slopes"):
        options["alibi_slopes"] = torch.rand(heads, generator=generator)
    if draw(st.booleans(), label="sinks"):
        options["sinks"] = torch.randn(heads, generator=generator)
    if draw(st.booleans(), label="softcap"):
        options["softcap"] = 3.0
    return options


def check(case: Case) -> None:
    inputs = [tensor.requires_grad_() for tensor in case.inputs]
    columns = zip(*case.lengths, strict=True)
    starts = [torch.tensor([0, *column]).cumsum(0) for column in columns]
    found = flashtile.attention_varlen(*inputs, *starts, **case.options, return_lse=True)
    upstream = [torch.randn_like(result) for result in found]
    gradients = torch.autograd.grad(found, inputs, upstream)
    for b, (queries, keys) in enumerate(case.lengths):
        own_queries, own_keys = (slice(*start[b : b + 2].tolist()) for start in starts)
        rows = (own_queries, own_keys, own_keys)
        own = [tensor[row].transpose(0, 1)[None] for tensor, row in zip(inputs, rows, strict=True)]
        alone = flashtile.attention(*own, **_cut(case.options, queries, keys), return_lse=True)
        given_back = [upstream[0][own_queries].transpose(0, 1)[None], upstream[1][None, :, own_queries]]
        assert torch.equal(found[0][own_queries].transpose(0, 1)[None], alone[0]), f"output of sequence {b}"
        assert torch.equal(found[1][None, :, own_queries], alone[1]), f"LSE of sequence {b}"
        expected = torch.autograd.grad(alone, own, given_back)
        for name, gradient, row, other in zip("QKV", gradients, rows, expected, strict=True):
            assert torch.equal(gradient[row].transpose(0, 1)[None], other), f"d{name} of sequence {b}"
    for tensor, start in zip((found[0], *gradients), (starts[0], *starts[:1], *starts[1:] * 2), strict=True):
        assert tensor[start[-1] :].eq(0).all(), "rows behind the last sequence"


def _cut(options: dict[str, Any], queries: int, keys: int) -> dict[str, Any]:
    """Planes as large as one sequence; one column if it has no keys, lest the plane itself be empty."""
    return {
        name: option[..., : queries if option.shape[-2] > 1 else 1, : max(1, keys)]
        if isinstance(option, Tensor) and option.dim() == 4
        else option
        for name, option in options.items()
    }


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_sequences(case):
    check(case)
