"""flash-attn's varlen functions: every sequence as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.compat import InputError
from flashtile.compat.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashtile.problem import compute_dtype
from tests.compat.standard import leaves_of, problem_of, standard
from tests.oracle import assert_close_to_oracle

# Lengths of queries, lengths of keys, (heads, kv_heads, head_dim), options.
CALLS: dict[str, tuple[list[int], list[int], tuple[int, int, int], dict[str, Any]]] = {
    "plain": ([33, 1, 65], [20, 40, 65], (3, 3, 16), {}),
    "causal": ([33, 7, 20], [40, 7, 9], (4, 2, 24), {"causal": True}),
    "empty sequences": ([0, 5, 0, 17, 3, 0], [4, 0, 0, 17, 9, 0], (4, 1, 8), {"causal": True}),
    "nothing at all": ([0, 0], [0, 0], (2, 2, 8), {}),
    "one query each, grouped": ([1, 1, 1], [17, 0, 70], (8, 2, 40), {"causal": True}),
    "window": ([30, 12, 50], [30, 40, 20], (2, 2, 59), {"window_size": (9, 4)}),
    "window right beyond sk": ([50, 3], [9, 3], (2, 1, 16), {"window_size": (-1, 11)}),
    "softcap": ([20, 11], [30, 11], (2, 2, 16), {"softcap": 1.5, "causal": True}),
    "alibi": ([20, 11], [30, 11], (4, 2, 16), {"alibi_slopes": "heads", "causal": True}),
    "alibi of the batch": ([20, 0, 11], [30, 2, 11], (4, 2, 16), {"alibi_slopes": "batch"}),
    "sinks": ([20, 11], [30, 11], (4, 2, 16), {"learnable_sink": "heads", "softmax_scale": 0.4}),
}


def starts(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def inputs_of(name: str, dtype: torch.dtype) -> dict[str, Any]:
    queries, keys, (heads, kv_heads, head_dim), options = CALLS[name]
    arguments: dict[str, Any] = {
        name: torch.randn(total, count, head_dim).to(dtype).requires_grad_()
        for name, total, count in (
            ("q", sum(queries), heads),
            ("k", sum(keys), kv_heads),
            ("v", sum(keys), kv_heads),
        )
    }
    arguments |= {"cu_seqlens_q": starts(queries), "cu_seqlens_k": starts(keys)}
    arguments |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    for option, value in options.items():
        if isinstance(value, str):
            shape = (len(queries), heads) if value == "batch" else (heads,)
            value = torch.rand(shape, dtype=compute_dtype(dtype)).div(4).requires_grad_()
        arguments[option] = value
    return arguments


def sequences(arguments: dict[str, Any]) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Rows of queries, rows of keys and the arguments of flash_attn_func for every sequence."""
    bounds = [pairwise(arguments[f"cu_seqlens_{side}"].tolist()) for side in "qk"]
    for b, (of_queries, of_keys) in enumerate(zip(*bounds, strict=True)):
        rows, keys = slice(*of_queries), slice(*of_keys)
        own = {
            "q": arguments["q"][None, rows],
            "k": arguments["k"][None, keys],
            "v": arguments["v"][None, keys],
        }
        for option, value in arguments.items():
            if option in ("causal", "window_size", "softcap", "softmax_scale", "learnable_sink"):
                own[option] = value
        if (slopes := arguments.get("alibi_slopes")) is not None:
            own["alibi_slopes"] = slopes[b] if slopes.dim() == 2 else slopes
        yield rows, keys, own


def paged(tensor: Tensor, lengths: list[int], page_size: int) -> tuple[Tensor, Tensor]:
    """Packed rows as pages in random order, with pages that nobody uses, and the table of pages."""
    parts = [part.split(page_size) for part in tensor.split(lengths)]
    count, longest = sum(map(len, parts)), max(map(len, parts))
    order = iter(torch.randperm(count + 2).tolist())
    pages = torch.full((count + 2, page_size, *tensor.shape[1:]), math.nan, dtype=tensor.dtype)
    table = torch.full((len(lengths), longest), -1, dtype=torch.int32)
    for b, part in enumerate(parts):
        for i, rows in enumerate(part):
            if len(rows):
                table[b, i] = next(order)
                pages[table[b, i], : len(rows)] = rows
    return pages, table


def exactly(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_by_the_rule(name, dtype):
    arguments = inputs_of(name, dtype)
    inputs = [arguments[name] for name in "qkv"]
    out, lse = flash_attn_varlen_func(**arguments, return_lse=True)
    assert out.dtype == dtype
    assert out.shape == arguments["q"].shape
    assert lse.dtype == compute_dtype(dtype)
    assert lse.shape == (out.shape[1], out.shape[0])
    grad_out, grad_lse = torch.randn(out.shape).to(dtype), torch.randn(lse.shape).to(lse.dtype)
    grad_q, grad_k, grad_v = torch.autograd.grad((out, lse), inputs, (grad_out, grad_lse))
    for rows, keys, own in sequences(arguments):
        found = {
            "out": out[rows],
            "grad_query": grad_q[rows],
            "grad_key": grad_k[keys],
            "grad_value": grad_v[keys],
        }
        found = {name: tensor.detach()[None].transpose(1, 2) for name, tensor in found.items()}
        found["lse"] = lse.detach()[None, :, rows]
        assert_close_to_oracle(
            found, problem_of(own), grad_out[None, rows].transpose(1, 2), grad_lse[None, :, rows]
        )


@pytest.mark.parametrize("name", CALLS)
def test_meaning_of_every_option(name):
    arguments = inputs_of(name, torch.float64)
    out, lse, probabilities = flash_attn_varlen_func(**arguments, return_attn_probs=True)
    expected = torch.zeros_like(out)
    for b, (rows, keys, own) in enumerate(sequences(arguments)):
        alone, lse_alone, probabilities_alone = standard(**own)
        expected = expected.index_add(0, torch.arange(rows.start, rows.stop), alone[0])
        exactly(out[rows], alone[0])
        exactly(lse[:, rows], lse_alone[0])
        corner = probabilities[b, :, : rows.stop - rows.start, : keys.stop - keys.start]
        exactly(corner, probabilities_alone[0])
        assert int((probabilities[b] != 0).sum()) == int((corner != 0).sum())
    longest = (arguments["max_seqlen_q"], arguments["max_seqlen_k"])
    assert probabilities.shape == (len(arguments["cu_seqlens_q"]) - 1, out.shape[1], *longest)
    leaves, grad_out = list(leaves_of(arguments).values()), torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad_out),
        torch.autograd.grad(expected, leaves, grad_out),
        strict=True,
    ):
        exactly(ours, theirs)


def test_dropout_is_the_mask_in_the_coordinates_of_each_sequence():
    arguments = inputs_of("causal", torch.float64)
    torch.manual_seed(7)
    out, _, signed = flash_attn_varlen_func(**arguments, dropout_p=0.3, return_attn_probs=True)
    torch.manual_seed(7)
    assert torch.equal(out, flash_attn_varlen_func(**arguments, dropout_p=0.3))
    torch.manual_seed(7)
    seed = int(torch.randint(-(2**63), 2**63 - 1, (1,)))
    mask = flashtile.dropout_mask(seed, 0.3, *signed.shape)
    assert torch.equal(signed >= 0, mask | (signed == 0))
    assert (signed < 0).any()
    for b, (rows, keys, own) in enumerate(sequences(arguments)):
        kept = mask[b : b + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        expected, _, probabilities = standard(**own, kept=kept, dropout_p=0.3)
        exactly(out[rows], expected[0])
        exactly(signed[b, :, : kept.shape[2], : kept.shape[3]].abs(), probabilities[0])


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.2}])
def test_packed_gradients_lie_in_the_packed_tensor(options, dtype):
    cu_q, cu_k = starts([4, 0, 9]), starts([6, 2, 5])
    qkv = torch.randn(13, 3, 4, 24).to(dtype).requires_grad_()
    q, kv = (torch.randn(13, *shape, 24).to(dtype).requires_grad_() for shape in ((4,), (2, 2)))
    for leaves, call, parts in (
        (
            [qkv],
            lambda: flash_attn_varlen_qkvpacked_func(qkv, cu_q, 9, **options),
            lambda: (*qkv.unbind(1), cu_q, cu_q, 9, 9),
        ),
        (
            [q, kv],
            lambda: flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 9, 6, **options),
            lambda: (q, *kv.unbind(1), cu_q, cu_k, 9, 6),
        ),
    ):
        torch.manual_seed(1)
        out = call()
        torch.manual_seed(1)
        expected = flash_attn_varlen_func(*parts(), **options)
        assert torch.equal(out, expected)
        grad_out = torch.randn(out.shape).to(dtype)
        for ours, theirs in zip(
            torch.autograd.grad(out, leaves, grad_out),
            torch.autograd.grad(expected, leaves, grad_out),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


def test_equal_lengths_are_a_batch():
    q, k, v = torch.randn(3, 2, 9, 4, 16).unbind(0)
    cu = starts([9, 9])
    out = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, 9, 9, causal=True)
    assert torch.equal(out.unflatten(0, (2, 9)), flash_attn_func(q, k, v, causal=True))


def test_rows_behind_the_last_offset_are_zero():
    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))
    cu = starts([3, 4])
    out, lse = flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, return_lse=True)
    assert out[7:].eq(0).all()
    assert (lse[:, 7:] == -math.inf).all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(gradient[7:].eq(0).all() and gradient[:7].ne(0).any() for gradient in gradients)


@pytest.mark.parametrize("dtype_of_lengths", [torch.int32, torch.int64])
@pytest.mark.parametrize("longest", [5, 11, torch.tensor(5), torch.tensor(5, dtype=torch.int32)])
def test_lengths_come_in_several_types(dtype_of_lengths, longest):
    q, k, v = torch.randn(3, 9, 2, 8).unbind(0)
    cu = starts([4, 5], dtype_of_lengths)
    out, _, probabilities = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, return_attn_probs=True)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, starts([4, 5]), starts([4, 5]), 5, 5))
    assert probabilities.shape == (2, 2, int(longest), int(longest))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (5, 0)}, {"dropout_p": 0.3}])
def test_pages_give_the_same_bits(page_size, options, dtype):
    queries, keys = [5, 0, 20, 1], [9, 4, 33, 0]
    q, k, v = torch.randn(26, 4, 16).to(dtype), *torch.randn(2, 46, 2, 16).to(dtype).unbind(0)
    lengths = (starts(queries), starts(keys), 20, 33)
    torch.manual_seed(2)
    expected = flash_attn_varlen_func(q, k, v, *lengths, **options, return_attn_probs=True)
    torch.manual_seed(4)
    pages, table = paged(torch.cat([k, v], 2), keys, page_size)
    torch.manual_seed(2)
    found = flash_attn_varlen_func(
        q,
        pages[..., :16],
        pages[..., 16:],
        *lengths,
        **options,
        return_attn_probs=True,
        block_table=table.clamp(0),
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_probabilities_under_autocast_are_those_of_the_call():
    q, k, v = torch.randn(3, 9, 2, 8).unbind(0)
    cu = starts([4, 5])
    expected = flash_attn_varlen_func(
        *(t.bfloat16() for t in (q, k, v)), cu, cu, 5, 5, return_attn_probs=True
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, return_attn_probs=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_pages_have_no_gradient():
    q = torch.randn(4, 2, 8, requires_grad=True)
    pages, cu = torch.randn(1, 4, 2, 8), starts([4])
    with pytest.raises(RuntimeError, match="no gradient"):
        flash_attn_varlen_func(
            q, pages, pages, cu, cu, 4, 4, block_table=torch.zeros(1, 1, dtype=torch.int32)
        )


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_compiles_into_one_graph():
    torch._dynamo.reset()
    q, k, v = (torch.randn(9, 2, 8, requires_grad=True) for _ in range(3))
    cu = starts([4, 5])

    def call(longest: int | Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True, window_size=(2, 0))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = call(5)
    expected_gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    for longest in (5, torch.tensor(5)):
        out = compiled(longest)
        assert torch.equal(out, expected)
        for ours, theirs in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected_gradients, strict=True):
            assert torch.equal(ours, theirs)


def small(**options: Any) -> dict[str, Any]:
    tensors = {"q": torch.randn(9, 4, 8), "k": torch.randn(7, 2, 8), "v": torch.randn(7, 2, 8)}
    lengths = {
        "cu_seqlens_q": starts([4, 5]),
        "cu_seqlens_k": starts([0, 7]),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }
    return {**tensors, **lengths, **options}


REFUSED = {
    "q": [small(q=None), small(q=torch.randn(1, 9, 4, 8)), small(q=torch.ones(9, 4, 8).int())],
    "k": [
        small(k=torch.randn(7, 2, 9)),
        small(k=torch.randn(7, 2, 8).double()),
        small(k=torch.randn(7, 3, 8), v=torch.randn(7, 3, 8)),
    ],
    "v": [small(v=torch.randn(6, 2, 8)), small(v=torch.randn(7, 16))],
    "cu_seqlens_q": [
        small(cu_seqlens_q=torch.tensor([0, 4, 10])),
        small(cu_seqlens_q=torch.tensor([0, 5, 4])),
        small(cu_seqlens_q=torch.tensor([1, 5, 9])),
        small(cu_seqlens_q=torch.tensor([0.0, 5.0, 9.0])),
        small(cu_seqlens_q=starts([9]).reshape(1, 2)),
    ],
    "cu_seqlens_k": [small(cu_seqlens_k=starts([7])), small(cu_seqlens_k=starts([4, 4]))],
    "max_seqlen_q": [small(max_seqlen_q=4), small(max_seqlen_q=5.0), small(max_seqlen_q=torch.ones(2))],
    "max_seqlen_k": [small(max_seqlen_k=6), small(max_seqlen_k="7")],
    "dropout_p": [small(dropout_p=1.5)],
    "softmax_scale": [small(softmax_scale=math.inf)],
    "alibi_slopes": [small(alibi_slopes=torch.zeros(3, 4))],
    "learnable_sink": [small(learnable_sink=torch.zeros(2))],
    "window_size": [small(window_size=(1, 2, 3))],
    "block_table": [
        small(
            k=torch.randn(2, 4, 2, 8),
            v=torch.randn(2, 4, 2, 8),
            block_table=torch.tensor([[0, 0], [1, 2]], dtype=torch.int32),
        )
    ],
}


@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name, calls in REFUSED.items() for call in calls]
)
def test_what_is_refused_is_named(name, call):
    with pytest.raises(InputError, match=rf"^{name} (and v )?must .*, got ") as refusal:
        flash_attn_varlen_func(**call)
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, RuntimeError)


def test_what_the_packed_functions_refuse_is_named():
    qkv, q, kv, cu = torch.randn(5, 3, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 2, 8), starts([5])
    for name, call in (
        ("qkv", lambda: flash_attn_varlen_qkvpacked_func(kv, cu, 5)),
        ("cu_seqlens", lambda: flash_attn_varlen_qkvpacked_func(qkv, starts([6]), 6)),
        ("max_seqlen", lambda: flash_attn_varlen_qkvpacked_func(qkv, cu, 4)),
        ("kv", lambda: flash_attn_varlen_kvpacked_func(q, qkv, cu, cu, 5, 5)),
        (r"kv\[:, 0\]", lambda: flash_attn_varlen_kvpacked_func(q, kv.double(), cu, cu, 5, 5)),
        ("q", lambda: flash_attn_varlen_kvpacked_func(qkv, kv, cu, cu, 5, 5)),
    ):
        with pytest.raises(InputError, match=rf"^{name} must .*, got "):
            call()
