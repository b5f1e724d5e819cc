"""The backward kernels against the float64 oracle: every gradient, written over NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from flashtile import masks
from flashtile.problem import AttentionProblem, Gradients, Part, compute_dtype
from flashtile.reference import sequence
from tests.conftest import dtype_name
from tests.gpu.running import DTYPES, INTERPRETED, engine, moved, on_device, results
from tests.nonfinite import MASKS, check_infinity, check_minus_infinity, check_nan, masked_problem
from tests.options import ALL_AT_ONCE, NAMES, problem_with
from tests.oracle import (
    assert_close_by_sequence,
    assert_close_to_oracle,
    largest_error,
    random_gradients,
    random_problem,
    results_by_autograd,
    rounding_floors,
    standard_errors,
)
from tests.packing import KEYS, OPTIONS, PLANES, packed_problem_with
from tests.strategies import ALL_LAYOUTS, lay_out, problem_in_layout

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
# batch, query heads, query length, key length
SIZES = (2, 2, 40, 100)
ONE_GROUP = {"heads": 2, "kv_heads": 1}


def check(problem: AttentionProblem, grad_out: Tensor | None = None, grad_lse: Tensor | None = None) -> None:
    """The gradients by the oracle; random `grad_out` and `grad_lse` unless one is given."""
    if grad_out is None:
        grad_out, grad_lse = random_gradients(problem, torch.Generator().manual_seed(13))
    assert_close_to_oracle(results(problem, grad_out, grad_lse), problem, grad_out, grad_lse)


@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    ("query_length", "key_length"),
    [(1, 1), (3, 1), (1, 3), (63, 65), (65, 63), (65, 1), (127, 127), (127, 3), (129, 200)],
)
def test_lengths(dtype, query_length, key_length, causal):
    check(
        random_problem(
            batch=1, heads=2, kv_heads=1, query_length=query_length, key_length=key_length, dtype=dtype,
            mask=masks.causal(alignment="bottom-right") if causal else None,
        )
    )  # fmt: skip


@each_dtype
@pytest.mark.parametrize(
    ("head_dim", "value_head_dim"),
    [(1, 1), (16, 16), (20, 20), (64, 64), (80, 80), (128, 128), (1, 64), (64, 1), (33, 80), (130, 16)],
)
def test_head_dims(dtype, head_dim, value_head_dim):
    check(
        random_problem(
            batch=1, heads=1, kv_heads=1, query_length=70, key_length=45, head_dim=head_dim,
            value_head_dim=value_head_dim, dtype=dtype,
        )
    )  # fmt: skip


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (3, 1), (6, 2)])
def test_heads_share_keys(dtype, heads, kv_heads):
    check(random_problem(heads=heads, kv_heads=kv_heads, query_length=66, key_length=19, dtype=dtype))


@each_dtype
@pytest.mark.parametrize("name", NAMES)
def test_option(dtype, name):
    check(problem_with(SIZES, dtype, name))


@pytest.mark.parametrize(
    "chosen",
    [
        ("band", "alibi"), ("band", "dropout"), ("intervals", "alibi"), ("intervals", "bias of keys"),
        ("softcap", "alibi"), ("softcap", "negative scale"), ("bias with holes", "dropout"),
        ("mask", "bias of keys"), ("dropout", "sinks"), ("first", "unequal head_dim"),
    ],
    ids=" and ".join,
)  # fmt: skip
def test_options_together(chosen):
    check(problem_with((1, 2, 68, 70), DTYPES[0], *chosen))


@each_dtype
def test_everything_at_once(dtype):
    check(problem_with((2, 4, 40, 100), dtype, *ALL_AT_ONCE))


@pytest.mark.parametrize("first_key", [0, 1, 2, 3, 1000])
@pytest.mark.parametrize("queries", [2, 40])
def test_a_part_of_a_larger_problem(queries, first_key):
    """Dropout and ALiBi count positions and heads in the whole; quads of random words start anywhere."""
    part = Part(query=37, key=first_key, head=3, heads=9, diagonal=-5)
    check(
        random_problem(
            **ONE_GROUP, query_length=queries, key_length=70, dropout_p=0.4, seed=-(2**50), random_alibi=True,
            part=part,
        )
    )  # fmt: skip


def test_parts_get_their_share_of_the_whole_rows():
    """As in ring attention: keys in two parts, the LSE, output and its gradient of the whole."""
    options = {"dropout_p": 0.3, "seed": 5, "random_alibi": True, "random_sinks": True}
    whole = random_problem(query_length=40, key_length=90, **options)
    grad_out, grad_lse = random_gradients(whole)
    exact = results_by_autograd(whole, grad_out, grad_lse, torch.float64)
    out, lse = exact["out"].to(grad_out.dtype), exact["lse"].to(grad_lse.dtype)
    found = []
    for first, last in ((0, 35), (35, 90)):
        part = dataclasses.replace(
            whole, key=whole.key[:, :, first:last], value=whole.value[:, :, first:last], sinks=None,
            part=Part(key=first, heads=4, diagonal=50),
        )  # fmt: skip
        gradients = gradients_of(part)
        engine.backward(on_device(part), *(moved(x) for x in (out, lse, grad_out, grad_lse)), gradients)
        found.append(gradients)
    actual = {
        "grad_query": sum(one.query.cpu() for one in found),
        "grad_key": torch.cat([one.key.cpu() for one in found], 2),
        "grad_value": torch.cat([one.value.cpu() for one in found], 2),
        "grad_alibi_slopes": sum(one.alibi_slopes.cpu() for one in found),
    }
    assert_close_to_oracle(actual, whole, grad_out, grad_lse)


@pytest.mark.parametrize("broadcast", list(itertools.product((True, False), repeat=4)))
def test_bias_broadcasts(broadcast):
    batch, heads, queries, keys = sizes = (2, 2, 66, 37)
    shape = tuple(1 if one else n for one, n in zip(broadcast, sizes, strict=True))
    check(
        random_problem(
            batch=batch, heads=heads, query_length=queries, key_length=keys, random_bias=shape,
            mask=masks.causal(alignment="bottom-right"), kv_heads=1,
        )
    )  # fmt: skip


@each_dtype
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_layouts(dtype, layout):
    problem = problem_in_layout((2, 4, 40, 100), dtype, layout)
    grad_out, grad_lse = random_gradients(problem)
    check(problem, lay_out(grad_out, layout), lay_out(grad_lse[..., None], layout)[..., 0])


@each_dtype
def test_one_number_as_grad_out(dtype):
    """What the gradient of a sum is: a single number, every stride 0."""
    problem = random_problem(**ONE_GROUP, query_length=70, dtype=dtype)
    one = torch.ones((), dtype=dtype)
    check(problem, one.expand(2, 2, 70, 16), torch.ones(()).expand(2, 2, 70))
    check(problem, one.expand(2, 2, 70, 16))


def gradients_of(problem: AttentionProblem, layout: str = "plain", **fields: Tensor | None) -> Gradients:
    """Gradients on the device full of NaN, in some layout; `fields` may be None instead."""
    small = compute_dtype(problem.query.dtype)

    def poisoned(name: str, dtype: torch.dtype) -> Tensor | None:
        tensor = getattr(problem, name)
        if tensor is None or name in fields:
            return None
        tensor = torch.full(tensor.shape, math.nan, dtype=dtype)
        return moved(lay_out(tensor, layout) if tensor.dim() == 4 else tensor)

    inputs = {name: poisoned(name, problem.query.dtype) for name in ("query", "key", "value")}
    return Gradients(**inputs, **{name: poisoned(name, small) for name in ("bias", "alibi_slopes", "sinks")})


def backward(problem: AttentionProblem, gradients: Gradients) -> dict[str, Tensor]:
    """The results of one call, whose backward pass writes into `gradients`."""
    upstream = random_gradients(problem, torch.Generator().manual_seed(13))
    found = results(problem, *upstream)
    saved = moved(found["out"]), moved(found["lse"])
    engine.backward(on_device(problem), *saved, *(moved(tensor) for tensor in upstream), gradients)
    return found


@pytest.mark.parametrize("layout", ["strided", "transposed"])
def test_writes_its_gradients_and_nothing_beside(layout):
    problem = random_problem(batch=1, query_length=70, key_length=40, head_dim=19, random_bias=(1, 4, 70, 40))
    gradients = gradients_of(problem, layout)
    expected = backward(problem, gradients)
    for name in ("query", "key", "value", "bias"):
        view = getattr(gradients, name)
        assert torch.equal(view.cpu(), expected[f"grad_{name}"]), name
        view.fill_(math.nan)
        assert torch.isnan(torch.empty(0).to(view).set_(view.untyped_storage())).all(), name


def test_gradients_that_nobody_wants():
    problem = random_problem(
        **ONE_GROUP, query_length=70, key_length=40, random_bias=(1, 2, 70, 40), random_alibi=True,
        random_sinks=True,
    )  # fmt: skip
    gradients = gradients_of(problem, bias=None, alibi_slopes=None, sinks=None)
    expected = backward(problem, gradients)
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(gradients, name).cpu(), expected[f"grad_{name}"])


@each_dtype
@pytest.mark.parametrize(("query_length", "key_length"), [(70, 0), (3, 0), (0, 70)])
def test_nothing_on_one_side(dtype, query_length, key_length):
    check(
        random_problem(
            query_length=query_length, key_length=key_length, dtype=dtype, random_sinks=True,
            random_alibi=True, random_bias=(1, 4, query_length, key_length),
        )
    )  # fmt: skip


def test_sinks_that_are_infinite():
    sinks = torch.tensor([-math.inf, 3.0, math.inf, 0.0])
    check(random_problem(query_length=40, sinks=sinks, upper=-2))


def test_sink_that_counts_for_nothing_beside_a_nan():
    problem = random_problem(sinks=torch.tensor([-math.inf, 3.0, 0.0, 1.0]))
    problem.query[0, :, 3] = math.nan
    found = results(problem, *random_gradients(problem))["grad_sinks"]
    assert found[0] == 0
    assert found[1:].isnan().all()


@each_dtype
def test_large_scores(dtype):
    """Probabilities that are recomputed from a LSE of thousands."""
    problem = random_problem(batch=1, query_length=40, key_length=200, head_dim=8, dtype=dtype, scale=1.0)
    problem.query[:, :, ::3] *= 40
    problem.key *= 20
    check(problem)


@pytest.mark.parametrize(
    ("low", "with_sinks"),
    [
        (-1e10, True), (-3e4, False),
        pytest.param(-1e10, False, marks=pytest.mark.slow), pytest.param(-3e4, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_rows_whose_lse_cannot_tell_their_keys(low, with_sinks):
    """A low bias on every key of some rows: in float32 their LSE is that of one key."""
    bias = torch.zeros(1, 1, 70, 1)
    bias[:, :, 5:40] = low
    bias = bias.repeat(1, 1, 1, 140)
    bias[:, :, 20:30, ::2] = 0.0
    problem = random_problem(
        batch=1, **ONE_GROUP, query_length=70, key_length=140, bias=bias, random_sinks=with_sinks
    )
    if with_sinks:
        problem.sinks += low
    check(problem)


def test_a_large_lse_in_one_sequence_leaves_the_others_alone():
    problem = random_problem(**ONE_GROUP, query_length=70, key_length=140, random_bias=(2, 1, 1, 140))
    upstream = random_gradients(problem)
    expected = results(problem, *upstream)
    problem.bias[0] -= 1e10
    found = results(problem, *upstream)
    for name in ("grad_query", "grad_key", "grad_value", "grad_bias"):
        assert torch.equal(found[name][1], expected[name][1]), name
        assert not torch.equal(found[name][0], expected[name][0]), name


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias given"])
def test_nan_reaches_what_sees_it(dtype, mask, with_bias):
    check_nan(results, masked_problem(40, 70, dtype, mask, with_bias))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_reaches_what_sees_it(mask, value):
    check_infinity(results, masked_problem(40, 70, DTYPES[0], mask), value)


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("chosen", [(), ("band",), ("mask", "dropout")], ids=str)
def test_nan_by_the_oracle(dtype, name, chosen):
    problem = problem_with((1, 4, 40, 70), dtype, *chosen)
    grad_out, grad_lse = random_gradients(problem)
    (grad_out if name == "grad_out" else getattr(problem, name))[0, 1, 33, 5] = math.nan
    check(problem, grad_out, grad_lse)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_whose_scores_are_all_minus_infinity(sinks):
    check_minus_infinity(results, 40, 70, sinks)


def test_rows_hidden_from_nan_everywhere():
    problem = random_problem(query_length=70, key_length=50, upper=-70, random_bias=(1, 1, 70, 50))
    grad_out, grad_lse = random_gradients(problem)
    for tensor in (problem.query, problem.key, problem.value, grad_out, grad_lse):
        tensor.fill_(math.nan)
    for name, tensor in results(problem, grad_out, grad_lse).items():
        assert (tensor == (-math.inf if name == "lse" else 0)).all(), name


SMALL = ("bias", "alibi_slopes", "sinks")


@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=dtype_name)
@pytest.mark.parametrize("options", (OPTIONS | PLANES).values(), ids=OPTIONS | PLANES)
def test_packed_sequences(dtype, options):
    problem = packed_problem_with(options, dtype)
    grad_out, grad_lse = random_gradients(problem)
    found = results(problem, grad_out, grad_lse)
    for name in ("grad_key", "grad_value"):
        assert (found[name][:, :, sum(KEYS) :] == 0).all()
    small = {name: found.pop(f"grad_{name}") for name in SMALL if f"grad_{name}" in found}
    assert_close_by_sequence(found, problem, grad_out, grad_lse)
    for name, gradient in small.items():
        assert_close_to_sum(name, gradient, problem, grad_out, grad_lse)


def assert_close_to_sum(
    name: str, found: Tensor, problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor
) -> None:
    """A gradient to which every sequence adds, by the oracle's rule for each of them."""
    expected, allowed = torch.zeros_like(found, dtype=torch.float64), 0.0
    for index in range(problem.sequences):
        own = sequence(problem, index)
        rows = slice(*problem.query_starts[index : index + 2].tolist())
        upstream = grad_out[:, :, rows], grad_lse[:, :, rows]
        exact = results_by_autograd(own, *upstream, torch.float64)
        part = exact[f"grad_{name}"]
        place = tuple(slice(size) for size in part.shape)
        if name != "sinks" and found.shape[0] > 1:
            place = (slice(index, index + 1), *place[1:])
        expected[place] += part
        if part.numel():
            allowed += 2 * standard_errors(own, *upstream, exact)[f"grad_{name}"]
            allowed += rounding_floors(own, *upstream, exact)[f"grad_{name}"]
    assert largest_error(found, expected) <= allowed
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_plane_that_ends_before_a_sequence_does(name):
    """Lengths on a device are not checked by the front door: nothing is seen beyond the plane."""
    plane = torch.randn(1, 4, 60, 80)
    plane = plane if name == "bias" else plane > 0
    short = packed_problem_with({name: plane}, torch.float32)
    beyond = -math.inf if name == "bias" else False
    padded = dataclasses.replace(
        short, **{name: torch.nn.functional.pad(plane, (0, max(KEYS) - 80, 0, 10), value=beyond)}
    )
    upstream = random_gradients(short)
    found, expected = results(short, *upstream), results(padded, *upstream)
    if name == "bias":
        expected["grad_bias"] = expected["grad_bias"][:, :, :60, :80]
    for part in expected:
        assert torch.equal(found[part], expected[part]), part


def test_packed_sequences_of_one_length_get_what_a_batch_gets():
    """Dropout too, which numbers them."""
    fields = {"dropout_p": 0.4, "seed": 99}
    batched = random_problem(
        batch=3,
        **ONE_GROUP,
        query_length=70,
        key_length=50,
        random_sinks=True,
        random_bias=(1, 1, 70, 50),
        **fields,
    )
    batched.alibi_slopes = torch.rand(3, 2)
    grad_out, grad_lse = random_gradients(batched)

    def pack(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).flatten(1, 2)[None]

    inputs = {name: pack(getattr(batched, name)) for name in ("query", "key", "value")}
    starts = {"query_starts": torch.arange(4) * 70, "key_starts": torch.arange(4) * 50}
    one_by_one = dataclasses.replace(batched, **inputs, **starts)
    expected = results(batched, grad_out, grad_lse)
    found = results(one_by_one, pack(grad_out), pack(grad_lse))
    for name in ("grad_query", "grad_key", "grad_value"):
        assert torch.equal(found[name], pack(expected[name])), name
    for name in ("grad_bias", "grad_alibi_slopes"):
        assert torch.equal(found[name], expected[name]), name


@each_dtype
def test_bits_do_not_depend_on_the_batch(dtype):
    problem = random_problem(
        batch=3, **ONE_GROUP, query_length=80, key_length=130, random_sinks=True, dtype=dtype,
        mask=masks.causal(alignment="bottom-right"),
    )  # fmt: skip
    upstream = random_gradients(problem)
    together = results(problem, *upstream)
    for b in (0, 2):
        inputs = {name: getattr(problem, name)[b : b + 1] for name in ("query", "key", "value")}
        own = dataclasses.replace(problem, **inputs)
        alone = results(own, *(tensor[b : b + 1] for tensor in upstream))
        for name in ("grad_query", "grad_key", "grad_value"):
            assert torch.equal(alone[name][0], together[name][b]), name
