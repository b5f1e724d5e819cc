"""The forward kernel against the float64 oracle: sizes, masks, options, layouts, packed sequences, NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks
from flashtile.problem import AttentionProblem
from tests.conftest import dtype_name
from tests.gpu.running import DTYPES, INTERPRETED, check, engine, forward_alone, moved, on_device, results
from tests.nonfinite import (
    MASKS,
    check_infinite_sink,
    check_infinity,
    check_minus_infinity,
    check_nan,
    masked_problem,
)
from tests.options import ALL_AT_ONCE, NAMES, pairs, problem_with
from tests.oracle import assert_close_to_oracle, random_problem
from tests.packing import KEYS, OPTIONS, QUERIES, packed, packed_problem, packed_problem_with
from tests.strategies import ALL_LAYOUTS, lay_out, problem_in_layout

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
# batch, query heads, query length, key length; 40 queries of 2 heads do not fit into one tile of decoding.
SIZES = (2, 2, 40, 100)


@each_dtype
@pytest.mark.parametrize(
    ("query_length", "key_length"),
    [(1, 1), (3, 1), (63, 65), (65, 63), (65, 1), (127, 127), (127, 3), (129, 200), (300, 31)],
)
def test_lengths(dtype, query_length, key_length):
    check(
        random_problem(
            batch=1, heads=2, kv_heads=1, query_length=query_length, key_length=key_length, dtype=dtype
        )
    )


@each_dtype
@pytest.mark.parametrize(
    ("head_dim", "value_head_dim"),
    [
        (1, 1), (16, 16), (20, 20), (33, 33), (64, 64), (80, 80), (128, 128), (1, 64), (64, 1), (33, 80),
        (130, 16), (16, 130), (512, 512),
    ],
)  # fmt: skip
def test_head_dims(dtype, head_dim, value_head_dim):
    check(
        random_problem(
            batch=1, heads=1, kv_heads=1, query_length=70, key_length=45, head_dim=head_dim,
            value_head_dim=value_head_dim, dtype=dtype,
        )
    )  # fmt: skip


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (5, 1), (12, 4), (9, 1)])
def test_heads_share_keys(dtype, heads, kv_heads):
    check(
        random_problem(batch=2, heads=heads, kv_heads=kv_heads, query_length=66, key_length=19, dtype=dtype)
    )


@each_dtype
@pytest.mark.parametrize("name", NAMES)
def test_option(dtype, name):
    check(problem_with(SIZES, dtype, name))


@pytest.mark.parametrize(("one", "two"), pairs())
def test_pair_of_options(one, two):
    dtype = DTYPES[pairs().index((one, two)) % len(DTYPES)]
    check(problem_with((1, 2, 68, 70), dtype, one, two))


@each_dtype
def test_everything_at_once(dtype):
    check(problem_with((2, 4, 40, 100), dtype, *ALL_AT_ONCE))


def _ids(longest: int, *lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None, :longest]


STRUCTURES = {
    "causal top-left": masks.causal(alignment="top-left"),
    "causal bottom-right": masks.causal(alignment="bottom-right"),
    "window": masks.window(20, 4, alignment="bottom-right"),
    "narrow window": masks.window(1, 0, alignment="top-left"),
    "key_lengths": masks.key_lengths([65, 0]),
    "key_starts": masks.key_starts([33, 100]),
    "prefix": masks.prefix([40, 0], alignment="top-left"),
    "chunks": masks.chunks(24, alignment="top-left") & masks.causal(alignment="top-left"),
    "documents": masks.documents(_ids(100, 31, 2, 40, 27), _ids(80, 40, 0, 30, 10)),
    "dense": masks.from_dense(torch.rand(2, 80, 100, generator=torch.Generator().manual_seed(3)) < 0.3),
    "dense and causal": masks.from_dense(
        torch.rand(1, 80, 100, generator=torch.Generator().manual_seed(4)) < 0.3
    )
    & masks.causal(alignment="bottom-right"),
}


@each_dtype
@pytest.mark.parametrize("mask", STRUCTURES.values(), ids=STRUCTURES)
def test_mask(dtype, mask):
    check(random_problem(heads=2, kv_heads=1, query_length=80, key_length=100, mask=mask, dtype=dtype))


@pytest.mark.parametrize("lengths", [(80, 40), (40, 80)], ids=str)
@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
def test_causal_with_unequal_lengths(lengths, alignment):
    mask = masks.causal(alignment=alignment)
    check(random_problem(heads=1, kv_heads=1, query_length=lengths[0], key_length=lengths[1], mask=mask))


@pytest.mark.parametrize("broadcast", list(itertools.product((True, False), repeat=4)))
@pytest.mark.parametrize("plane", ["bias", "mask"])
def test_planes_broadcast(plane, broadcast):
    batch, heads, queries, keys = sizes = (2, 2, 66, 37)
    shape = tuple(1 if one else n for one, n in zip(broadcast, sizes, strict=True))
    generator = torch.Generator().manual_seed(2)
    field = {"mask": torch.rand(shape, generator=generator) < 0.5}
    if plane == "bias":
        holes = torch.rand(shape, generator=generator) < 0.2
        field = {"bias": torch.randn(shape, generator=generator).masked_fill(holes, -math.inf)}
    check(
        random_problem(batch=batch, heads=heads, kv_heads=2, query_length=queries, key_length=keys, **field)
    )


def _seen_by_values(problem: AttentionProblem) -> Tensor:
    """Where the probabilities are not 0: bool (B, Hq, Sq, Sk). The values are unit vectors."""
    keys = problem.key.shape[2]
    problem.value = torch.eye(keys).to(problem.value).expand(*problem.key.shape[:2], keys, keys)
    return results(problem)["out"] > 0


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -1, -(2**62) - 12345678901])
@pytest.mark.parametrize("dropout_p", [2.0**-32, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("queries", [66, 3])
def test_dropout_has_the_bits_of_the_mask(seed, dropout_p, queries):
    problem = random_problem(query_length=queries, key_length=50, scale=0.0, dropout_p=dropout_p, seed=seed)
    kept = flashtile.dropout_mask(seed, dropout_p, 2, 4, queries, 50)
    assert torch.equal(_seen_by_values(problem), kept)


def test_dropout_takes_its_seed_from_a_tensor():
    problem = random_problem(
        query_length=66, key_length=50, scale=0.0, dropout_p=0.4, seed=torch.tensor([-7])
    )
    assert torch.equal(_seen_by_values(problem), flashtile.dropout_mask(-7, 0.4, 2, 4, 66, 50))


@each_dtype
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_layouts_of_inputs(dtype, layout):
    check(problem_in_layout((2, 4, 40, 100), dtype, layout))


@pytest.mark.parametrize("layout", ["strided", "padded", "unaligned"])
def test_writes_its_outputs_and_nothing_beside(layout):
    problem = random_problem(query_length=70, key_length=40, head_dim=19)
    expected = results(problem)
    wide = lay_out(torch.full_like(expected["out"], math.nan), layout)
    out, lse = moved(wide), moved(lay_out(torch.full((2, 4, 70, 1), math.nan), layout))[..., 0]
    engine.forward(on_device(problem), out, lse)
    for view, wanted in ((out, expected["out"]), (lse, expected["lse"])):
        assert torch.equal(view.cpu(), wanted)
        view.fill_(math.nan)
        assert torch.isnan(torch.empty(0).to(view).set_(view.untyped_storage())).all()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies all the memory around a tensor")
@pytest.mark.parametrize("outermost", ["heads", "columns"])
def test_steps_beyond_int32(outermost):
    """Keys whose last element lies more than 2**31 elements behind the first."""
    problem = random_problem(
        heads=2, kv_heads=2, query_length=66, key_length=34, head_dim=80, dtype=torch.half
    )
    batch, heads, length, dim = shape = problem.key.shape
    far = 2**31 + 64
    strides = (length * dim, far, dim, 1)
    if outermost == "columns":
        strides = (heads * length, length, 1, far // (dim - 1))
    wide = torch.zeros(far + batch * heads * length * dim, dtype=torch.half)
    problem.key = wide.as_strided(shape, strides).copy_(problem.key)
    check(problem)


@each_dtype
@pytest.mark.parametrize("query_length", [70, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_no_keys(dtype, query_length, with_sinks):
    check(
        random_problem(
            query_length=query_length, key_length=0, dtype=dtype, random_sinks=with_sinks, random_alibi=True,
            random_bias=(1, 4, query_length, 0),
        )
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(0, 2, 70), (2, 0, 70), (2, 2, 0)], ids=str)
def test_nothing_to_compute(sizes):
    batch, heads, queries = sizes
    problem = random_problem(batch=batch, heads=heads, kv_heads=max(1, heads), query_length=queries)
    assert results(problem)["out"].shape == (*sizes, 16)


def test_sinks_that_are_infinite():
    sinks = torch.tensor([-math.inf, 3.0, math.inf, 0.0])
    for queries in (3, 40):
        check(random_problem(query_length=queries, sinks=sinks, upper=-2))


@each_dtype
def test_large_scores_do_not_overflow(dtype):
    """Scores of thousands (whose exponential no dtype holds) in some rows, thousands below zero in others."""
    problem = random_problem(batch=1, query_length=40, key_length=200, head_dim=8, dtype=dtype, scale=1.0)
    problem.query[:, :, ::3] *= 40
    problem.key *= 20
    check(problem)


@each_dtype
def test_the_lowest_bias_hides_nothing(dtype):
    """A row whose every key has it weighs them alike; in units of log 2 it would be minus infinity."""
    bias = torch.zeros(1, 1, 20, 30, dtype=dtype)
    bias[:, :, 3], bias[..., 20:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    problem = random_problem(query_length=20, key_length=30, dtype=dtype, bias=bias)
    found = results(problem)
    assert_close_to_oracle({"out": found["out"]}, problem)
    assert torch.isfinite(found["lse"]).all()


def test_scale_may_be_an_int():
    one = random_problem(query_length=70, scale=1)
    assert torch.equal(results(one)["out"], results(dataclasses.replace(one, scale=1.0))["out"])


@each_dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias given"])
def test_nan_reaches_what_sees_it(dtype, mask, with_bias):
    check_nan(forward_alone, masked_problem(40, 70, dtype, mask, with_bias))


@each_dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [math.inf, pytest.param(-math.inf, marks=pytest.mark.slow)])
def test_infinity_reaches_what_sees_it(dtype, mask, value):
    check_infinity(forward_alone, masked_problem(40, 70, dtype, mask), value)


def test_a_nan_stays_beside_a_sink_of_infinity():
    check_infinite_sink(forward_alone, 40, 70)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_whose_scores_are_all_minus_infinity(sinks):
    check_minus_infinity(forward_alone, 40, 70, sinks)


@pytest.mark.parametrize("queries", [70, 3])
def test_rows_hidden_from_nan_everywhere(queries):
    problem = random_problem(query_length=queries, key_length=50, upper=-queries)
    for tensor in (problem.query, problem.key, problem.value):
        tensor.fill_(math.nan)
    found = results(problem)
    assert (found["out"] == 0).all()
    assert (found["lse"] == -math.inf).all()


@each_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_sequences(dtype, options):
    check(packed_problem_with(options, dtype))


def test_dropout_numbers_packed_sequences():
    queries, keys = (40, 0, 70, 1), (30, 3, 50, 20)
    query, key, _, cu_q, cu_k = packed(queries, keys)
    value = torch.cat([torch.eye(length, 50) for length in (*keys, 3)])[:, None].expand(-1, 2, 50)
    problem = packed_problem(query, key, value, cu_q, cu_k, scale=0.0, dropout_p=0.4, seed=99)
    out = results(problem)["out"]
    kept = flashtile.dropout_mask(99, 0.4, 4, 4, 70, 50)
    for b, (first, rows) in enumerate(zip(cu_q.tolist(), queries, strict=False)):
        found = out[0, :, first : first + rows, : keys[b]] > 0
        assert torch.equal(found, kept[b, :, :rows, : keys[b]])


def test_only_empty_sequences():
    problem = packed_problem(*packed((0, 0), (3, 0)))
    found = results(problem)
    assert (found["out"] == 0).all()
    assert (found["lse"] == -math.inf).all()


@each_dtype
def test_bits_do_not_depend_on_the_batch(dtype):
    options = {"mask": masks.causal(alignment="bottom-right"), "head_dim": 64, "dtype": dtype}
    for lengths in ((80, 130), (2, 300)):
        problem = random_problem(
            batch=3, query_length=lengths[0], key_length=lengths[1], random_sinks=True, **options
        )
        together = results(problem)
        for b in (0, 2):
            inputs = {name: getattr(problem, name)[b : b + 1] for name in ("query", "key", "value")}
            alone = results(dataclasses.replace(problem, **inputs))
            for name, tensor in alone.items():
                assert torch.equal(tensor[0], together[name][b])


def test_bits_do_not_depend_on_the_other_packed_sequences():
    tensors = packed(QUERIES, KEYS, rest=0)
    together = results(packed_problem(*tensors))
    *inputs, cu_q, cu_k = tensors
    for b in (0, 2, 4):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        own = [inputs[0][rows], inputs[1][keys], inputs[2][keys]]
        alone = results(packed_problem(*own, cu_q[b : b + 2] - cu_q[b], cu_k[b : b + 2] - cu_k[b]))
        for name, tensor in alone.items():
            assert torch.equal(tensor, together[name][:, :, rows])
