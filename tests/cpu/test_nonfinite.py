"""NaN and infinities in the input reach the rows that see them and nothing else, forward and backward.

What they may reach follows from who sees whom, without any arithmetic: that is the reference here. A NaN
reaches all of it; an infinity, which arithmetic may turn into a finite number, the rows with such a score.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flashtile import cpu
from flashtile.problem import AttentionProblem
from flashtile.reference import visible_keys
from tests.oracle import random_gradients, random_problem, results_of_backend

HEADS = 2  # query heads on one key head
SIZES = {"tiles": (40, 150), "decode": (2, 1040)}


class Place(NamedTuple):
    """Where the poison goes: an input and its row (bias: one entry)."""

    name: str
    index: tuple[int, ...]


def masked(problem: AttentionProblem, mask: str) -> AttentionProblem:
    """Every mask hides key 12 from all rows, and key 9 from some (except "none")."""
    queries, keys = problem.query.shape[2], problem.key.shape[2]
    seen = torch.rand(1, HEADS, queries, keys, generator=torch.Generator().manual_seed(5)) < 0.7
    seen[..., 12] = False
    seen[:, 0, 0, 9], seen[:, 1, 1, 9] = True, False
    fields: dict[str, object] = {}
    if mask == "causal":  # the last keys are seen by nobody, key 9 by the later rows
        fields = {"upper": 9 - queries // 2}
    elif mask == "window":
        fields = {"lower": -30 if queries > 3 else 8, "upper": 9 - queries // 2}
    elif mask == "intervals":
        first = torch.full((1, queries), 13, dtype=torch.int32)
        first[:, 0] = 0
        last = torch.full((1, queries), keys, dtype=torch.int32)
        last[:, 0] = 11
        fields = {"first": first, "last": last}
    elif mask == "dense":
        fields = {"mask": seen}
    elif mask == "bias":
        fields = {"bias": torch.where(seen, 0.5, -math.inf).to(problem.query.dtype)}
    if problem.bias is not None and mask != "bias":
        fields["bias"] = problem.bias
    return dataclasses.replace(problem, **fields)


MASKS = ("none", "causal", "window", "intervals", "dense", "bias")


def places(problem: AttentionProblem) -> list[Place]:
    """Rows of every input, seen and hidden."""
    visible = visible_keys(problem)[0]
    rows = visible.shape[1]
    hidden = [j for j in (12, visible.shape[2] - 1) if not visible[..., j].any()]
    found = [Place(name, (0, 0, j)) for name in ("key", "value") for j in (9, *hidden)]
    found += [Place("query", (0, head, row)) for head, row in ((0, 0), (1, rows - 1))]
    found += [Place("grad_out", (0, head, row)) for head, row in ((0, 0), (1, rows - 1))]
    if problem.bias is not None:
        head, row, key = visible.nonzero()[len(visible) // 2].tolist()
        found.append(Place("bias", (0, head, row, key)))
        unseen = (~visible).nonzero()
        finite = [(h, i, j) for h, i, j in unseen.tolist() if problem.bias[0, h, i, j] != -math.inf]
        found += [Place("bias", (0, *finite[0]))] if finite else []
    return found


def poisoned(
    problem: AttentionProblem, grad_out: Tensor, place: Place, value: float
) -> tuple[AttentionProblem, Tensor]:
    inputs = {name: getattr(problem, name) for name in ("query", "key", "value", "bias")} | {
        "grad_out": grad_out
    }
    inputs[place.name] = inputs[place.name].clone()
    inputs[place.name][place.index] = value
    grad_out = inputs.pop("grad_out")
    return dataclasses.replace(problem, **inputs), grad_out


def reached(visible: Tensor, place: Place) -> dict[str, Tensor]:
    """What a NaN reaches: bool per row of each result (grad_bias: per entry)."""
    rows = torch.zeros(visible.shape[:2], dtype=torch.bool)
    if place.name in ("query", "grad_out"):
        rows[place.index[1:]] = visible[place.index[1:]].any()
    elif place.name == "bias":
        rows[place.index[1:3]] = visible[place.index[1:]]
    else:
        rows = visible[..., place.index[2]].clone()
    entries = visible & rows[..., None]
    nothing, keys = torch.zeros_like(rows), entries.any(dim=0).any(dim=0)
    forward = place.name != "grad_out"
    scores = forward and place.name != "value"
    return {
        "out": rows if forward else nothing,
        "lse": rows if scores else nothing,
        "grad_query": rows,
        "grad_key": keys[None],
        "grad_value": keys[None] if place.name != "value" else torch.zeros_like(keys)[None],
        "grad_bias": entries,
    }


def problem_of(size: str, dtype: torch.dtype, mask: str, with_bias: bool) -> AttentionProblem:
    queries, keys = SIZES[size]
    problem = random_problem(
        batch=1, heads=HEADS, kv_heads=1, query_length=queries, key_length=keys, head_dim=6, dtype=dtype,
        random_bias=(1, HEADS, queries, keys) if with_bias else None,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    return masked(problem, mask)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias given"])
def test_nan_reaches_what_sees_it(dtype, size, mask, with_bias):
    problem = problem_of(size, dtype, mask, with_bias)
    grad_out, grad_lse = random_gradients(problem)
    clean = results_of_backend(cpu, problem, grad_out, grad_lse)
    visible = visible_keys(problem)[0]
    for place in places(problem):
        results = results_of_backend(cpu, *poisoned(problem, grad_out, place, math.nan), grad_lse)
        for name, touched in reached(visible, place).items():
            if name not in results:
                continue
            found = results[name][0]
            if found.dim() == touched.dim() + 1:
                touched = touched[..., None].expand(found.shape)
            wrong = torch.isnan(found) != touched
            assert not wrong.any(), (
                f"{name}, NaN in {place}: at {wrong.nonzero()[:5].tolist()} ({int(wrong.sum())} places) "
                f"found {found[wrong][:5].tolist()}, expected NaN there: {touched[wrong][:5].tolist()}"
            )
            untouched = clean[name][0][~touched]
            torch.testing.assert_close(found[~touched], untouched, rtol=2e-2, atol=1e-2)


def spoilt_rows(problem: AttentionProblem, place: Place) -> Tensor:
    """The rows that an infinity must spoil: bool (heads, rows). A score of -inf hides its key instead."""
    visible = visible_keys(problem)[0]
    if place.name == "grad_out":
        rows = torch.zeros(visible.shape[:2], dtype=torch.bool)
        rows[place.index[1:]] = visible[place.index[1:]].any()
        return rows
    if place.name == "value":
        return visible[..., place.index[2]]
    scores = (problem.query.double()[..., None, :] * problem.key.double()[:, :, None]).sum(-1)[0]
    if problem.bias is not None:
        scores = scores + problem.bias[0].double()
    return (visible & ~(scores < math.inf)).any(-1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_reaches_what_sees_it(dtype, size, mask, value):
    problem = problem_of(size, dtype, mask, with_bias=False)
    grad_out, grad_lse = random_gradients(problem)
    clean = results_of_backend(cpu, problem, grad_out, grad_lse)
    visible = visible_keys(problem)[0]
    for place in places(problem):
        if place.name == "bias" and value == -math.inf:
            continue  # a mask
        bad, bad_grad_out = poisoned(problem, grad_out, place, value)
        results = results_of_backend(cpu, bad, bad_grad_out, grad_lse)
        spoilt = spoilt_rows(bad, place)
        for name in ("grad_query",) if place.name == "grad_out" else ("out", "grad_query"):
            laundered = spoilt[..., None] & torch.isfinite(results[name][0])
            assert not laundered.any(), (
                f"{name}, {value} in {place}: finite at {laundered.nonzero()[:5].tolist()}"
            )
        for name, may_touch in reached(visible, place).items():
            if name in results:
                found = results[name][0]
                touched = (
                    may_touch if found.dim() == may_touch.dim() else may_touch[..., None].expand(found.shape)
                )
                torch.testing.assert_close(
                    found[~touched],
                    clean[name][0][~touched],
                    rtol=2e-2,
                    atol=1e-2,
                    msg=lambda m, n=name, p=place: f"{n}, {value} in {p}: {m}",
                )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "grad_lse"])
def test_nan_in_small_arguments(dtype, size, name):
    """A NaN slope or sink reaches the rows of its head, a NaN dLSE its row; hidden keys get no gradient."""
    queries, keys = SIZES[size]
    problem = random_problem(
        batch=1, heads=2, kv_heads=2, query_length=queries, key_length=keys, head_dim=6, dtype=dtype,
        random_alibi=True, random_sinks=True, upper=11,
    )  # fmt: skip
    grad_out, grad_lse = random_gradients(problem)
    if name == "alibi_slopes":
        problem.alibi_slopes[0, 1] = math.nan
    elif name == "sinks":
        problem.sinks[1] = math.nan
    else:
        grad_lse[0, 1, 0] = math.nan
    results = results_of_backend(cpu, problem, grad_out, grad_lse)
    for result, tensor in results.items():
        if (result.startswith("grad_") and tensor.dim() == 4) or result in ("out", "lse"):
            assert torch.isfinite(tensor[:, 0]).all(), f"{result} of the other head"
    reached = 12 if name == "grad_lse" else queries + 11  # keys that a row with NaN sees
    for result in ("grad_key", "grad_value"):
        nan = torch.isnan(results[result][0, 1])
        assert not nan[reached:].any(), f"{result} of keys that no such row sees"
        assert nan[:reached].all() == (result == "grad_key" or name != "grad_lse"), result
    assert torch.isnan(results["out"][0, 1]).all() == (name != "grad_lse")


def test_a_nan_in_a_split_of_its_own_is_not_lost(dtype):
    """Decoding in splits: the only key of the second split that a row sees is NaN, first of four."""
    first = torch.tensor([[1020]], dtype=torch.int32)
    problem = random_problem(
        batch=1, query_length=1, key_length=2048, dtype=dtype, first=first, last=first + 5
    )
    problem.key[:, :, 1024] = math.nan
    results = results_of_backend(cpu, problem, *random_gradients(problem))
    assert torch.isnan(results["out"]).all()
    assert torch.isnan(results["lse"]).all()


def test_all_rows_hidden_from_nan_everywhere(dtype):
    """Rows that see nothing give 0 and -inf whatever the inputs hold."""
    for queries, keys in SIZES.values():
        problem = random_problem(batch=1, query_length=queries, key_length=keys, dtype=dtype, upper=-queries)
        for tensor in (problem.query, problem.key, problem.value):
            tensor.fill_(math.nan)
        grad_out, grad_lse = (torch.full_like(t, math.nan) for t in random_gradients(problem))
        results = results_of_backend(cpu, problem, grad_out, grad_lse)
        assert (results.pop("lse") == -math.inf).all()
        for name, tensor in results.items():
            assert (tensor == 0).all(), name


def test_sink_that_counts_for_nothing_beside_a_nan():
    problem = random_problem(random_sinks=True)
    assert problem.sinks is not None
    problem.sinks[0] = -math.inf
    problem.query[0, :, 3] = math.nan
    results = results_of_backend(cpu, problem, *random_gradients(problem))
    assert results["grad_sinks"][0] == 0
    assert results["grad_sinks"][1:].isnan().all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_slope_does_not_uncover_what_a_bias_hides(dtype, size):
    """Minus infinity and NaN add up to NaN: the bias has to hide its keys by itself."""
    queries, keys = SIZES[size]
    bias = torch.zeros(1, 1, queries, keys)
    bias[..., keys // 2 :] = -math.inf
    bias[:, :, 0] = -math.inf  # a row that sees nothing
    problem = random_problem(
        batch=1, heads=2, kv_heads=2, query_length=queries, key_length=keys, head_dim=6, dtype=dtype,
        random_alibi=True, bias=bias.to(dtype),
    )  # fmt: skip
    problem.alibi_slopes[0, 1] = math.nan
    results = results_of_backend(cpu, problem, *random_gradients(problem))
    assert torch.isnan(results["out"][0, 1, 1:]).all()
    assert (results["out"][0, :, 0] == 0).all()
    for name in ("grad_key", "grad_value"):
        assert torch.isnan(results[name][0, 1, : keys // 2]).all()
        assert (results[name][0, :, keys // 2 :] == 0).all()
        assert torch.isfinite(results[name][0, 0]).all()
