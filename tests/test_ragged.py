"""Packed sequences and caches where they are easy to get wrong: transforms, lazy views, bounds of memory, any
combination of options.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile import masks, reference
from flashtile.masks import Mask
from flashtile.problem import AttentionProblem
from tests.strategies import lay_out

BOTTOM_RIGHT = masks.causal(alignment="bottom-right")
LENGTHS = (0, 1, 2, 7, 8, 9, 17, 63, 65, 129, 257)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(queries: list[int], keys: list[int], **options: Any) -> list[Tensor]:
    return [
        torch.randn(sum(lengths), heads, 8, **options)
        for lengths, heads in ((queries, 4), (keys, 2), (keys, 2))
    ]


def some_mask(rng: random.Random, queries: list[int], keys: list[int]) -> tuple[Mask, list[Tensor]]:
    """A mask of a random kind, and what each sequence sees by definition."""
    kind = rng.choice(["causal", "window", "key_lengths", "key_range", "prefix", "chunks", "documents"])
    alignment = rng.choice(["top-left", "bottom-right"])
    first, last = ([rng.randint(0, length) for length in keys] for _ in range(2))
    left, right, size = rng.randint(0, 70), rng.randint(0, 70), rng.choice([1, 3, 16, 129])
    ids = torch.arange(sum(keys)) // rng.choice([2, 5, 60])
    query_ids = torch.randint(0, int(ids[-1]) + 2 if len(ids) else 1, (sum(queries),))
    mask = {
        "causal": lambda: masks.causal(alignment=alignment),
        "window": lambda: masks.window(left, right, alignment=alignment),
        "key_lengths": lambda: masks.key_lengths(last),
        "key_range": lambda: masks.key_range(first, last),
        "prefix": lambda: masks.prefix(last, alignment=alignment),
        "chunks": lambda: masks.chunks(size, alignment=alignment),
        "documents": lambda: masks.documents(ids, query_ids),
    }[kind]()
    seen = []
    for b, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
        at = i + (columns - rows if alignment == "bottom-right" else 0)
        own_query_ids, own_key_ids = query_ids.split(queries)[b], ids.split(keys)[b]
        seen.append(
            {
                "causal": j <= at,
                "window": (at - left <= j) & (j <= at + right),
                "key_lengths": (j < last[b]).expand(rows, -1),
                "key_range": ((first[b] <= j) & (j < last[b])).expand(rows, -1),
                "prefix": (j <= at) | (j < last[b]),
                "chunks": at.div(size, rounding_mode="floor") == j.div(size, rounding_mode="floor"),
                "documents": own_query_ids[:, None] == own_key_ids[None],
            }[kind]
        )
    return mask, seen


def exact(
    leaves: list[Tensor], small: dict[str, Tensor], queries: list[int], keys: list[int],
    seen: list[Tensor], **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every sequence by itself, with what it sees spelled out."""
    query, key, value = leaves
    outs, lses = [], []
    parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    for b, own in enumerate(parts):
        plane = small.get("bias")
        if plane is not None:
            longest = len(queries), query.shape[1], max(queries), max(keys)
            plane = plane.expand(longest)[b : b + 1, :, : queries[b], : keys[b]]
        slopes = small.get("alibi_slopes")
        problem = AttentionProblem(
            *(t.transpose(0, 1)[None] for t in own), query.shape[2] ** -0.5, mask=seen[b][None, None],
            bias=plane, alibi_slopes=slopes if slopes is None or len(slopes) == 1 else slopes[b : b + 1],
            sinks=small.get("sinks"), **options,
        )  # fmt: skip
        out, lse = reference.attention(problem)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31 - 1))
def test_any_combination(seed):
    """Every kind of mask by its definition, gradients of what sequences share, layouts, any thread count."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(rng.choice([1, 2, 5]))
    batch, kv_heads = rng.choice([1, 2, 5, 9]), rng.choice([1, 2])
    heads, dims = kv_heads * rng.choice([1, 3]), (rng.choice([1, 7, 16, 33]), rng.choice([1, 8, 65]))
    queries, keys = ([rng.choice(LENGTHS) for _ in range(batch)] for _ in range(2))
    double, layouts = {"dtype": torch.float64}, ("plain", "transposed", "strided", "unaligned")
    leaves = [
        lay_out(torch.randn(1, count, sum(lengths), dim, **double), rng.choice(layouts))[0]
        .transpose(0, 1)
        .requires_grad_()
        for count, lengths, dim in (
            (heads, queries, dims[0]), (kv_heads, keys, dims[0]), (kv_heads, keys, dims[1]),
        )
    ]  # fmt: skip
    mask, seen = some_mask(rng, queries, keys)
    if rng.random() < 0.4:
        other, also = some_mask(rng, queries, keys)
        mask, seen = mask & other, [a & b for a, b in zip(seen, also, strict=True)]
    shape = [rng.choice([1, size]) for size in (batch, heads, max(queries), max(keys))]
    small = {
        "bias": torch.randn(shape, **double).masked_fill(torch.rand(shape) < 0.1, -torch.inf),
        "alibi_slopes": torch.rand(rng.choice([1, batch]), heads, **double),
        "sinks": torch.randn(heads, **double),
    }
    small = {name: t.requires_grad_() for name, t in small.items() if rng.random() < 0.5}
    options = {"softcap": rng.choice([None, 3.0])}
    out, lse = flashtile.attention_varlen(
        *leaves, starts(queries).int(), starts(keys), mask=mask, **small, **options, return_lse=True
    )
    expected, expected_lse = exact(leaves, small, queries, keys, seen, **options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-12)
    wanted, upstream = [*leaves, *small.values()], (torch.randn_like(out), torch.randn_like(lse))
    found = torch.autograd.grad((out, lse), wanted, upstream)
    expected_gradients = torch.autograd.grad(
        (expected, expected_lse), wanted, upstream, allow_unused=True, materialize_grads=True
    )
    for gradient, right in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("transform", ["compile", "grad", "vmap"])
def test_self_attention_needs_no_alignment_where_values_are_not_known(transform):
    query, lengths = torch.randn(10, 4, 8), torch.tensor([0, 4, 10])

    def attend(query: Tensor) -> Tensor:
        return flashtile.attention_varlen(query, query, query, lengths, mask=masks.causal())

    if transform == "compile":
        found = torch.compile(attend, backend="aot_eager", fullgraph=True)(query)
    elif transform == "vmap":
        found = torch.func.vmap(attend)(query[None])[0]
    else:
        gradient = torch.func.grad(lambda q: attend(q).square().sum())(query)
        leaf = query.clone().requires_grad_()
        assert torch.equal(gradient, torch.autograd.grad(attend(leaf).square().sum(), leaf)[0])
        return
    assert torch.equal(found, attend(query))


def test_a_bound_is_the_size_of_a_plane_in_a_compiled_graph_too():
    query, _, _ = inputs([4, 6], [])
    bias = torch.randn(8, 8)

    def attend(query: Tensor, lengths: Tensor) -> Tensor:
        return flashtile.attention_varlen(
            query, query, query, lengths, bias=bias, max_seqlen_q=8, max_seqlen_k=8
        )

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(*(function(query, torch.tensor([0, 4, 10])) for function in (compiled, attend)))


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_lazily_negated_tensors(name):
    shape = (3, 20) if name == "bias" else (4,)
    negated = torch.randn(shape, dtype=torch.cfloat).conj().imag
    assert negated.is_neg()
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 20, 8)
    found, expected = (
        flashtile.attention_kvcache(query, cache, cache, **{name: t}) for t in (negated, negated + 0)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("page", [2**32, 2**32 + 1, -(2**32), 2**31])
def test_pages_that_int32_cannot_hold(page):
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 4, 8)
    table = torch.tensor([[page, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"block_table must hold pages in 0\.\.1"):
        flashtile.attention_kvcache(query, cache, cache, block_table=table)
    # Entries behind the last key are not looked at.
    out = flashtile.attention_kvcache(
        query, cache, cache, block_table=torch.tensor([[0, page], [1, 0]]), cache_lengths=[4, 8]
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_pages_refuse_every_gradient(name):
    pages, tensor = torch.randn(3, 4, 2, 8), torch.zeros((6, 7) if name == "bias" else 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="attention_varlen with block_table has no gradient"):
        flashtile.attention_varlen(
            torch.randn(10, 4, 8), pages, pages, [0, 4, 10], [0, 7, 10], block_table=[[0, 1], [2, 2]],
            **{name: tensor},
        )  # fmt: skip


def test_rotary_refuses_a_gradient():
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 20, 8)
    cos = torch.rand(20, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="attention_kvcache has no gradient"):
        flashtile.attention_kvcache(query, cache, cache, rotary_cos=cos, rotary_sin=cos.detach())


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes", "key"])
def test_what_is_no_tensor(name):
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 20, 8)
    others = {"value": cache, "cache_lengths": 3} if name == "key" else {}
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got float"):
        flashtile.attention_kvcache(query, cache, cache, **{name: 0.5}, **others)


def test_lengths_with_gaps_in_memory_warn_of_nothing():
    query, key, value = inputs([4, 6], [7, 5])
    lengths = torch.tensor([0, -1, 4, -1, 10, -1])[::2]
    torch.set_warn_always(True)
    try:
        found = flashtile.attention_varlen(query, key, value, lengths, [0, 7, 12], mask=BOTTOM_RIGHT)
    finally:
        torch.set_warn_always(False)
    expected = flashtile.attention_varlen(query, key, value, [0, 4, 10], [0, 7, 12], mask=BOTTOM_RIGHT)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("paged", [False, True])
def test_append_under_vmap(paged):
    queries, new = torch.randn(2, 2, 4, 1, 8), torch.randn(2, 2, 2, 1, 8)
    table = torch.tensor([[0, 1], [3, 2]]) if paged else None
    shape = (2, 4, 2, 5, 8) if paged else (2, 2, 2, 10, 8)

    def step(query: Tensor, cache: Tensor, new: Tensor) -> Tensor:
        return flashtile.attention_kvcache(
            query, cache, cache, key=new, value=new, cache_lengths=[3, 6], block_table=table
        )

    mapped = torch.randn(shape)
    alone = mapped.clone()
    out = torch.func.vmap(step)(queries, mapped, new)
    for index in range(2):
        assert torch.equal(out[index], step(queries[index], alone[index], new[index]))
    assert torch.equal(mapped, alone)


def test_vmap_over_lengths():
    tensors = inputs([3, 5], [4, 6])
    cu_q, cu_k = torch.tensor([[0, 3, 8], [0, 5, 8]]), torch.tensor([[0, 4, 10], [0, 6, 10]])
    out = torch.func.vmap(lambda a, b: flashtile.attention_varlen(*tensors, a, b))(cu_q, cu_k)
    for index in range(2):
        assert torch.equal(out[index], flashtile.attention_varlen(*tensors, cu_q[index], cu_k[index]))


def test_export_with_other_lengths_and_another_number_of_sequences():
    class Module(torch.nn.Module):
        def forward(self, query, key, value, cu_q, cu_k):
            return flashtile.attention_varlen(query, key, value, cu_q, cu_k, mask=BOTTOM_RIGHT)

    queries, keys, ends = (torch.export.Dim(name, min=3, max=10**6) for name in ("queries", "keys", "ends"))
    shapes = ({0: queries}, {0: keys}, {0: keys}, {0: ends}, {0: ends})
    example = *inputs([3, 5], [4, 6]), starts([3, 5]), starts([4, 6])
    exported = torch.export.export(Module(), example, dynamic_shapes=shapes).module()
    other = *inputs([1, 9, 0, 7], [3, 9, 4, 8]), starts([1, 9, 0, 7]), starts([3, 9, 4, 8])
    assert torch.equal(exported(*other), Module()(*other))


def test_order_in_the_pack_does_not_change_bits():
    lengths = [(1, 300), (9, 1100), (70, 70), (8, 2049), (0, 5), (130, 1)]
    parts = [inputs([queries], [keys]) for queries, keys in lengths]

    def results(order: list[int]) -> dict[int, list[Tensor]]:
        leaves = [torch.cat([parts[i][t] for i in order]).requires_grad_() for t in range(3)]
        queries, keys = ([lengths[i][t] for i in order] for t in range(2))
        out = flashtile.attention_varlen(*leaves, starts(queries), starts(keys), mask=BOTTOM_RIGHT)
        found = [out, *torch.autograd.grad(out, leaves, leaves[0].detach())]
        split = [t.split(n) for t, n in zip(found, (queries, queries, keys, keys), strict=True)]
        return {i: [t[place] for t in split] for place, i in enumerate(order)}

    expected = results(list(range(6)))
    for order in ([5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]):
        for i, tensors in results(order).items():
            assert all(map(torch.equal, tensors, expected[i]))


def test_many_python_threads_with_a_shared_bias():
    """Tasks that wait for each other's turn, from several calls at once."""
    queries, keys = [300, 0, 9, 70, 1], [300, 700, 1, 70, 1100]
    leaves = [t.requires_grad_() for t in (*inputs(queries, keys), torch.randn(1, 1, 300, 1100))]
    found: list[list[Tensor]] = []

    def work() -> None:
        out = flashtile.attention_varlen(*leaves[:3], starts(queries), starts(keys), bias=leaves[3])
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])

    torch.set_num_threads(3)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for results in found:
        assert all(map(torch.equal, results, found[0]))


def test_more_keys_than_int32_counts():
    """Of another sequence, in an expanded tensor that takes no memory."""
    many = 2**31 + 5
    key, query = torch.randn(1, 1, 8).expand(many + 3, 1, 8), torch.randn(3, 1, 8)
    for mask in (None, BOTTOM_RIGHT):
        out = flashtile.attention_varlen(query, key, key, [0, 0, 3], [0, many, many + 3], mask=mask)
        torch.testing.assert_close(out, key[:3])
