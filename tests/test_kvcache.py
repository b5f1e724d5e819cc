"""A cache of keys and values: contiguous or paged, appended to in place, the same bits as without a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks, reference, rotary
from flashtile.cpu import plans
from flashtile.problem import AttentionProblem
from tests.packing import into_pages

BOTTOM_RIGHT = masks.causal(alignment="bottom-right")
CAPACITY = 1296  # a multiple of every page size below
LENGTHS = (3, 1200, 517)  # before the append
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": BOTTOM_RIGHT},
    "window": {"mask": BOTTOM_RIGHT & masks.window(100, 0, alignment="bottom-right"), "softcap": 4.0},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 4.0, 0.0]), "mask": BOTTOM_RIGHT},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0]), "scale": 0.2},
    "bias": {"bias": torch.randn(3, 1, 1, CAPACITY), "mask": BOTTOM_RIGHT},
    "padding": {"left_padding": torch.tensor([2, 40, 0]), "mask": BOTTOM_RIGHT},
}


@dataclasses.dataclass
class Cache:
    """The same keys and values in a cache and in pages, with NaN where nothing has been written."""

    key: Tensor  # (3, Hkv, CAPACITY, D)
    value: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, kv_heads: int = 2, head_dim: int = 16, value_dim: int = 16, dtype=torch.float32) -> Cache:
        lengths = torch.tensor(LENGTHS)
        unused = (torch.arange(CAPACITY) >= lengths[:, None])[:, None, :, None]
        # (B, S, H, D) in memory, as flash-attn keeps its caches
        key, value = (
            torch.randn(3, CAPACITY, kv_heads, dim).to(dtype).transpose(1, 2).masked_fill(unused, torch.nan)
            for dim in (head_dim, value_dim)
        )
        return cls(key, value, lengths)

    def pages(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        return into_pages(size, self.key, self.value)  # type: ignore[return-value]


def alone(cache: Cache, b: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """What `attention` says of sequence b with its new keys behind the old ones."""
    length = int(cache.lengths[b])
    own_key = torch.cat((cache.key[b : b + 1, :, :length], key[b : b + 1]), 2)
    own_value = torch.cat((cache.value[b : b + 1, :, :length], value[b : b + 1]), 2)
    padding = options.pop("left_padding", None)
    if padding is not None:
        options["mask"] = options["mask"] & masks.key_starts(int(padding[b]))
    if "bias" in options:
        options["bias"] = options["bias"][b : b + 1, ..., : own_key.shape[2]].to(query.dtype)
    return flashtile.attention(query[b : b + 1], own_key, own_value, return_lse=True, **options)


def new_rows(rows: int, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (16, 16)) -> list[Tensor]:
    shapes = ((3, 4, rows, dims[0]), (3, 2, rows, dims[0]), (3, 2, rows, dims[1]))
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("page_size", [None, 1, 16, 48])
def test_every_sequence_gets_the_bits_it_gets_alone(page_size, rows, options):
    cache = Cache.random()
    query, key, value = new_rows(rows)
    places = {"cache_lengths": cache.lengths}
    if page_size is None:
        held = cache.key.clone(), cache.value.clone()
    else:
        *held, places["block_table"] = cache.pages(page_size)
    out, lse = flashtile.attention_kvcache(
        query, *held, key=key, value=value, **places, **options, return_lse=True
    )
    for b in range(3):
        expected, expected_lse = alone(cache, b, query, key, value, **options)
        assert torch.equal(out[b], expected[0])
        assert torch.equal(lse[b], expected_lse[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(16, 16), (9, 5), (40, 72)], ids=str)
def test_dtypes_and_head_dims(dtype, dims):
    cache = Cache.random(head_dim=dims[0], value_dim=dims[1], dtype=dtype)
    for rows in (2, 70):
        query, key, value = new_rows(rows, dtype, dims)
        *held, table = cache.pages(16)
        out = flashtile.attention_kvcache(
            query,
            *held,
            key=key,
            value=value,
            cache_lengths=cache.lengths,
            block_table=table,
            mask=BOTTOM_RIGHT,
        )
        for b in range(3):
            expected, _ = alone(cache, b, query, key, value, mask=BOTTOM_RIGHT)
            assert torch.equal(out[b], expected[0])


@pytest.mark.parametrize("page_size", [None, 16])
def test_against_the_oracle(page_size):
    cache = Cache.random(dtype=torch.float64)
    cache.key, cache.value = cache.key.nan_to_num(), cache.value.nan_to_num()  # the oracle multiplies them
    query = torch.randn(3, 4, 5, 16, dtype=torch.float64)
    held, places, fields = (cache.key, cache.value), {}, {}
    if page_size is not None:
        *held, table = cache.pages(page_size)
        held = [pages.nan_to_num() for pages in held]
        places, fields = {"block_table": table}, {"block_table": table}
    out, lse = flashtile.attention_kvcache(
        query, *held, cache_lengths=cache.lengths, **places, return_lse=True
    )
    problem = AttentionProblem(query, *held, 0.25, key_lengths=cache.lengths, **fields)
    exact, exact_lse = reference.attention(problem)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)


def test_append_writes_the_new_rows_and_nothing_else():
    cache = Cache.random()
    query, key, value = new_rows(4)
    held = cache.key.clone(), cache.value.clone()
    flashtile.attention_kvcache(query, *held, key=key, value=value, cache_lengths=cache.lengths)
    for after, before, new in zip(held, (cache.key, cache.value), (key, value), strict=True):
        expected = before.clone()
        for b, length in enumerate(LENGTHS):
            expected[b, :, length : length + 4] = new[b]
        assert torch.equal(after.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_append_to_pages(page_size):
    cache = Cache.random()
    query, key, value = new_rows(4)
    *held, table = cache.pages(page_size)
    before = [pages.clone() for pages in held]
    flashtile.attention_kvcache(
        query, *held, key=key, value=value, cache_lengths=cache.lengths, block_table=table
    )
    for after, pages, new in zip(held, before, (key, value), strict=True):
        for b, length in enumerate(LENGTHS):
            for t in range(4):
                page, offset = table[b, (length + t) // page_size], (length + t) % page_size
                pages[page, :, offset] = new[b, :, t]
        assert torch.equal(after.nan_to_num(7.0), pages.nan_to_num(7.0))


def test_batch_index():
    cache = Cache.random()
    query, key, value = new_rows(2)
    index = torch.tensor([4, 0, 2])
    entries = [torch.randn(6, 2, CAPACITY, 16) for _ in range(2)]
    for entry, own in zip(entries, (cache.key, cache.value), strict=True):
        entry[index] = own
    before = [entry.clone() for entry in entries]
    out = flashtile.attention_kvcache(
        query, *entries, key=key, value=value, cache_lengths=cache.lengths, batch_index=index
    )
    for b in range(3):
        assert torch.equal(out[b], alone(cache, b, query, key, value)[0][0])
    others = [1, 3, 5]
    assert all(torch.equal(new[others], old[others]) for new, old in zip(entries, before, strict=True))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary(interleaved, rotary_dim):
    """Rotated by their positions: query and new keys as if the sequence had been rotated as a whole."""
    cache = Cache.random(dtype=torch.float64)
    query, key, value = new_rows(3, torch.float64)
    angles = torch.arange(CAPACITY)[:, None].double() * 0.3 ** torch.arange(rotary_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    held = cache.key.clone(), cache.value.clone()
    out = flashtile.attention_kvcache(
        query, *held, key=key, value=value, cache_lengths=cache.lengths, rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=interleaved, mask=BOTTOM_RIGHT,
    )  # fmt: skip
    for b, length in enumerate(LENGTHS):
        turned = [turn_by_definition(t[b], angles[length : length + 3], interleaved) for t in (query, key)]
        torch.testing.assert_close(held[0][b, :, length : length + 3], turned[1])
        alone_query, alone_key = (t.expand(3, *t.shape) for t in turned)
        expected, _ = alone(cache, b, alone_query, alone_key, value, mask=BOTTOM_RIGHT)
        torch.testing.assert_close(out[b], expected[0])


def turn_by_definition(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """(H, L, D) turned pair by pair, as complex numbers."""
    half = angles.shape[1]
    first = torch.arange(half) * 2 if interleaved else torch.arange(half)
    second = first + 1 if interleaved else first + half
    turned = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles).to(
        torch.complex128
    )
    result = x.clone()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def test_rotary_keeps_the_dtype_and_does_not_write():
    x = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16)
    before, angles = x.clone(), torch.rand(5, 4)
    turned = rotary.apply(x, angles.cos(), angles.sin(), torch.arange(5)[None])
    assert turned.dtype == torch.bfloat16
    assert torch.equal(x, before)


def test_a_full_cache_and_one_length_for_all():
    query, cache = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 50, 16)
    full = flashtile.attention_kvcache(query, cache, cache)
    assert torch.equal(full, flashtile.attention(query, cache, cache))
    part = flashtile.attention_kvcache(query, cache, cache, cache_lengths=20)
    assert torch.equal(part, flashtile.attention(query, cache[:, :, :20], cache[:, :, :20]))


def test_empty_sequences_and_no_sequences():
    query, cache = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 50, 16)
    out, lse = flashtile.attention_kvcache(query, cache, cache, cache_lengths=[0, 9], return_lse=True)
    assert out[0].eq(0).all()
    assert lse[0].eq(-torch.inf).all()
    assert out[1].ne(0).any()
    assert flashtile.attention_kvcache(query[:0], cache[:0], cache[:0]).shape == (0, 4, 3, 16)
    assert flashtile.attention_kvcache(query[:, :, :0], cache, cache).shape == (2, 4, 0, 16)


def test_decoding_step_by_step_is_the_prefill():
    """Greedy use: a chunk of 9, then single tokens; every row is that of attention over the whole."""
    inputs = [torch.randn(1, heads, 14, 16) for heads in (4, 2, 2)]
    expected = flashtile.attention(*inputs, mask=masks.causal())
    held = torch.full((1, 2, 32, 16), torch.nan), torch.full((1, 2, 32, 16), torch.nan)
    start = 0
    for rows in (9, 1, 1, 2, 1):
        query, key, value = (t[:, :, start : start + rows] for t in inputs)
        out = flashtile.attention_kvcache(
            query, *held, key=key, value=value, cache_lengths=start, mask=masks.causal()
        )
        torch.testing.assert_close(out, expected[:, :, start : start + rows])
        start += rows


def test_bits_do_not_depend_on_the_batch_or_threads():
    cache = Cache.random()
    query, *_ = new_rows(1)
    torch.set_num_threads(2)
    whole = flashtile.attention_kvcache(query, cache.key, cache.value, cache_lengths=cache.lengths)
    torch.set_num_threads(1)
    for b in range(3):
        own = slice(b, b + 1)
        alone = flashtile.attention_kvcache(
            query[own], cache.key[own], cache.value[own], cache_lengths=cache.lengths[own]
        )
        assert torch.equal(whole[own], alone)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("page_size", [None, 16])
def test_one_length_for_all_gets_the_bits_of_lengths_that_differ(page_size, rows, monkeypatch):
    """Plans of the former are remembered: the next call has other lengths, or its pages are elsewhere."""
    monkeypatch.setattr(plans, "_plans", {})
    query, *_ = new_rows(rows)
    kept = []  # what is freed could come again at the same address
    for length, remembered in ((1200, 1), (1100, 2), (1200, 2)):
        cache = dataclasses.replace(Cache.random(), lengths=torch.full((3,), length))
        cache.key[:], cache.value[:] = torch.randn(2, *cache.key.shape)
        held, places = [cache.key, cache.value], {}
        if page_size is not None:
            *held, places["block_table"] = cache.pages(page_size)
        kept.append((held, places))
        whole = flashtile.attention_kvcache(query, *held, cache_lengths=cache.lengths, **places)
        assert len(plans._plans) == remembered
        differing = torch.tensor([length, 3, length])
        among_others = flashtile.attention_kvcache(query, *held, cache_lengths=differing, **places)
        assert torch.equal(whole[0], among_others[0])
        assert torch.equal(whole[2], among_others[2])
        with monkeypatch.context() as patch:
            patch.setattr(plans, "_plans", {})
            expected = flashtile.attention(query, cache.key[:, :, :length], cache.value[:, :, :length])
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("paged", [False, True])
def test_compiles_without_graph_breaks(paged):
    def step(query, key_cache, value_cache, key, value, lengths, table):
        return flashtile.attention_kvcache(
            query, key_cache, value_cache, key=key, value=value, cache_lengths=lengths, block_table=table,
            mask=BOTTOM_RIGHT,
        )  # fmt: skip

    cache = Cache.random()
    *held, table = cache.pages(16) if paged else (cache.key, cache.value, None)
    query, key, value = new_rows(1)
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        own = [t.clone() for t in held]
        out = function(query, *own, key, value, cache.lengths, table)
        results.append([out, *(t.nan_to_num(7.0) for t in own)])
    assert all(map(torch.equal, *results))


def test_a_prompt_in_chunks_with_padding_and_prefix_it_has_yet_to_fill():
    """A first chunk of 3 tokens of a prompt whose padding is 5 wide: nothing is visible yet, all fits."""
    inputs = [torch.randn(2, heads, 12, 8) for heads in (4, 2, 2)]
    padding = torch.tensor([5, 0])
    mask = masks.prefix(7) & masks.key_starts(padding)
    expected = flashtile.attention(*inputs, mask=mask)
    held = torch.zeros(2, 2, 20, 8), torch.zeros(2, 2, 20, 8)
    parts = []
    for start in (0, 3, 6, 9):
        query, key, value = (tensor[:, :, start : start + 3] for tensor in inputs)
        parts.append(
            flashtile.attention_kvcache(
                query, *held, key=key, value=value, cache_lengths=start, left_padding=padding,
                mask=masks.prefix(7),
            )
        )  # fmt: skip
    # The first two chunks could not see the whole prefix, which came later.
    torch.testing.assert_close(torch.cat(parts[2:], 2), expected[:, :, 6:])
    assert parts[0][0].eq(0).all()


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(alignment="top-left"),
        masks.chunks(64),
        masks.prefix([2, 100, 50]),
        masks.key_range([0, 20, 3], [3, 900, 400]),
        masks.documents(torch.arange(CAPACITY) // 100, torch.tensor([0, 2, 2])),
        masks.key_lengths(400) & masks.window(200, 0),
    ],
    ids=repr,
)
def test_masks_by_definition(mask):
    """Each sequence's rows of the mask, as it says for lengths that are its own."""
    cache = Cache.random()
    query = torch.randn(3, 4, 3, 16)
    out = flashtile.attention_kvcache(query, cache.key, cache.value, cache_lengths=cache.lengths, mask=mask)
    for b, length in enumerate(LENGTHS):
        visible = visible_by_definition(mask, b, 3, length)
        own = query[b : b + 1], cache.key[b : b + 1, :, :length], cache.value[b : b + 1, :, :length]
        torch.testing.assert_close(out[b], flashtile.attention(*own, mask=visible)[0])


def visible_by_definition(mask: masks.Mask, b: int, queries: int, keys: int) -> Tensor:
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    position = i + keys - queries
    name = repr(mask).split("(")[0]
    if name == "causal":
        return j <= i
    if name == "chunks":
        return j // 64 == position // 64
    if name == "prefix":
        return (j <= position) | (j < (2, 100, 50)[b])
    if name == "key_range":
        return ((0, 20, 3)[b] <= j) & (j < (3, 900, 400)[b]) & (i >= 0)
    if name == "documents":
        return j // 100 == torch.tensor([0, 2, 2])[:, None]
    return (j < 400) & (j >= position - 200) & (j <= position)


def test_whose_numbers_are_lazily_negated_bias_is_read_right():
    bias = torch._neg_view(torch.randn(1, 4, 1, 20))
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 20, 8)
    out = flashtile.attention_kvcache(query, cache, cache, bias=bias)
    assert torch.equal(out, flashtile.attention_kvcache(query, cache, cache, bias=bias.resolve_neg()))


@pytest.mark.parametrize("length", [3, torch.tensor(3), np.int64(3), torch.tensor([3, 3], dtype=torch.int32)])
def test_lengths_as_numbers(length):
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 20, 8)
    out = flashtile.attention_kvcache(query, cache, cache, cache_lengths=length)
    assert torch.equal(out, flashtile.attention(query, cache[:, :, :3], cache[:, :, :3]))


# "aot_eager" copies a cache back at the end, where nothing that fails arrives; "eager" writes in place, and
# leaves gradients off where it fails.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("paged", [False, True])
def test_a_compiled_graph_writes_nowhere_it_should_not(paged, backend):
    """Its values are unknown at the front door; what would count from the end must fail in the write."""

    def step(held, key, lengths, table):
        return flashtile.attention_kvcache(
            QUERY, *held, key=key, value=key, cache_lengths=lengths, block_table=table
        )

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    held = (torch.zeros(4, 2, 10, 8), torch.zeros(4, 2, 10, 8)) if paged else (HELD.clone(), HELD.clone())
    table = torch.tensor([[0, -1], [2, 3]], dtype=torch.int32) if paged else None
    before = [tensor.clone() for tensor in held]
    lengths = torch.tensor([10, 4]) if paged else torch.tensor([-1, 4])
    with pytest.raises((IndexError, ValueError, RuntimeError)), torch.enable_grad():
        compiled(held, NEW, lengths, table)
    others = slice(3, None) if paged else slice(0, 1)  # nobody's page; the sequence whose length is wrong
    assert all(torch.equal(new[others], old[others]) for new, old in zip(held, before, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("paged", [False, True])
def test_a_compiled_graph_does_not_append_two_sequences_to_one_place(paged, backend):
    def step(held: tuple[Tensor, Tensor], key: Tensor, places: Tensor) -> Tensor:
        given = {"block_table" if paged else "batch_index": places}
        return flashtile.attention_kvcache(QUERY, *held, key=key, value=key, cache_lengths=2, **given)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    held = (HELD.clone(), HELD.clone())
    dtype = torch.int32 if paged else torch.int64
    shared, apart = ([[0, 1], [0, 1]], [[0], [1]]) if paged else ([1, 1], [1, 0])
    with pytest.raises((IndexError, RuntimeError)), torch.enable_grad():
        compiled(held, NEW, torch.tensor(shared, dtype=dtype))
    assert all(torch.equal(cache, HELD) for cache in held)
    compiled(held, NEW, torch.tensor(apart, dtype=dtype))
    first = 0 if paged else 1
    assert all(torch.equal(cache[first, :, 2:5], NEW[0]) for cache in held)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_does_not_count_entries_from_the_end(backend):
    def step(held: tuple[Tensor, Tensor], key: Tensor, index: Tensor) -> Tensor:
        return flashtile.attention_kvcache(
            QUERY, *held, key=key, value=key, cache_lengths=2, batch_index=index
        )

    held = (HELD.clone(), HELD.clone())
    with pytest.raises((IndexError, RuntimeError)), torch.enable_grad():
        torch.compile(step, backend=backend, fullgraph=True)(held, NEW, torch.tensor([0, -1]))
    assert all(torch.equal(cache[1], HELD[1]) for cache in held)


QUERY = torch.randn(2, 4, 3, 8)
HELD = torch.randn(2, 2, 20, 8)
NEW = torch.randn(2, 2, 3, 8)
APPEND = {"key": NEW, "value": NEW, "cache_lengths": [4, 17]}
TABLE = torch.tensor([[0, 1], [1, 0]])
REFUSALS = [
    (
        {"query": QUERY[0]},
        ValueError,
        r"query must be \(batch, heads, length, head_dim\), got shape \(4, 3, 8\)",
    ),
    ({"key_cache": HELD.half()}, TypeError, "key_cache must have the dtype of query, torch.float32"),
    ({"cache_seqlens": 3}, TypeError, r"^attention_kvcache\(\) got .*; did you mean cache_lengths\?$"),
    (
        {"value_cache": HELD[:, :, :9]},
        ValueError,
        "value_cache must have all sizes of key_cache but the last",
    ),
    (
        {"query": QUERY[:, :3]},
        ValueError,
        "key_cache and value_cache must have a number of heads that divides",
    ),
    ({"query": QUERY[:1]}, ValueError, "key_cache must have the batch size of query, 1, without batch_index"),
    (
        {
            name: tensor.transpose(1, 2) if name != "cache_lengths" else tensor
            for name, tensor in APPEND.items()
        },
        ValueError,
        r"key must be \(batch, heads, length, head_dim\) = .*, length, .*; pass tensor.transpose\(1, 2\) of",
    ),
    ({"cache_lengths": [1, 2, 3]}, ValueError, "cache_lengths must have one number per sequence, 2"),
    (
        {"cache_lengths": [1, 21]},
        ValueError,
        r"cache_lengths must be in 0\.\.20, the 20 places of the cache, got",
    ),
    ({"cache_lengths": -1}, ValueError, r"cache_lengths must be in 0\.\.20"),
    (
        {**APPEND, "cache_lengths": [4, 18]},
        ValueError,
        r"must be in 0\.\.17, .* less 3 to append, got \[4, 18\]",
    ),
    (
        {"key": NEW, "cache_lengths": 3},
        ValueError,
        "value must be given together with key, got None",
    ),
    ({"key": NEW, "value": NEW}, ValueError, "cache_lengths must say where key and value are to be written"),
    (
        {**APPEND, "value": NEW[:, :, :2]},
        ValueError,
        r"value must be .* = \(2, 2, 3, 8\), got shape \(2, 2, 2, 8\)",
    ),
    ({**APPEND, "key": NEW.double()}, TypeError, "key must have the dtype of query"),
    ({**APPEND, "key_cache": HELD[:1].expand(2, -1, -1, -1)}, ValueError, "key_cache must not be expanded"),
    (
        {**APPEND, "key_cache": HELD, "value_cache": HELD, "value": NEW + 1},
        ValueError,
        "value must be a view of key, such as",
    ),
    (
        {"batch_index": [0, 2]},
        ValueError,
        r"batch_index must be in 0\.\.1, the entries of the cache, got \[0, 2\]",
    ),
    ({**APPEND, "batch_index": [1, 1]}, ValueError, "batch_index must give each sequence places of its own"),
    ({"batch_index": [0, 1], "block_table": TABLE}, ValueError, "batch_index must be None with block_table"),
    ({"block_table": TABLE[:1]}, ValueError, "block_table must have one row per sequence, 2"),
    ({"block_table": TABLE + 1}, ValueError, r"block_table must hold pages in 0\.\.1, got 2 at \[0, 1\]"),
    ({"block_table": TABLE.float()}, TypeError, "block_table must have the dtype int32 or int64"),
    (
        {**APPEND, "cache_lengths": [4, 24], "block_table": torch.tensor([[0, 1], [1, 0]])},
        ValueError,
        "block_table must give each sequence places of its own",
    ),
    ({"left_padding": [1, 21]}, ValueError, r"left_padding must be in 0\.\.20, the places of the cache"),
    ({"alibi_slopes": [0.5] * 4}, TypeError, "alibi_slopes must be a torch.Tensor, got list"),
    ({**APPEND, "key": [1]}, TypeError, "key must be a torch.Tensor, got list"),
    (
        {**APPEND, "key": NEW[0]},
        ValueError,
        r"key must be .* = \(2, 2, length, 8\), got shape \(2, 3, 8\)",
    ),
    (
        {"rotary_cos": torch.rand(9, 4)},
        ValueError,
        "rotary_sin must be given together with rotary_cos, got None",
    ),
    (
        {"rotary_cos": torch.rand(9, 4), "rotary_sin": torch.rand(9, 4)},
        ValueError,
        "rotary_cos must have a row for each of 20 positions",
    ),
    (
        {"rotary_cos": torch.rand(30, 5), "rotary_sin": torch.rand(30, 5)},
        ValueError,
        r"rotary_cos must be \(positions, at most head_dim / 2 = 4\)",
    ),
    (
        {"rotary_cos": torch.rand(30, 4), "rotary_sin": torch.rand(30, 4), "cache_lengths": 2},
        ValueError,
        "query must have a position for each of its 3 rows",
    ),
    ({"mask": torch.ones(3, 19, dtype=torch.bool)}, ValueError, r"mask must broadcast to .* \(2, 4, 3, 20\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS)
def test_refusals_come_before_anything_is_written(changes, error, message):
    arguments = {"query": QUERY, "key_cache": HELD.clone(), "value_cache": HELD.clone(), **changes}
    before = [arguments[name].clone() for name in ("key_cache", "value_cache")]
    with pytest.raises(error, match=message):
        flashtile.attention_kvcache(**arguments)
    after = [arguments[name] for name in ("key_cache", "value_cache")]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("append", [False, True])
def test_one_cache_can_be_keys_and_values(append):
    def attend(cache, values):
        new = {"key": NEW, "value": NEW[..., :5]} if append else {}
        return flashtile.attention_kvcache(QUERY, cache, values, cache_lengths=[3, 17], **new)

    cache, keys, values = HELD.clone(), HELD.clone(), HELD[..., :5].clone()
    assert torch.equal(attend(cache, cache[..., :5]), attend(keys, values))
    assert torch.equal(cache, keys)


def test_refuses_to_lose_a_gradient():
    query = QUERY.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="attention_kvcache has no gradient"):
        flashtile.attention_kvcache(query, HELD, HELD)
    with torch.no_grad():
        flashtile.attention_kvcache(query, HELD, HELD)


@pytest.mark.parametrize("swapped", [False, True])
def test_append_rows_of_the_caches_themselves(swapped):
    key_cache, value_cache = torch.randn(2, 2, 2, 8, 16)
    sources = (value_cache, key_cache) if swapped else (key_cache, value_cache)
    key, value = (source[:, :, 2:5] for source in sources)
    expected = [tensor.clone() for tensor in (key_cache, value_cache)]
    expected[0][:, :, 3:6], expected[1][:, :, 3:6] = key.clone(), value.clone()
    flashtile.attention_kvcache(
        torch.randn(2, 2, 1, 16), key_cache, value_cache, key=key, value=value, cache_lengths=3
    )
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])
