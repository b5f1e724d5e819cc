"""NaN and infinities in the input reach the rows that see them and nothing else, forward and backward.

What they may reach follows from who sees whom, without any arithmetic: that is the reference here. A NaN
reaches all of it; an infinity, which arithmetic may turn into a finite number, the rows with such a score.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.problem import AttentionProblem
from flashtile.reference import visible_keys
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem, results_by_autograd

HEADS = 2  # query heads on one key head

# From a problem, grad_out and grad_lse to the results by name; those of a forward pass may be all.
Run = Callable[[AttentionProblem, Tensor, Tensor], Mapping[str, Tensor]]


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


def places(problem: AttentionProblem, backward: bool) -> list[Place]:
    """Rows of every input, seen and hidden."""
    visible = visible_keys(problem)[0]
    rows = visible.shape[1]
    hidden = [j for j in (12, visible.shape[2] - 1) if not visible[..., j].any()]
    found = [Place(name, (0, 0, j)) for name in ("key", "value") for j in (9, *hidden)]
    found += [Place("query", (0, head, row)) for head, row in ((0, 0), (1, rows - 1))]
    if backward:
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


def masked_problem(
    queries: int, keys: int, dtype: torch.dtype, mask: str, with_bias: bool = False
) -> AttentionProblem:
    """One sequence whose rows do not all see the same."""
    problem = random_problem(
        batch=1, heads=HEADS, kv_heads=1, query_length=queries, key_length=keys, head_dim=6, dtype=dtype,
        random_bias=(1, HEADS, queries, keys) if with_bias else None,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    return masked(problem, mask)


def check_nan(run: Run, problem: AttentionProblem) -> None:
    """A NaN anywhere in the inputs reaches exactly what sees it."""
    grad_out, grad_lse = random_gradients(problem)
    clean = run(problem, grad_out, grad_lse)
    visible = visible_keys(problem)[0]
    for place in places(problem, "grad_query" in clean):
        results = run(*poisoned(problem, grad_out, place, math.nan), grad_lse)
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


def check_infinity(run: Run, problem: AttentionProblem, value: float) -> None:
    """An infinity spoils the rows with such a score, and changes nothing that does not see it."""
    grad_out, grad_lse = random_gradients(problem)
    clean = run(problem, grad_out, grad_lse)
    visible = visible_keys(problem)[0]
    for place in places(problem, "grad_query" in clean):
        if place.name == "bias" and value == -math.inf:
            continue  # a mask
        bad, bad_grad_out = poisoned(problem, grad_out, place, value)
        results = run(bad, bad_grad_out, grad_lse)
        spoilt = spoilt_rows(bad, place)
        spoiling = ("grad_query",) if place.name == "grad_out" else ("out", "grad_query")
        for name in results.keys() & spoiling:
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


def check_infinite_sink(run: Run, queries: int, keys: int) -> None:
    """A sink of infinity leaves nothing to the keys, but a NaN that its rows see stays in their output."""
    sinks = torch.tensor([math.inf, 0.5])
    problem = random_problem(
        batch=1, heads=2, kv_heads=1, query_length=queries, key_length=keys, sinks=sinks, upper=keys - queries
    )
    problem.query[:, :, 0, 3] = math.nan
    problem.value[:, :, -1, 2] = math.nan  # seen by the last query alone
    found = run(problem, *random_gradients(problem))
    assert_close_to_oracle({name: found[name] for name in ("out", "lse")}, problem)


def check_minus_infinity(run: Run, queries: int, keys: int, sinks: bool) -> None:
    """Rows whose scores are all -inf, of infinite queries or of an overflow: 0, as if they saw nothing."""
    bias = torch.zeros(1, 1, queries, keys)
    bias[:, :, 0] = torch.finfo(torch.float32).min
    problem = random_problem(
        batch=1, query_length=queries, key_length=keys, random_sinks=sinks, scale=1.0, bias=bias
    )
    problem.key.abs_()
    problem.query[:, :, 0] = -1e38  # scores of -1e38 and less, under the lowest bias
    problem.query[:, 1:, 1] = -math.inf
    upstream = random_gradients(problem)
    found, expected = run(problem, *upstream), results_by_autograd(problem, *upstream, torch.float32)
    assert (found["out"][:, :, 0] == 0).all()
    assert (found["out"][:, 1:, 1] == 0).all()
    assert sinks or (found["lse"][:, :, 0] == -math.inf).all()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
