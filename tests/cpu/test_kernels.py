"""Forward, backward and decode kernels against the float64 oracle: sizes, options, pairs of them, layouts.

Outputs hold NaN before every call, and so does scratch memory (conftest.py).
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from flashtile import cpu
from flashtile.cpu import call as c
from flashtile.cpu import plans
from flashtile.problem import AttentionProblem, Gradients, Part, compute_dtype
from tests.cpu import decode_shapes
from tests.options import ALL_AT_ONCE, NAMES, pairs, problem_with
from tests.oracle import (
    assert_close_to_oracle,
    random_gradients,
    random_problem,
    results_by_autograd,
    results_of_backend,
)
from tests.strategies import ALL_LAYOUTS, LAYOUTS, lay_out, problem_in_layout, with_layout

# batch, query heads, query length, key length. Few queries take the decode kernel, 1030 keys in two splits.
SIZES = {"tiles": (2, 4, 33, 131), "decode": (2, 4, 2, 1030)}


def check(problem: AttentionProblem, with_grad_lse: bool = True) -> None:
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_lse = random_gradients(problem, generator)
    gradient = grad_lse if with_grad_lse else None
    actual = results_of_backend(cpu, problem, grad_out, gradient)
    assert_close_to_oracle(actual, problem, grad_out, gradient)


LENGTHS = [
    (1, 1), (1, 63), (1, 1023), (3, 3), (3, 1025), (63, 65), (65, 63), (65, 1), (127, 127), (127, 1023),
    (1023, 127), (2049, 3), (5, 2100),
]  # fmt: skip


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_lengths(dtype, query_length, key_length):
    check(
        random_problem(
            batch=1, heads=2, kv_heads=1, query_length=query_length, key_length=key_length, dtype=dtype
        )
    )


@pytest.mark.parametrize(
    ("batch", "query_length", "key_length"), [(0, 3, 3), (2, 0, 5), (2, 5, 0), (2, 70, 0), (2, 0, 0)]
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_nothing_to_attend(dtype, batch, query_length, key_length, with_sinks):
    check(
        random_problem(
            batch=batch,
            query_length=query_length,
            key_length=key_length,
            dtype=dtype,
            random_sinks=with_sinks,
            random_alibi=True,
            random_bias=(1, 4, query_length, key_length),
        )
    )


HEAD_DIMS = [(1, 1), (3, 3), (33, 33), (64, 64), (80, 80), (128, 128), (576, 576)]
UNEQUAL = [(1, 64), (64, 1), (33, 80), (80, 33), (16, 130), (130, 16), (576, 512)]


@pytest.mark.parametrize(("head_dim", "value_head_dim"), HEAD_DIMS + UNEQUAL)
@pytest.mark.parametrize("query_length", [2, 35])
def test_head_dims(dtype, head_dim, value_head_dim, query_length):
    check(
        random_problem(
            batch=1,
            query_length=query_length,
            key_length=133,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            dtype=dtype,
        )
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (5, 1), (20, 1), (70, 1), (71, 71)])
@pytest.mark.parametrize("query_length", [1, 9])
def test_heads_share_keys(dtype, heads, kv_heads, query_length):
    check(
        random_problem(
            batch=2, heads=heads, kv_heads=kv_heads, query_length=query_length, key_length=19, dtype=dtype
        )
    )


def test_decode_in_every_shape_of_its_tiles(dtype):
    assert decode_shapes.check(dtype) == 90


def test_decode_of_heads_and_tiles_that_see_different_keys(dtype):
    """Together in a task where heads lie side by side and threads are few. Of the first and the last of three
    splits only some queries see a key.
    """
    apart = random_problem(
        batch=1, heads=24, kv_heads=2, query_length=6, key_length=2500, head_dim=16, dtype=dtype, lower=1021,
        upper=2044,
    )  # fmt: skip
    beside = with_layout(apart, "transposed")
    found = {}
    for name, problem, threads in (("apart", apart, 1), ("few threads", beside, 1), ("many", beside, 32)):
        torch.set_num_threads(threads)
        found[name] = decode_shapes.decoded(problem)
        plan = plans.plan_of(problem, found[name]["out"], found[name]["lse"])
        assert (plan.steps[0].call[c.TOGETHER] > 1) == (name == "few threads")
        assert_close_to_oracle(found[name], problem)
        for part in ("out", "lse"):
            assert torch.equal(found[name][part], found["apart"][part]), f"{part}, {name}"


def test_intervals_leave_every_head_a_task_of_its_own(dtype):
    """They may leave one split of keys, of which all threads need a part."""
    problem = random_problem(
        batch=1, heads=8, kv_heads=8, query_length=1, key_length=9000, head_dim=8, dtype=dtype,
        first=torch.full((1, 1), 8500, dtype=torch.int32), last=torch.full((1, 1), 9000, dtype=torch.int32),
    )  # fmt: skip
    problem = with_layout(problem, "transposed")
    found = decode_shapes.decoded(problem)
    assert plans.plan_of(problem, found["out"], found["lse"]).steps[0].call[c.TOGETHER] == 1
    assert_close_to_oracle(found, problem)


def test_keys_that_share_vectors(dtype):
    decode_shapes.check_shared_vectors(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_grad_lse", [False, True], ids=["plain", "grad_lse"])
def test_option(dtype, size, name, with_grad_lse):
    check(problem_with(SIZES[size], dtype, name), with_grad_lse)


@pytest.mark.parametrize(("one", "two"), pairs())
def test_pair_of_options(one, two):
    # The dtypes take turns; tests/test_random.py draws both.
    turn = pairs().index((one, two))
    dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float64)[turn % 4]
    check(problem_with(SIZES["tiles"], dtype, one, two))
    check(problem_with(SIZES["decode"], dtype, one, two))


@pytest.mark.parametrize("size", SIZES)
def test_everything_at_once(dtype, size):
    check(problem_with(SIZES[size], dtype, *ALL_AT_ONCE))


@pytest.mark.parametrize("broadcast", list(itertools.product((True, False), repeat=4)))
@pytest.mark.parametrize("size", SIZES)
def test_bias_broadcasts(dtype, size, broadcast):
    batch, heads, queries, keys = SIZES[size]
    shape = tuple(1 if one else n for one, n in zip(broadcast, SIZES[size], strict=True))
    problem = random_problem(
        batch=batch, heads=heads, query_length=queries, key_length=keys, dtype=dtype, random_bias=shape
    )
    check(problem)


@pytest.mark.parametrize("broadcast", list(itertools.product((True, False), repeat=4)))
@pytest.mark.parametrize("size", SIZES)
def test_mask_broadcasts(size, broadcast):
    batch, heads, queries, keys = SIZES[size]
    shape = tuple(1 if one else n for one, n in zip(broadcast, SIZES[size], strict=True))
    mask = torch.rand(shape) < 0.5
    check(random_problem(batch=batch, heads=heads, query_length=queries, key_length=keys, mask=mask))


@pytest.mark.parametrize("dropout_p", [1e-12, 0.999, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_extreme_dropout(dtype, size, dropout_p):
    batch, heads, queries, keys = SIZES[size]
    problem = random_problem(
        batch=batch,
        heads=heads,
        query_length=queries,
        key_length=keys,
        dtype=dtype,
        dropout_p=dropout_p,
        seed=5,
    )
    if dropout_p == 1.0:
        results = results_of_backend(cpu, problem, *random_gradients(problem))
        assert results["out"].eq(0).all()
        assert results["grad_value"].eq(0).all()
    else:
        check(problem)


@pytest.mark.parametrize("first_key", [0, 1, 2, 3, 1000])
@pytest.mark.parametrize("size", SIZES)
def test_a_part_of_a_larger_problem(dtype, size, first_key):
    """Dropout and ALiBi count positions and heads in the whole; quads of random words start anywhere."""
    batch, heads, queries, keys = SIZES[size]
    check(
        random_problem(
            batch=batch,
            heads=heads,
            query_length=queries,
            key_length=keys,
            dtype=dtype,
            dropout_p=0.4,
            seed=-(2**50),
            random_alibi=True,
            part=Part(query=37, key=first_key, head=3, heads=9, diagonal=-5),
        )
    )


def test_sinks_that_are_infinite():
    sinks = torch.tensor([-math.inf, 3.0, math.inf, 0.0])
    for queries in (3, 40):
        check(random_problem(query_length=queries, sinks=sinks, upper=-2))


@pytest.mark.parametrize(("queries", "keys"), [(1, 40), (1, 1100), (40, 1100)])
def test_a_sink_of_infinity_takes_everything(dtype, queries, keys):
    sinks = torch.tensor([math.inf, 0.0], dtype=compute_dtype(dtype))
    problem = random_problem(
        batch=1, heads=2, kv_heads=1, query_length=queries, key_length=keys, dtype=dtype, sinks=sinks
    )
    found = decode_shapes.decoded(problem)
    assert (found["out"][:, 0] == 0).all()
    assert (found["lse"][:, 0] == math.inf).all()
    check(problem)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_layouts_of_inputs(dtype, size, layout):
    problem = problem_in_layout(SIZES[size], dtype, layout)
    grad_out, grad_lse = random_gradients(problem)
    if layout in LAYOUTS:
        grad_out = lay_out(grad_out, layout)
    else:
        grad_out = torch.full_like(grad_out[:1, :1, :1, :1], 0.5).expand(grad_out.shape)
        grad_lse = grad_lse[:1, :1, :1].expand(grad_lse.shape)
    actual = results_of_backend(cpu, problem, grad_out, grad_lse)
    assert_close_to_oracle(actual, problem, grad_out, grad_lse)


@pytest.mark.parametrize("size", SIZES)
def test_bias_and_mask_with_odd_strides(dtype, size):
    batch, heads, queries, keys = SIZES[size]
    mask = (torch.rand(keys, heads, 2 * queries, batch) < 0.5).permute(3, 1, 2, 0)[:, :, ::2]
    bias = torch.randn(keys, queries, heads, batch).to(dtype).permute(3, 2, 1, 0)
    first = torch.randint(0, 5, (queries, 2 * batch), dtype=torch.int32).T[::2]
    last = first + keys // 2
    slopes = torch.rand(heads, batch, dtype=compute_dtype(dtype)).T / 4
    sinks = torch.randn(2 * heads, dtype=compute_dtype(dtype))[::2]
    problem = random_problem(
        batch=batch, heads=heads, query_length=queries, key_length=keys, dtype=dtype,
        mask=mask, bias=bias, alibi_slopes=slopes, sinks=sinks, first=first, last=last,
    )  # fmt: skip
    check(problem)


@pytest.mark.parametrize("layout", ["strided", "padded", "transposed"])
@pytest.mark.parametrize("size", SIZES)
def test_writes_its_outputs_and_nothing_beside(dtype, size, layout):
    batch, heads, queries, keys = SIZES[size]
    problem = random_problem(
        batch=batch, heads=heads, query_length=queries, key_length=keys, head_dim=19, dtype=dtype, upper=1000,
        random_bias=(batch, heads, queries, keys),
    )  # fmt: skip
    grad_out, grad_lse = random_gradients(problem)
    small = compute_dtype(dtype)
    storages: list[tuple[Tensor, Tensor]] = []

    def output(like: Tensor, dtype: torch.dtype) -> Tensor:
        *outer, dim = like.shape
        if layout == "strided":
            wide = torch.full((*outer, 3 * dim + 7), math.nan, dtype=dtype)
            view = wide[..., 5 : 5 + 3 * dim : 3]
        elif layout == "padded":
            wide = torch.full((*outer, dim + 3), math.nan, dtype=dtype)
            view = wide[..., 1 : 1 + dim]
        else:
            wide = torch.full((dim, *outer), math.nan, dtype=dtype)
            view = wide.movedim(0, -1)
        storages.append((wide, view))
        return view

    out, lse = output(grad_out, dtype), output(grad_lse, small)
    gradients = Gradients(
        **{name: output(getattr(problem, name), dtype) for name in ("query", "key", "value")},
        bias=output(problem.bias, small),
        alibi_slopes=None,
        sinks=None,
    )
    cpu.forward(problem, out, lse)
    cpu.backward(problem, out, lse, grad_out, grad_lse, gradients)
    actual = {"out": out, "lse": lse}
    actual |= {f"grad_{name}": t for name, t in vars(gradients).items() if t is not None}
    assert_close_to_oracle(actual, problem, grad_out, grad_lse)
    for wide, view in storages:
        view.fill_(math.nan)
        assert torch.isnan(wide).all()


def test_gradients_nobody_wants_are_not_needed(dtype):
    problem = problem_with(SIZES["tiles"], dtype, "bias", "alibi", "sinks")
    grad_out, grad_lse = random_gradients(problem)
    wanted = results_of_backend(cpu, problem, grad_out, grad_lse)
    gradients = Gradients(
        *(torch.full_like(t, math.nan) for t in (problem.query, problem.key, problem.value)), None, None, None
    )
    cpu.backward(problem, wanted["out"], wanted["lse"], grad_out, grad_lse, gradients)
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(gradients, name), wanted[f"grad_{name}"])


def test_large_scores_do_not_overflow(dtype):
    """Scores of thousands (whose exponential no dtype holds) in some rows, thousands below zero in others."""
    problem = random_problem(batch=1, query_length=40, key_length=200, head_dim=8, dtype=dtype, scale=1.0)
    problem.query[:, :, ::3] *= 40
    problem.key *= 20
    for queries in (40, 3):
        part = AttentionProblem(problem.query[:, :, :queries], problem.key, problem.value, 1.0)
        out, lse = (torch.full(s, math.nan) for s in ((1, 4, queries, 8), (1, 4, queries)))
        out, lse = out.to(dtype), lse.to(compute_dtype(dtype))
        cpu.forward(part, out, lse)
        assert_close_to_oracle({"out": out, "lse": lse}, part)


def test_the_oracle_notices_a_wrong_result():
    """The checks above can fail: a result off by one part in a hundred is refused."""
    problem = random_problem(query_length=40)
    grad_out, grad_lse = random_gradients(problem)
    actual = results_by_autograd(problem, grad_out, grad_lse, torch.float32)
    actual["grad_key"] = actual["grad_key"] * 1.01
    with pytest.raises(AssertionError, match="grad_key"):
        assert_close_to_oracle(actual, problem, grad_out, grad_lse)
