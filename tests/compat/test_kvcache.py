"""flash_attn_with_kvcache: what it appends, rotates, reads and returns, option by option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.compat import InputError
from flashtile.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flashtile.problem import compute_dtype
from tests.compat.standard import problem_of, standard
from tests.oracle import assert_close_to_oracle

SHARED = ("softmax_scale", "causal", "window_size", "softcap", "learnable_sink")


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (length, heads, head_dim) as complex numbers times those of its positions."""
    half = cos.shape[1]
    parts = x[..., : 2 * half]
    parts = parts.unflatten(-1, (half, 2)).mT if interleaved else parts.unflatten(-1, (2, half))
    turned = torch.complex(*parts.unbind(-2)) * torch.complex(cos, sin)[positions][:, None]
    pairs = torch.stack([turned.real, turned.imag], dim=-1 if interleaved else -2)
    return torch.cat([pairs.flatten(-2), x[..., 2 * half :]], dim=-1)


def expected_of(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, lse, k_cache, v_cache)`` of a call, sequence by sequence, by the definition."""
    q, table = call["q"], call.get("block_table")
    caches = [call["k_cache"].clone(), call["v_cache"].clone()]
    places = call["k_cache"].shape[1] * (1 if table is None else table.shape[1])
    lengths = torch.as_tensor(call.get("cache_seqlens", places)).expand(len(q)).tolist()
    local = call.get("causal", False) or call.get("window_size", (-1, -1)) != (-1, -1)
    results = []
    for b, length in enumerate(lengths):
        query, news = q[b], [call[name][b] if name in call else None for name in "kv"]
        end = length
        if news[0] is not None:
            end += len(news[0])
            if "rotary_cos" in call:
                tables = (call["rotary_cos"], call["rotary_sin"], call.get("rotary_interleaved", True))
                steps = torch.arange(len(query)) * int(local)
                query = rotate(query, length + steps, *tables)
                news[0] = rotate(news[0], torch.arange(length, end), *tables)
        keys, values = (
            written(cache, new, b, length, end, call.get("cache_batch_idx"), table)
            for cache, new in zip(caches, news, strict=True)
        )
        first = int(call["cache_leftpad"][b]) if "cache_leftpad" in call else 0
        options = {name: call[name] for name in SHARED if name in call}
        if (slopes := call.get("alibi_slopes")) is not None:
            options["alibi_slopes"] = slopes[b] if slopes.dim() == 2 else slopes
        results.append(standard(query[None], keys[None, first:end], values[None, first:end], **options))
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results]), *caches


def written(
    cache: Tensor,
    new: Tensor | None,
    b: int,
    length: int,
    end: int,
    index: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """The places of sequence b in order, after ``new`` is written into the cache."""
    if table is None:
        entry = cache[b if index is None else int(index[b])]
        if new is not None:
            entry[length:end] = new
        return entry
    if new is not None:
        for position, row in zip(range(length, end), new, strict=True):
            page, place = divmod(position, cache.shape[1])
            cache[table[b, page], place] = row
    return cache[table[b]].flatten(0, 1)


def call_of(
    dtype: torch.dtype = torch.float64, *, queries: int = 3, new: int | None = None, **options: Any
) -> dict[str, Any]:
    """Two sequences in a cache of 20 places; ``new`` keys are appended."""
    call: dict[str, Any] = {
        "q": torch.randn(2, queries, 4, 16),
        "k_cache": torch.randn(2, 20, 2, 16),
        "v_cache": torch.randn(2, 20, 2, 16),
        "cache_seqlens": torch.tensor([7, 13], dtype=torch.int32),
    }
    if new is not None:
        call |= {"k": torch.randn(2, new, 2, 16), "v": torch.randn(2, new, 2, 16)}
    call = {name: t.to(dtype) if t.is_floating_point() else t for name, t in call.items()}
    call |= options
    return {name: value for name, value in call.items() if value is not None}


def tables(rotary_dim: int, positions: int = 20) -> dict[str, Tensor]:
    angles = torch.rand(positions, rotary_dim // 2, dtype=torch.float64) * 6
    return {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


def pages_of(call: dict[str, Any], page_size: int = 4) -> dict[str, Any]:
    """The same call with a paged cache, the pages in random order."""
    count = 20 // page_size
    order = torch.randperm(2 * count + 1)[:-1]
    paged = dict(call)
    for name in ("k_cache", "v_cache"):
        pages = torch.full((2 * count + 1, page_size, 2, 16), math.nan, dtype=call["q"].dtype)
        pages[order] = call[name].reshape(-1, page_size, 2, 16)
        paged[name] = pages
    return {**paged, "block_table": order.reshape(2, count).to(torch.int32)}


def random(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


CALLS: dict[str, dict[str, Any]] = {
    "lengths of each": {},
    "one length": {"cache_seqlens": 11},
    "the whole cache": {"cache_seqlens": None},
    "nothing in the cache": {"cache_seqlens": 0},
    "int64 lengths": {"cache_seqlens": torch.tensor([20, 1])},
    "causal": {"causal": True},
    "one query": {"queries": 1, "causal": True},
    "more queries than keys": {"queries": 9, "causal": True},
    "window": {"window_size": (3, 1)},
    "causal window": {"window_size": (3, 5), "causal": True},
    "window right beyond the keys": {"queries": 12, "window_size": (-1, 8)},
    "scale and softcap": {"softmax_scale": 0.4, "softcap": 1.5},
    "alibi": {"alibi_slopes": random(4), "causal": True},
    "alibi of the batch": {"alibi_slopes": random(2, 4)},
    "sinks": {"learnable_sink": random(4)},
    "left padding": {"cache_leftpad": torch.tensor([2, 13], dtype=torch.int32), "causal": True},
    "left padding and alibi": {"cache_leftpad": torch.tensor([2, 5]), "alibi_slopes": random(4)},
    "another order": {"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)},
    "append": {"new": 3, "causal": True},
    "append to an empty cache": {"new": 3, "causal": True, "cache_seqlens": 0},
    "append to the end": {"new": 7, "queries": 7, "causal": True},
    "append more than is asked": {"new": 5, "queries": 2, "causal": True},
    "append fewer than are asked": {"new": 2, "queries": 4},
    "append in another order": {"new": 3, "cache_batch_idx": torch.tensor([1, 0]), "causal": True},
    "append behind left padding": {"new": 3, "cache_leftpad": torch.tensor([3, 0]), "window_size": (4, 0)},
    "rotary": {"new": 3, "causal": True, **tables(16)},
    "rotary, halves": {"new": 3, "causal": True, "rotary_interleaved": False, **tables(16)},
    "rotary, a part": {"new": 3, "window_size": (5, 0), **tables(6)},
    "rotary, all queries at one position": {"new": 3, **tables(8)},
    "rotary, more new keys than queries": {"new": 5, "queries": 2, "causal": True, **tables(8)},
    "rotary, more queries than new keys": {"new": 1, "queries": 4, "causal": True, **tables(8)},
    "rotary and left padding": {
        "new": 2,
        "cache_leftpad": torch.tensor([3, 1]),
        "causal": True,
        **tables(10),
    },
}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_meaning_of_every_option(name, paged):
    call = call_of(**CALLS[name])
    if paged:
        call.pop("cache_batch_idx", None)
        call = pages_of(call)
    expected = expected_of(call)
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    for found, wanted in zip((out, lse, call["k_cache"], call["v_cache"]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["causal", "one query", "window right beyond the keys", "append", "sinks", "alibi"]
)
def test_outputs_by_the_rule(name, dtype):
    call = call_of(dtype, **CALLS[name])
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, compute_dtype(dtype))
    assert (out.shape, lse.shape) == (call["q"].shape, (2, 4, call["q"].shape[1]))
    new = call["k"].shape[1] if "k" in call else 0
    for b, length in enumerate((call["cache_seqlens"] + new).tolist()):
        own = {
            "q": call["q"][b : b + 1],
            "k": call["k_cache"][b : b + 1, :length],
            "v": call["v_cache"][b : b + 1, :length],
        }
        own |= {name: call[name] for name in (*SHARED, "alibi_slopes") if name in call}
        found = {"out": out[b : b + 1].transpose(1, 2), "lse": lse[b : b + 1]}
        assert_close_to_oracle(found, problem_of(own))


def test_what_is_appended_is_stored_as_it_is(dtype):
    call = call_of(dtype, new=3)
    flash_attn_with_kvcache(**call)
    for b, length in enumerate((7, 13)):
        assert torch.equal(call["k_cache"][b, length : length + 3], call["k"][b])
        assert torch.equal(call["v_cache"][b, length : length + 3], call["v"][b])


@pytest.mark.parametrize("splits", [0, 1, 3, 128])
def test_splits_change_no_bit(splits, dtype):
    q = torch.randn(2, 1, 4, 16).to(dtype)
    k_cache, v_cache = torch.randn(2, 2, 3000, 2, 16).to(dtype).unbind(0)
    outputs = [
        flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=2900, num_splits=n, return_softmax_lse=True
        )
        for n in (0, splits)
    ]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outputs, strict=True))


def test_a_larger_cache_is_read_and_written_at_its_first_entries():
    call = call_of(new=2)
    wide = {
        name: torch.cat([call[name], torch.randn(3, 20, 2, 16).double()]) for name in ("k_cache", "v_cache")
    }
    rest = [wide[name][2:].clone() for name in wide]
    assert torch.equal(flash_attn_with_kvcache(**{**call, **wide}), flash_attn_with_kvcache(**call))
    for name, untouched in zip(wide, rest, strict=True):
        assert torch.equal(wide[name][:2], call[name])
        assert torch.equal(wide[name][2:], untouched)


def test_step_by_step_equals_all_at_once():
    q, k, v = torch.randn(3, 2, 12, 2, 8, dtype=torch.float64).unbind(0)
    k_cache, v_cache = torch.full((2, 2, 16, 2, 8), math.nan, dtype=torch.float64).unbind(0)
    steps = [
        flash_attn_with_kvcache(
            q[:, t : t + n], k_cache, v_cache, k[:, t : t + n], v[:, t : t + n], cache_seqlens=t, causal=True
        )
        for t, n in ((0, 5), (5, 1), (6, 1), (7, 4), (11, 1))
    ]
    expected = flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-12, atol=1e-12)


def test_it_has_no_gradient():
    call = call_of()
    call["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        flash_attn_with_kvcache(**call)
    with torch.no_grad():
        assert not flash_attn_with_kvcache(**call).requires_grad


def halved(**options: Any) -> dict[str, Any]:
    return call_of(torch.float32, **options)


REFUSED = {
    "q": [halved(q=[1.0]), halved(q=torch.randn(2, 3, 16)), halved(q=torch.ones(2, 3, 4, 16).int())],
    "k_cache": [
        halved(k_cache=torch.randn(2, 20, 2, 8)),
        halved(k_cache=torch.randn(2, 20, 2, 16).half()),
        halved(k_cache=torch.randn(1, 20, 2, 16), v_cache=torch.randn(1, 20, 2, 16)),
        halved(k_cache=torch.randn(2, 20, 3, 16), v_cache=torch.randn(2, 20, 3, 16)),
    ],
    "v_cache": [halved(v_cache=torch.randn(2, 19, 2, 16)), halved(v_cache=torch.randn(20, 2, 16))],
    "k": [
        halved(new=1, k=None),
        halved(new=1, k=torch.randn(2, 1, 1, 16)),
        halved(new=1, k=torch.randn(2, 16)),
        halved(**tables(8)),
    ],
    "v": [halved(new=1, v=None), halved(new=2, v=torch.randn(2, 1, 2, 16))],
    "cache_seqlens": [
        halved(new=1, cache_seqlens=None),
        halved(new=8),
        halved(cache_seqlens=21),
        halved(cache_seqlens=-1),
        halved(cache_seqlens=torch.tensor([1, 2, 3])),
        halved(cache_seqlens=torch.tensor([1.0, 2.0])),
        halved(new=1, cache_seqlens=None, **tables(8)),
        halved(new=1, cache_seqlens=torch.tensor([1.0, 2.0]), **tables(8)),
        halved(new=1, cache_seqlens=torch.tensor([1, 2, 3]), **tables(8)),
    ],
    "cache_batch_idx": [
        halved(cache_batch_idx=torch.tensor([0, 2])),
        halved(cache_batch_idx=torch.tensor([0])),
        halved(new=1, cache_batch_idx=torch.tensor([1, 1])),
    ],
    "cache_leftpad": [
        halved(cache_leftpad=torch.tensor([0, 0, 0])),
        halved(cache_leftpad=torch.tensor([0.5, 1])),
    ],
    "block_table": [halved(block_table=torch.tensor([[0], [2]])), halved(block_table=torch.tensor([0, 1]))],
    "rotary_cos": [
        halved(new=1, rotary_sin=torch.rand(20, 4)),
        halved(new=1, rotary_sin=torch.rand(20, 9), rotary_cos=torch.rand(20, 9)),
        halved(new=1, rotary_sin=torch.rand(13, 4), rotary_cos=torch.rand(13, 4)),
        halved(new=1, rotary_sin=torch.rand(20, 4), rotary_cos=torch.ones(20, 4).int()),
    ],
    "rotary_sin": [
        halved(new=1, rotary_cos=torch.rand(20, 4)),
        halved(new=1, rotary_cos=torch.rand(20, 4), rotary_sin=torch.rand(20, 3)),
    ],
    "window_size": [halved(window_size=(1.5, 0))],
    "softmax_scale": [halved(softmax_scale="1")],
    "softcap": [halved(softcap=-1.0)],
    "alibi_slopes": [halved(alibi_slopes=torch.rand(2))],
    "learnable_sink": [halved(learnable_sink=torch.rand(2))],
}


@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name, calls in REFUSED.items() for call in calls]
)
def test_what_is_refused_is_named_and_nothing_is_written(name, call):
    before = [call[cache].clone() for cache in ("k_cache", "v_cache")]
    with pytest.raises(InputError, match=rf"^{name} (and v_cache )?must .*, got ") as refusal:
        flash_attn_with_kvcache(**call)
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, RuntimeError)
    for cache, untouched in zip(("k_cache", "v_cache"), before, strict=True):
        assert torch.equal(call[cache], untouched)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (REFUSED["k_cache"][3], r"\(2, 20, 3, 16\)"),
        (halved(new=1, k=torch.randn(2, 2, 1, 16)), r"\(2, 2, 1, 16\)"),
    ],
)
def test_shapes_that_do_not_fit_are_shown_as_passed(call, shape):
    with pytest.raises(
        InputError, match=rf"must be \(batch, length, heads, head_dim\).*, got shape {shape}$"
    ):
        flash_attn_with_kvcache(**call)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "name", ["causal", "append", "left padding", "rotary", "rotary, all queries at one position"]
)
def test_compiles_into_one_graph(name, paged):
    torch._dynamo.reset()
    calls = [call_of(**CALLS[name])]
    if paged:
        calls = [pages_of(calls[0])]
    calls.append({key: v.clone() if isinstance(v, Tensor) else v for key, v in calls[0].items()})
    compiled = torch.compile(
        lambda call: flash_attn_with_kvcache(**call, return_softmax_lse=True),
        fullgraph=True,
        backend="aot_eager",
    )
    results = [compiled(calls[0]), flash_attn_with_kvcache(**calls[1], return_softmax_lse=True)]
    for (ours, theirs), cache in zip(zip(*results, strict=True), ("k_cache", "v_cache"), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(calls[0][cache].nan_to_num(), calls[1][cache].nan_to_num())
