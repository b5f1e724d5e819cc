"""Few queries of many keys: packed heads, splits of the keys and their merge, caches and pages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from flashtile import masks
from flashtile.masks.lengths import Cached
from flashtile.problem import AttentionProblem
from tests.conftest import dtype_name
from tests.gpu.running import DTYPES, check, forward_alone, results
from tests.nonfinite import (
    MASKS,
    check_infinite_sink,
    check_infinity,
    check_minus_infinity,
    check_nan,
    masked_problem,
)
from tests.options import ALL_AT_ONCE, NAMES, problem_with
from tests.oracle import random_problem
from tests.packing import into_pages
from tests.strategies import LAYOUTS, with_layout

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
SIZES = (1, 4, 2, 600)  # several splits
FEW_KEYS = (2, 4, 2, 90)


@each_dtype
@pytest.mark.parametrize("name", NAMES)
def test_option(dtype, name):
    check(problem_with(SIZES, dtype, name))


@each_dtype
@pytest.mark.parametrize("sizes", [SIZES, FEW_KEYS], ids=str)
def test_everything_at_once(dtype, sizes):
    check(problem_with(sizes, dtype, *ALL_AT_ONCE))


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "query_length"),
    [
        (1, 1, 1),
        (4, 4, 17),
        (3, 1, 1),
        (5, 1, 7),
        (64, 1, 1),
        (16, 1, 4),
        (12, 4, 5),
        (65, 1, 1),
        (71, 71, 1),
    ],
)
def test_heads_share_a_tile(dtype, heads, kv_heads, query_length):
    """Groups that are no power of two, and rows up to the 64 that a tile packs; 65 are too many."""
    check(
        random_problem(
            batch=1, heads=heads, kv_heads=kv_heads, query_length=query_length, key_length=300, dtype=dtype,
            mask=masks.causal(alignment="bottom-right"), random_alibi=True, random_sinks=True,
        )
    )  # fmt: skip


@each_dtype
@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(1, 1), (20, 33), (80, 130), (512, 512)])
@pytest.mark.parametrize("key_length", [65, 300])
def test_head_dims(dtype, head_dim, value_head_dim, key_length):
    check(
        random_problem(
            batch=1, query_length=2, key_length=key_length, head_dim=head_dim,
            value_head_dim=value_head_dim, dtype=dtype,
        )
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(layout):
    problem = problem_with(SIZES, DTYPES[1], "bias")
    check(with_layout(problem, layout))


@each_dtype
@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        # Half of them are slow: how keys are hidden has nothing to do with how they are split.
        pytest.param(mask, keys, marks=pytest.mark.slow if MASKS.index(mask) % 2 == (keys > 200) else ())
        for mask in MASKS
        for keys in (40, 270)  # one split, and two
    ],
)
def test_nan_and_infinity_reach_what_sees_them(dtype, mask, keys):
    check_nan(forward_alone, masked_problem(2, keys, dtype, mask))
    for value in (math.inf, -math.inf):
        check_infinity(forward_alone, masked_problem(2, keys, dtype, mask), value)


def test_a_nan_stays_beside_a_sink_of_infinity():
    check_infinite_sink(forward_alone, 2, 270)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_whose_scores_are_all_minus_infinity(sinks):
    check_minus_infinity(forward_alone, 2, 270, sinks)


def test_a_split_that_sees_only_nan():
    """The only key of the second split that a row sees is NaN."""
    first = torch.tensor([[500]], dtype=torch.int32)
    problem = random_problem(batch=1, query_length=1, key_length=1024, first=first, last=first + 20)
    problem.key[:, :, 512] = math.nan
    found = results(problem)
    assert torch.isnan(found["out"]).all()
    assert torch.isnan(found["lse"]).all()


CAPACITY = 320
LENGTHS = (3, 0, 320, 277)
BOTTOM_RIGHT = masks.causal(alignment="bottom-right")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": BOTTOM_RIGHT},
    "window": {"mask": BOTTOM_RIGHT & masks.window(100, 0, alignment="bottom-right"), "softcap": 4.0},
    "sinks": {"random_sinks": True, "mask": BOTTOM_RIGHT},
    "slopes": {"random_alibi": True, "scale": 0.2},
    "bias": {"random_bias": (4, 1, 1, CAPACITY)},
}


def cached_problem(
    query_length: int, dtype: torch.dtype = torch.float32, entries: int = 4, mask: Any = None, **options: Any
) -> AttentionProblem:
    """Four sequences over a cache, NaN behind what each of them uses."""
    lengths = torch.tensor(LENGTHS)
    problem = random_problem(
        batch=4, query_length=query_length, key_length=CAPACITY, dtype=dtype, key_lengths=lengths, **options
    )
    if mask is not None:
        intervals = mask.intervals(Cached(4, query_length, CAPACITY, lengths, lengths.device))
        names = ("lower", "upper", "first", "last", "mask")
        problem = dataclasses.replace(problem, **dict(zip(names, intervals, strict=True)))
    unused = (torch.arange(CAPACITY) >= lengths[:, None])[:, None, :, None]
    problem.key.masked_fill_(unused, math.nan)
    problem.value.masked_fill_(unused, math.nan)
    return problem


def paged(problem: AttentionProblem, size: int) -> AttentionProblem:
    key, value, table = into_pages(size, problem.key, problem.value)
    return dataclasses.replace(problem, block_table=table, key=key, value=value)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("query_length", [1, 5, 40])
def test_cache(query_length, name):
    dtype = DTYPES[(list(OPTIONS).index(name) + query_length) % len(DTYPES)]
    check(cached_problem(query_length, dtype, **OPTIONS[name]))


@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("query_length", [1, 40])
def test_pages(size, query_length):
    problem = cached_problem(query_length, DTYPES[1], mask=BOTTOM_RIGHT)
    in_pages = paged(problem, size)
    check(in_pages)
    if size * in_pages.block_table.shape[1] == CAPACITY:  # else the splits may be others
        contiguous = results(problem)
        for name, tensor in results(in_pages).items():
            assert torch.equal(tensor, contiguous[name])


@pytest.mark.parametrize("query_length", [1, 40])
def test_batch_index(query_length):
    problem = cached_problem(query_length)
    index = torch.tensor([2, 0, 5, 4])
    for name in ("key", "value"):
        cache = getattr(problem, name)
        larger = cache.new_full((6, *cache.shape[1:]), math.nan)
        larger[index] = cache
        setattr(problem, name, larger)
    problem.batch_index = index
    check(problem)


def test_packed_queries_over_pages():
    """Queries packed, keys in pages: a batch of prompts and of single tokens."""
    problem = paged(cached_problem(1), 16)
    problem.query = torch.randn(1, 4, 77, 16)
    problem.query_starts = torch.tensor([0, 3, 4, 74, 75])
    check(problem)


@each_dtype
def test_bits_do_not_depend_on_the_batch(dtype):
    problem = cached_problem(2, dtype)
    together = results(problem)
    for b in (0, 3):
        names = ("query", "key", "value", "key_lengths")
        alone = results(
            dataclasses.replace(problem, **{name: getattr(problem, name)[b : b + 1] for name in names})
        )
        for name, tensor in alone.items():
            assert torch.equal(tensor[0], together[name][b])
