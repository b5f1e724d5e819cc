"""Packed sequences: the bits that each sequence gets alone, gradients against the oracle, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks, reference
from flashtile.cpu import engine, plans, workers
from flashtile.cpu.call import describe
from flashtile.cpu.gemm import COLUMNS
from flashtile.cpu.ragged import Sequences, in_rounds, schedule
from tests.packing import packed, packed_problem

BOTTOM_RIGHT = masks.causal(alignment="bottom-right")
# Few queries and many keys (decoded, in one split and in several), tiles of rows, nothing on either side.
QUERIES = (5, 0, 70, 1, 130, 9, 8)
KEYS = (7, 3, 65, 0, 300, 1100, 1100)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": BOTTOM_RIGHT},
    "top-left": {"mask": masks.causal(alignment="top-left")},
    "window": {"mask": masks.window(20, 4, alignment="bottom-right")},
    "chunks": {"mask": masks.chunks(16, alignment="bottom-right") & BOTTOM_RIGHT},
    "softcap": {"softcap": 3.0, "scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 4.0, 0.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
    "bias": {"bias": torch.randn(1, 4, max(QUERIES), max(KEYS))},
    "bias of a key": {"bias": torch.randn(1, 1, 1, max(KEYS)), "mask": BOTTOM_RIGHT},
    "dense": {"mask": torch.rand(4, max(QUERIES), max(KEYS)) < 0.7},
}


def one_sequence(tensors: tuple[Tensor, ...], cu_q: Tensor, cu_k: Tensor, b: int) -> list[Tensor]:
    """(1, H, L, D) of one sequence; the first tensor lies as query does, the others as key does."""
    rows = [slice(*cu_q[b : b + 2].tolist())] + [slice(*cu_k[b : b + 2].tolist())] * (len(tensors) - 1)
    return [t[own].transpose(0, 1)[None] for t, own in zip(tensors, rows, strict=True)]


def cut(options: dict[str, Any], queries: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """The options of one sequence: planes cut to its lengths, floats in the call's dtype."""
    own = {}
    for name, option in options.items():
        if isinstance(option, Tensor) and name in ("mask", "bias"):
            option = option[..., : queries if option.shape[-2] > 1 else 1, :keys]
        own[name] = option.to(dtype) if name == "bias" else option
    return own


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_sequence_gets_the_bits_it_gets_alone(options, dtype):
    query, key, value, cu_q, cu_k = packed(QUERIES, KEYS, dtype=dtype, value_head_dim=24)
    whole = cut(options, max(QUERIES), max(KEYS), dtype)
    out, lse = flashtile.attention_varlen(query, key, value, cu_q, cu_k, **whole, return_lse=True)
    for b, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        own = one_sequence((query, key, value), cu_q, cu_k, b)
        expected, expected_lse = flashtile.attention(
            *own, **cut(options, queries, keys, dtype), return_lse=True
        )
        rows = slice(*cu_q[b : b + 2].tolist())
        assert torch.equal(out[rows].transpose(0, 1), expected[0])
        assert torch.equal(lse[:, rows], expected_lse[0])
    assert out[cu_q[-1] :].eq(0).all()
    assert lse[:, cu_q[-1] :].eq(-torch.inf).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_a_sequence_are_the_bits_it_gets_alone(options):
    query, key, value, cu_q, cu_k = packed(QUERIES, KEYS, requires_grad=True)
    out, lse = flashtile.attention_varlen(query, key, value, cu_q, cu_k, **options, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (query, key, value), (grad_out, grad_lse))
    for b, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        own = one_sequence((query, key, value), cu_q, cu_k, b)
        results = flashtile.attention(*own, **cut(options, queries, keys, torch.float32), return_lse=True)
        rows = slice(*cu_q[b : b + 2].tolist())
        upstream = grad_out[rows].transpose(0, 1)[None], grad_lse[None, :, rows]
        expected = torch.autograd.grad(results, own, upstream)
        for gradient, alone in zip(one_sequence(found, cu_q, cu_k, b), expected, strict=True):
            assert torch.equal(gradient, alone)
    for gradient, end in zip(found, (cu_q[-1], cu_k[-1], cu_k[-1]), strict=True):
        assert gradient[end:].eq(0).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (7, 1), (7, 4)], ids=str)
def test_shared_gradients_and_dropout_against_the_oracle(shape):
    """What sequences share is summed over all of them: a bias, slopes, sinks; dropout numbers them."""
    query, key, value, cu_q, cu_k = packed(QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(*shape, max(QUERIES), max(KEYS), dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(shape[0], 4, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = (query, key, value, bias, slopes, sinks)
    out, lse = flashtile.attention_varlen(
        query, key, value, cu_q, cu_k, mask=BOTTOM_RIGHT, bias=bias, alibi_slopes=slopes, sinks=sinks,
        dropout_p=0.3, seed=5, return_lse=True,
    )  # fmt: skip
    problem = packed_problem(
        query, key, value, cu_q, cu_k, BOTTOM_RIGHT, bias=bias, alibi_slopes=slopes, sinks=sinks,
        dropout_p=0.3, seed=5,
    )  # fmt: skip
    exact, exact_lse = (tensor[0] for tensor in reference.attention(problem))
    torch.testing.assert_close(out, exact.transpose(0, 1))
    torch.testing.assert_close(lse, exact_lse)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
    expected = torch.autograd.grad((exact.transpose(0, 1), exact_lse), leaves, (grad_out, grad_lse))
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bias_shape", [(1, 1, 1, 1), (3, 2, 1, 6), (1, 2, 4, 1), (1, 1, 4, 6)], ids=str)
def test_gradcheck(bias_shape):
    inputs = packed(
        (3, 0, 4), (5, 2, 6), heads=2, kv_heads=1, head_dim=3, value_head_dim=2, dtype=torch.float64
    )
    bias = torch.randn(bias_shape, dtype=torch.float64)
    slopes, sinks = torch.rand(2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (*inputs[:3], bias, slopes, sinks)]

    def function(query, key, value, bias, slopes, sinks):
        out, lse = flashtile.attention_varlen(
            query, key, value, *inputs[3:], mask=BOTTOM_RIGHT, bias=bias, alibi_slopes=slopes, sinks=sinks,
            softcap=2.0, return_lse=True,
        )  # fmt: skip
        return out, lse[:, : inputs[3][-1]]

    assert torch.autograd.gradcheck(function, leaves)


def test_second_derivative():
    inputs = packed((3, 2), (4, 2), heads=2, kv_heads=1, head_dim=2, value_head_dim=2, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
    assert torch.autograd.gradgradcheck(
        lambda *qkv: flashtile.attention_varlen(*qkv, *inputs[3:], mask=BOTTOM_RIGHT), leaves
    )


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (14, 2), (71, 1)], ids=str)
def test_bits_do_not_depend_on_threads(heads, threads, monkeypatch):
    """Groups of heads that do not divide a tile share rows of the bias between two tiles."""
    monkeypatch.setattr(workers, "_INLINE_FLOPS", 0.0)  # several threads, however small the work
    query, key, value, cu_q, cu_k = packed(
        QUERIES, KEYS, heads=heads[0], kv_heads=heads[1], requires_grad=True
    )
    bias = torch.randn(1, 1, max(QUERIES), max(KEYS), requires_grad=True)

    def results() -> list[Tensor]:
        out = flashtile.attention_varlen(query, key, value, cu_q, cu_k, bias=bias)
        return [out, *torch.autograd.grad(out, (query, key, value, bias), query.detach())]

    torch.set_num_threads(1)
    expected = results()
    torch.set_num_threads(threads)
    assert all(map(torch.equal, results(), expected))


@pytest.mark.parametrize("round_bytes", [0, 40_000])
def test_rounds_of_the_backward_pass_leave_the_bits(round_bytes, monkeypatch):
    """Sequence after sequence, or a few at a time, instead of all at once."""
    monkeypatch.setattr(workers, "_INLINE_FLOPS", 0.0)
    query, key, value, cu_q, cu_k = packed(QUERIES, KEYS, requires_grad=True)
    bias = torch.randn(1, 1, max(QUERIES), max(KEYS), requires_grad=True)
    slopes = torch.rand(7, 4, requires_grad=True)
    leaves = (query, key, value, bias, slopes)
    out = flashtile.attention_varlen(query, key, value, cu_q, cu_k, bias=bias, alibi_slopes=slopes)
    together = torch.autograd.grad(out, leaves, query.detach(), retain_graph=True)
    monkeypatch.setattr(engine, "_ROUND_BYTES", round_bytes)
    in_rounds = torch.autograd.grad(out, leaves, query.detach())
    assert all(map(torch.equal, in_rounds, together))


def test_memory_for_a_round_is_all_there_is(monkeypatch):
    """Of 300 sequences with a tile of dQ for each of 2 key heads."""
    query, key, value, cu_q, cu_k = packed((3,) * 300, (3,) * 300, head_dim=16)
    problem = packed_problem(query, key, value, cu_q, cu_k)
    kind, call = plans.KINDS[torch.float32], describe(problem)
    tile_bytes = 16 * COLUMNS * kind.lanes * 4
    monkeypatch.setattr(engine, "_ROUND_BYTES", 100 * tile_bytes)
    extent = engine._extent(problem, kind, call, 512)
    assert (extent.places, extent.tasks, len(extent.rounds)) == (100, 100, 6)


def test_rounds_take_so_many_places_at_most():
    """A sequence takes a whole tile of dQ for every head, but only while its round is running."""
    tiles = np.array([1, 2, 0, 9, 1, 1, 1])
    splits = np.array([1, 1, 2, 3, 1, 1, 1])
    sequences = Sequences(np.zeros((7, 5), np.int64), queries=tiles * 64, keys=splits * 512)
    plan = schedule(sequences, 2 * splits, tiles, splits, 2 * tiles)
    rounds = in_rounds(plan, most=6)
    # Those with the most keys first: 3, 2, then 0, 1, 4, 5, 6.
    assert [one.table[:, 1].tolist() for one in rounds] == [[3], [2, 0, 1], [4, 5, 6]]
    assert [one.places for one in rounds] == [18, 6, 6]
    assert [one.tasks for one in rounds] == [6, 8, 6]
    assert [one.table[:, 0].tolist() for one in rounds] == [[0], [0, 4, 6], [0, 2, 4]]
    assert [one.table[:, 4].tolist() for one in rounds] == [[0], [0, 0, 2], [0, 2, 4]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_the_bits_it_gets_alone(dtype):
    query, key, value, cu_q, cu_k = packed((70, 3), (65, 600), head_dim=9, dtype=dtype, requires_grad=True)
    out = flashtile.attention_varlen(query, key, value, cu_q, cu_k, mask=BOTTOM_RIGHT)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, key, value), upstream)
    for b in range(2):
        own = one_sequence((query, key, value), cu_q, cu_k, b)
        rows = slice(*cu_q[b : b + 2].tolist())
        alone = flashtile.attention(*own, mask=BOTTOM_RIGHT)
        expected = torch.autograd.grad(alone, own, upstream[rows].transpose(0, 1)[None])
        assert all(map(torch.equal, one_sequence(found, cu_q, cu_k, b), expected))


def test_rows_whose_lse_cannot_tell_their_keys():
    """A bias of -1e10 on every key, in a decoded and in a tiled sequence: their sums are kept apart."""
    query, key, value, cu_q, cu_k = packed((70, 3), (65, 1100), requires_grad=True)
    bias = torch.full((1, 1, 1, 1100), -1e10)
    out = flashtile.attention_varlen(query, key, value, cu_q, cu_k, bias=bias)
    (found,) = torch.autograd.grad(out, value, out.detach())
    # The scores are lost in such a bias, so that every key weighs the same.
    for rows, keys in ((slice(0, 70), slice(0, 65)), (slice(70, 73), slice(65, 1165))):
        mean = value[keys].mean(0).repeat_interleave(2, 0)
        torch.testing.assert_close(out[rows], mean.expand_as(out[rows]))
        share = out[rows].detach().sum(0).unflatten(0, (2, 2)).sum(1) / (keys.stop - keys.start)
        torch.testing.assert_close(found[keys], share.expand_as(found[keys]))


def test_planes_as_large_as_the_given_bounds():
    query, key, value, cu_q, cu_k = packed((3, 5), (6, 2))
    bias = torch.randn(1, 4, 8, 9, requires_grad=True)
    bounded = {"max_seqlen_q": 8, "max_seqlen_k": 9}
    out = flashtile.attention_varlen(query, key, value, cu_q, cu_k, bias=bias, **bounded)
    cut_bias = bias[..., :5, :6]
    expected = flashtile.attention_varlen(query, key, value, cu_q, cu_k, bias=cut_bias)
    assert torch.equal(out, expected)
    gradients = (torch.autograd.grad(o.square().sum(), bias)[0] for o in (out, expected))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("transform", ["compile", "vmap", "grad"])
def test_plain_causal_needs_no_alignment_where_keys_are_the_queries_own(transform):
    query, key, value, cu_q, _ = packed((3, 5), (3, 5), rest=0)

    def call(query: Tensor) -> Tensor:
        return flashtile.attention_varlen(query, key, value, cu_q, mask=masks.causal())

    expected = call(query)
    if transform == "compile":
        assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(query), expected)
    elif transform == "vmap":
        assert torch.equal(torch.func.vmap(call)(query[None])[0], expected)
    else:
        assert torch.func.grad(lambda q: call(q).sum())(query).shape == query.shape


def test_parts_over_disjoint_keys_merge():
    query, key, value, cu_q, cu_k = packed((3, 5), (6, 8), rest=0)
    whole = flashtile.attention_varlen(query, key, value, cu_q, cu_k)
    parts = [
        flashtile.attention_varlen(query, key, value, cu_q, cu_k, mask=masks.key_range(*run), return_lse=True)
        for run in ((0, 2), ([2, 2], [6, 8]))
    ]
    merged, _ = flashtile.merge([out for out, _ in parts], [lse.mT for _, lse in parts])
    torch.testing.assert_close(merged, whole)


def test_lengths_as_lists_int32_and_self_attention():
    query, key, value, cu_q, _ = packed((3, 60, 0, 9), (3, 60, 0, 9))
    expected = flashtile.attention_varlen(query, key, value, cu_q, cu_q, mask=masks.causal())
    for given in (cu_q.tolist(), cu_q.int(), cu_q):
        out = flashtile.attention_varlen(
            query, key, value, given, mask=masks.causal(), max_seqlen_q=60, max_seqlen_k=99
        )
        assert torch.equal(out, expected)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 0, 0]], ids=str)
def test_no_sequence_or_only_empty_ones(lengths):
    query, key, value, *_ = packed((), (), rest=4, requires_grad=True)
    out, lse = flashtile.attention_varlen(query, key, value, lengths, mask=masks.causal(), return_lse=True)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    out.sum().backward()
    assert all(tensor.grad.eq(0).all() for tensor in (query, key, value))


def test_no_rows_at_all():
    query, key, value, *_ = packed((), (), rest=0)
    assert flashtile.attention_varlen(query, key, value, [0, 0]).shape == (0, 4, 16)


def test_values_per_sequence_per_query_and_per_key():
    """key_lengths is per sequence, key_range may be per packed query, documents have ids as the keys lie."""
    queries, keys = (4, 6), (5, 9)
    query, key, value, cu_q, cu_k = packed(queries, keys, rest=0)
    first = torch.tensor([0, 1, 0, 2, 3, 0, 1, 4, 4, 0])
    ids = torch.tensor([0] * 2 + [1] * 3 + [2] * 5 + [3] * 4)
    query_ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3, 0])
    mask = masks.key_lengths([4, 8]) & masks.key_range(first[None], 5) & masks.documents(ids, query_ids)
    out = flashtile.attention_varlen(query, key, value, cu_q, cu_k, mask=mask)
    for b in range(2):
        rows, columns = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        j = torch.arange(keys[b])
        visible = (j < (4, 8)[b]) & (first[rows, None] <= j) & (j < 5)
        visible &= query_ids[rows, None] == ids[columns]
        own = one_sequence((query, key, value), cu_q, cu_k, b)
        torch.testing.assert_close(out[rows].transpose(0, 1), flashtile.attention(*own, mask=visible)[0])


def test_strided_views_of_one_tensor():
    """Packed qkv (T, 3, H, D), and D not the last dimension in memory."""
    qkv = torch.randn(50, 3, 4, 16)
    lengths = [0, 20, 50]
    expected = flashtile.attention_varlen(*(t.contiguous() for t in qkv.unbind(1)), lengths)
    assert torch.equal(flashtile.attention_varlen(*qkv.unbind(1), lengths), expected)
    turned = [t.permute(2, 1, 0).contiguous().permute(2, 1, 0) for t in qkv.unbind(1)]
    assert torch.equal(flashtile.attention_varlen(*turned, lengths), expected)


def test_a_nan_stays_in_its_sequence():
    query, key, value, cu_q, _ = packed((70, 33), (70, 33), rest=2, requires_grad=True)
    with torch.no_grad():
        for tensor in (query, key, value):
            tensor[-2:] = torch.nan  # belongs to no sequence
        value[75] = torch.nan
    out = flashtile.attention_varlen(query, key, value, cu_q, mask=masks.causal())
    assert out[:75].isfinite().all()
    assert out[75:103].isnan().all()
    assert out[103:].eq(0).all()
    out[:70].sum().backward()
    assert query.grad[:70].isfinite().all()
    assert key.grad[:70].isfinite().all()
    assert all(tensor.grad[103:].eq(0).all() for tensor in (query, key, value))


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_pages(page_size):
    query, key, value, cu_q, cu_k = packed(QUERIES, KEYS, rest=0)
    pages = [-(-length // page_size) for length in KEYS]
    table = torch.full((len(KEYS), max(pages)), -7, dtype=torch.int32)
    places = torch.randperm(sum(pages) + 2)
    cache = [torch.full((sum(pages) + 2, page_size, 2, 16), torch.nan) for _ in range(2)]
    used = 0
    for b, count in enumerate(pages):
        table[b, :count] = places[used : used + count]
        used += count
        for kept, tensor in zip(cache, (key, value), strict=True):
            own = tensor[cu_k[b] : cu_k[b + 1]]
            for p in range(count):
                part = own[p * page_size : (p + 1) * page_size]
                kept[table[b, p], : len(part)] = part
    bias = torch.randn(1, 4, max(QUERIES), max(KEYS))  # of the longest sequence, not of all places in pages
    for options in ({"mask": BOTTOM_RIGHT}, {"bias": bias}, {"mask": bias > 0}):
        out = flashtile.attention_varlen(query, *cache, cu_q, cu_k, block_table=table, **options)
        assert torch.equal(out, flashtile.attention_varlen(query, key, value, cu_q, cu_k, **options))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic):
    def function(query, key, value, cu_q, cu_k):
        return flashtile.attention_varlen(query, key, value, cu_q, cu_k, mask=BOTTOM_RIGHT)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for queries, keys in (((3, 17), (5, 20)), ((8, 0, 2), (8, 4, 9))):
        query, key, value, cu_q, cu_k = packed(queries, keys, requires_grad=True)
        found, expected = (f(query, key, value, cu_q, cu_k) for f in (compiled, function))
        assert torch.equal(found, expected)
        gradients = (
            torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (found, expected)
        )
        assert all(map(torch.equal, *gradients))


def test_a_compiled_graph_checks_values_when_it_runs():
    compiled = torch.compile(flashtile.attention_varlen, backend="aot_eager", fullgraph=True)
    query, key, value, cu_q, _ = packed((3, 4), (3, 4))
    compiled(query, key, value, cu_q)
    with pytest.raises(ValueError, match="cu_seqlens_q must end at most at the number of rows, 10, got 11"):
        compiled(query, key, value, cu_q + torch.tensor([0, 0, 4]))


def test_autocast():
    query, key, value, cu_q, _ = packed((3, 40), (3, 40))
    with torch.autocast("cpu", torch.bfloat16):
        out = flashtile.attention_varlen(query, key, value, cu_q)
    expected = flashtile.attention_varlen(query.bfloat16(), key.bfloat16(), value.bfloat16(), cu_q)
    assert torch.equal(out, expected)


def test_vmap():
    query, key, value, cu_q, _ = packed((3, 5), (3, 5), rest=0)
    stacked = torch.stack([query, 2 * query])
    out = torch.func.vmap(lambda q: flashtile.attention_varlen(q, key, value, cu_q))(stacked)
    assert torch.equal(out[1], flashtile.attention_varlen(2 * query, key, value, cu_q))


Q = torch.randn(10, 4, 8)
K = torch.randn(12, 2, 8)
REFUSALS = [
    ({"query": Q[None]}, ValueError, r"query must be \(total, heads, head_dim\), got shape \(1, 10, 4, 8\)"),
    ({"key": K.double()}, TypeError, "key must have the dtype of query, torch.float32, got torch.float64"),
    ({"key": K[..., :7]}, ValueError, r"key must have the head_dim of query, 8, got shape \(12, 2, 7\)"),
    ({"value": K[:11]}, ValueError, r"value must have all sizes of key but the last, \(12, 2\)"),
    ({"key": Q[:, :3], "value": Q[:, :3]}, ValueError, "heads that divides query's 4"),
    ({"cu_seqlens_q": [1, 10]}, ValueError, r"cu_seqlens_q must start at 0, got \[1, 10\]"),
    ({"cu_seqlens_q": [0, 5, 3]}, ValueError, r"cu_seqlens_q must not decrease, got \[0, 5, 3\]"),
    (
        {"cu_seqlens_q": [0, 3, 11]},
        ValueError,
        "cu_seqlens_q must end at most at the number of rows, 10, got 11$",
    ),
    (
        {name: Q.transpose(0, 1) for name in ("query", "key", "value")} | {"cu_seqlens_k": None},
        ValueError,
        r"the number of rows, 4, got 10; rows come first, then heads: pass tensor.transpose\(0, 1\)$",
    ),
    (
        {name: K.transpose(0, 1) for name in ("key", "value")},
        ValueError,
        r"\(2, 12, 8\); if dimension 1 of these tensors is the length, pass tensor.transpose\(0, 1\)$",
    ),
    ({"causal": True}, TypeError, r"^attention_varlen\(\) got .* 'causal'; say mask=masks.causal\(\)$"),
    ({"alibi_slope": 1.0}, TypeError, r"'alibi_slope'; did you mean alibi_slopes\?$"),
    (
        {"query": torch.nested.nested_tensor([Q, Q], layout=torch.jagged)},
        TypeError,
        "query must be a dense tensor, got a nested one",
    ),
    (
        {"cu_seqlens_k": [0, 3, 13]},
        ValueError,
        "cu_seqlens_k must end at most at the number of rows, 12, got 13",
    ),
    ({"cu_seqlens_k": [0, 12]}, ValueError, "cu_seqlens_k must have the length of cu_seqlens_q, 3, got 2"),
    (
        {"cu_seqlens_k": None},
        ValueError,
        "key must have as many rows as query, 10, without cu_seqlens_k, got 12",
    ),
    ({"cu_seqlens_q": []}, ValueError, "cu_seqlens_q must hold 0 and the end of every sequence"),
    ({"cu_seqlens_q": [[0, 1]]}, ValueError, r"cu_seqlens_q must have 1 dimension\(s\), got shape \(1, 2\)"),
    ({"cu_seqlens_q": [0.0, 4.0, 5.0]}, TypeError, "cu_seqlens_q must have the dtype int32 or int64"),
    ({"cu_seqlens_q": 4}, TypeError, "cu_seqlens_q must be a tensor or a list of integers, got int"),
    ({"max_seqlen_q": 5}, ValueError, "max_seqlen_q must be at least the longest sequence, 6, got 5"),
    ({"max_seqlen_k": 7.0}, TypeError, "max_seqlen_k must be an int, got float"),
    ({"mask": masks.causal()}, ValueError, "causal needs an alignment where lengths differ"),
    ({"mask": torch.ones(5, 7, dtype=torch.bool)}, ValueError, r"mask must broadcast to .* = \(2, 4, 6, 7\)"),
    ({"mask": masks.key_lengths([3, 4, 5])}, ValueError, "key_lengths: the batch dimension must be 2 or 1"),
    ({"mask": masks.key_lengths([6, 7])}, ValueError, "values must be in 0..the number of keys, got"),
    ({"mask": masks.documents([0] * 9)}, ValueError, "documents needs query_ids where lengths differ"),
    ({"bias": torch.randn(6, 8)}, ValueError, r"bias must broadcast to .* = \(2, 4, 6, 7\)"),
    ({"alibi_slopes": torch.rand(3, 4)}, ValueError, r"alibi_slopes must have shape .* \(2, 4\)"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    ({"block_table": [[0], [1]]}, ValueError, r"key must be \(pages, page_size, heads, head_dim\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS)
def test_refusals(changes, error, message):
    arguments = {"query": Q, "key": K, "value": K, "cu_seqlens_q": [0, 4, 10], "cu_seqlens_k": [0, 7, 12]}
    with pytest.raises(error, match=message):
        flashtile.attention_varlen(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": [[0, 3], [1, 2]]}, r"block_table must hold pages in 0\.\.2, got 3 at \[0, 1\]"),
        ({"block_table": [[0, 1]]}, r"block_table must have one row per sequence, 2, got shape \(1, 2\)"),
        ({"block_table": [[0], [1]]}, r"cu_seqlens_k must be in 0\.\.4, the places that block_table has"),
    ],
)
def test_refused_pages(changes, message):
    pages = torch.randn(3, 4, 2, 8)
    with pytest.raises(ValueError, match=message):
        flashtile.attention_varlen(Q, pages, pages, [0, 4, 10], [0, 7, 10], **changes)


@pytest.mark.parametrize("trained", ["key", "bias"])
def test_pages_have_no_gradient(trained):
    inputs = {"key": torch.randn(3, 4, 2, 8), "bias": torch.randn(6, 7)}
    inputs[trained].requires_grad_()
    with pytest.raises(RuntimeError, match="attention_varlen with block_table has no gradient"):
        flashtile.attention_varlen(
            Q, value=inputs["key"], cu_seqlens_q=[0, 4, 10], cu_seqlens_k=[0, 7, 10],
            block_table=[[0, 1], [2, 2]], **inputs,
        )  # fmt: skip


def test_pages_need_their_lengths():
    pages = torch.randn(3, 4, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_k must say how many keys"):
        flashtile.attention_varlen(Q, pages, pages, [0, 4, 10], block_table=[[0, 1], [2, 2]])
