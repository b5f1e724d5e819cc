"""Hypothesis strategies: any valid attention problem, with what is needed to run it backward and to name it.

Hypothesis draws sizes, options and layouts (so that it can shrink them); the numbers come from a drawn seed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from flashtile import masks
from flashtile.masks import Mask
from flashtile.problem import AttentionProblem, compute_dtype
from tests.oracle import random_problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191, 257)
HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 32, 33, 40, 63, 64, 65, 72, 80)
LAYOUTS = ("plain", "transposed", "strided", "padded", "unaligned", "expanded")
ALL_LAYOUTS = (*LAYOUTS, "all heads and rows the same")
_LARGEST = 150_000  # scores: batch x heads x query_length x key_length


class Case(NamedTuple):
    """One forward and backward call."""

    description: str
    problem: AttentionProblem
    grad_out: Tensor
    grad_lse: Tensor | None
    poisoned: bool  # a NaN or an infinity is in one of the inputs

    def __repr__(self) -> str:
        return f"<{self.description}>"


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    """Any combination of options that means something."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1), label="numbers"))
    sizes = draw(_sizes())
    batch, heads, kv_heads, query_length, key_length, head_dim, value_head_dim = sizes
    dtype = draw(st.sampled_from(dtypes))
    names = [
        f"(B, Hq, Hkv, Sq, Sk, D, Dv) = {sizes}, {str(dtype).removeprefix('torch.')}",
        f"from seed {generator.initial_seed()}",
    ]
    scale = draw(st.sampled_from((head_dim**-0.5, 1.0, 0.02, -0.3, 0.0)))
    spread = draw(st.sampled_from((1.0, 1.0, 3.0)))

    def tensor(name: str, *shape: int) -> Tensor:
        layout = draw(st.sampled_from(LAYOUTS), label=f"layout of {name}")
        names.append(f"{name} {layout}")
        return lay_out((torch.randn(shape, generator=generator) * spread).to(dtype), layout)

    problem = AttentionProblem(
        query=tensor("query", batch, heads, query_length, head_dim),
        key=tensor("key", batch, kv_heads, key_length, head_dim),
        value=tensor("value", batch, kv_heads, key_length, value_head_dim),
        scale=scale,
    )
    names.append(f"scale {scale:.3g}, inputs x {spread}")
    problem, said = draw(_with_mask(problem, generator))
    names += said
    problem, said = draw(_with_options(problem, generator))
    names += said
    grad_out = tensor("grad_out", batch, heads, query_length, value_head_dim) / spread
    grad_lse = None
    if draw(st.booleans(), label="with grad_lse"):
        names.append("with grad_lse")
        grad_lse = torch.randn(batch, heads, query_length, generator=generator, dtype=compute_dtype(dtype))
    poisoned = draw(st.integers(0, 9), label="poisoned") == 0
    if poisoned:
        names += draw(_poison(problem, grad_out))
    return Case(", ".join(names), problem, grad_out, grad_lse, poisoned)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides ("expanded": the first head's numbers for every head)."""
    batch, heads, length, dim = tensor.shape
    if layout == "transposed":  # (batch, length, heads, head_dim), as projections make it
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        wide = tensor.new_full((batch, heads, 2 * length, 3 * dim), math.nan)
        view = wide[:, :, ::2, 1::3]
    elif layout == "padded":
        wide = tensor.new_full((batch + 1, heads, length + 1, dim + 3), math.nan)
        view = wide[1:, :, :length, :dim]
    elif layout == "unaligned":
        view = tensor.new_full((tensor.numel() + 1,), math.nan)[1:].view(tensor.shape)
    elif layout == "expanded":
        return tensor[:, :1].expand(tensor.shape) if heads else tensor
    elif layout == "all heads and rows the same":
        return tensor[:, :1, :1].expand(tensor.shape)
    else:
        return tensor
    return view.copy_(tensor)


def with_layout(problem: AttentionProblem, layout: str) -> AttentionProblem:
    """The same problem, its inputs and its bias, if it has one, laid out so."""
    given = {name: getattr(problem, name) for name in ("query", "key", "value", "bias")}
    laid_out = {name: lay_out(tensor, layout) for name, tensor in given.items() if tensor is not None}
    return dataclasses.replace(problem, **laid_out)


def problem_in_layout(sizes: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> AttentionProblem:
    """A problem with a bias: batch, query heads, query length and key length."""
    batch, heads, queries, keys = sizes
    problem = random_problem(
        batch=batch, heads=heads, kv_heads=max(1, heads // 2), query_length=queries, key_length=keys,
        head_dim=32, dtype=dtype, random_bias=sizes,
    )  # fmt: skip
    return with_layout(problem, layout)


def some_mask(batch: int, query_length: int, key_length: int) -> st.SearchStrategy[Mask]:
    """One to three masks of any kind, all of which must allow a key."""
    one = _single_mask(batch, query_length, key_length)
    return st.lists(one, min_size=1, max_size=3).map(_all_of)


def _all_of(parts: list[Mask]) -> Mask:
    combined = parts[0]
    for part in parts[1:]:
        combined = combined & part
    return combined


@st.composite
def _sizes(draw: st.DrawFn) -> tuple[int, int, int, int, int, int, int]:
    batch = draw(st.sampled_from((1, 1, 2, 3, 0)))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    heads = kv_heads * draw(st.sampled_from((1, 1, 2, 3, 4, 8)))
    head_dim = draw(st.sampled_from(HEAD_DIMS) | st.integers(1, 80) | st.just(576))
    value_head_dim = draw(st.just(head_dim) | st.sampled_from(HEAD_DIMS))
    limit = _LARGEST // max(1, batch * heads) // (1 if head_dim <= 80 else 8)
    query_length = draw(st.sampled_from([length for length in LENGTHS if length <= limit]))
    key_limit = limit // max(1, query_length)
    same = st.just(query_length) if query_length <= key_limit else st.nothing()
    key_length = draw(same | st.sampled_from([length for length in LENGTHS if length <= key_limit]))
    return batch, heads, kv_heads, query_length, key_length, head_dim, value_head_dim


@st.composite
def _single_mask(draw: st.DrawFn, batch: int, query_length: int, key_length: int) -> Mask:
    alignment = draw(st.sampled_from(("top-left", "bottom-right")))
    bounds = st.none() | st.integers(0, max(query_length, key_length) + 1)
    positions = st.lists(st.integers(0, key_length), min_size=batch, max_size=batch)
    kind = draw(st.sampled_from(masks.__all__[2:]))  # the constructors; Intervals and Mask come first
    if kind == "causal":
        return masks.causal(alignment=alignment)
    if kind == "window":
        return masks.window(draw(bounds), draw(bounds), alignment=alignment)
    if kind in ("key_lengths", "key_starts"):
        return getattr(masks, kind)(draw(positions))
    if kind == "prefix":
        return masks.prefix(draw(positions), alignment=alignment)
    if kind == "chunks":
        return masks.chunks(draw(st.integers(1, key_length + 2)), alignment=alignment)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    rows = draw(st.sampled_from((1, batch)))
    if kind == "documents":
        longest = draw(st.integers(1, key_length + 1))
        ids = torch.randint(0, longest + 1, (rows, key_length), generator=generator) // longest
        query_ids = torch.randint(0, key_length // longest + 2, (rows, query_length), generator=generator)
        return masks.documents(ids.cumsum(dim=1), query_ids)
    if kind == "key_range":
        first, last = torch.randint(0, key_length + 1, (2, rows, query_length), generator=generator)
        return masks.key_range(first // draw(st.sampled_from((1, 2, 10))), last)
    shape = [draw(st.sampled_from((1, size))) for size in (batch, query_length, key_length)]
    pattern = torch.rand(shape[0], 1, *shape[1:], generator=generator) < draw(
        st.sampled_from((0.1, 0.5, 0.95))
    )
    return masks.from_dense(pattern)


@st.composite
def _with_mask(
    draw: st.DrawFn, problem: AttentionProblem, generator: torch.Generator
) -> tuple[AttentionProblem, list[str]]:
    batch, heads, query_length, _ = problem.query.shape
    key_length = problem.key.shape[2]
    if draw(st.booleans(), label="masked"):
        mask = draw(some_mask(batch, query_length, key_length))
        resolved = mask.resolve(batch, query_length, key_length, problem.query.device)
        fields = dict(zip(("lower", "upper", "first", "last", "mask"), resolved, strict=True))
        return dataclasses.replace(problem, **fields), [repr(mask)]
    if draw(st.integers(0, 3), label="per head") == 0:
        shape = [draw(st.sampled_from((1, size))) for size in (batch, heads, query_length, key_length)]
        pattern = torch.rand(shape, generator=generator) < 0.6
        layout = draw(st.sampled_from(LAYOUTS), label="layout of mask")
        return dataclasses.replace(problem, mask=_lay_out_mask(pattern, layout)), [f"mask {shape} {layout}"]
    return problem, []


def _lay_out_mask(pattern: Tensor, layout: str) -> Tensor:
    return lay_out(pattern.to(torch.uint8), layout if layout == "transposed" else "plain").bool()


@st.composite
def _with_options(
    draw: st.DrawFn, problem: AttentionProblem, generator: torch.Generator
) -> tuple[AttentionProblem, list[str]]:
    batch, heads, query_length, _ = problem.query.shape
    sizes = (batch, heads, query_length, problem.key.shape[2])
    dtype, small = problem.query.dtype, compute_dtype(problem.query.dtype)
    fields: dict[str, object] = {}
    said = []

    def chosen(name: str) -> bool:
        return draw(st.integers(0, 2), label=name) == 0

    if chosen("bias"):
        shape = [draw(st.sampled_from((1, size))) for size in sizes]
        layout = draw(st.sampled_from(LAYOUTS), label="layout of bias")
        bias = torch.randn(shape, generator=generator).to(dtype)
        if draw(st.booleans(), label="holes"):
            bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.3, -math.inf)
            said.append("bias with holes")
        fields["bias"] = lay_out(bias, layout)
        said.append(f"bias {shape} {layout}")
    if chosen("alibi"):
        rows = draw(st.sampled_from((1, batch)))
        fields["alibi_slopes"] = torch.rand(rows, heads, generator=generator, dtype=small) / 4
        said.append(f"alibi ({rows}, {heads})")
    if chosen("sinks"):
        fields["sinks"] = torch.randn(heads, generator=generator, dtype=small)
        said.append("sinks")
    if chosen("softcap"):
        fields["softcap"] = draw(st.sampled_from((0.5, 5.0, 50.0)))
        said.append(f"softcap {fields['softcap']}")
    if chosen("dropout"):
        fields["dropout_p"] = draw(st.sampled_from((0.1, 0.5, 0.9)))
        fields["seed"] = draw(st.integers(-(2**63), 2**63 - 1))
        said.append(f"dropout {fields['dropout_p']} with seed {fields['seed']}")
    return dataclasses.replace(problem, **fields), said


@st.composite
def _poison(draw: st.DrawFn, problem: AttentionProblem, grad_out: Tensor) -> list[str]:
    """Writes one NaN or infinity into an input, in place; an expanded one has it for every head."""
    names = ["query", "key", "value", "bias", "alibi_slopes"]
    if (
        problem.sinks is None
    ):  # whether the sink of a row that sees no key sees its gradient is anyone's guess
        names.append("grad_out")
    name = draw(st.sampled_from(names))
    tensor = grad_out if name == "grad_out" else getattr(problem, name)
    if tensor is None or tensor.numel() == 0:
        return []
    place = tuple(draw(st.integers(0, size - 1)) for size in tensor.shape)
    bad = draw(st.sampled_from((math.nan, math.inf))) if name == "value" else math.nan
    tensor[place] = bad
    return [f"{name}{list(place)} = {bad}"]
