"""The same bits whatever the number of threads, and whatever else is in the batch or among the heads."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
import torch
from torch import Tensor

from flashtile import cpu
from flashtile.cpu import engine, workers
from flashtile.cpu.call import NEXT_SLOT
from flashtile.problem import AttentionProblem
from tests.oracle import random_gradients, random_problem, results_of_backend

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def several_threads_for_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_INLINE_FLOPS", 0.0)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), f"{name} {where} is not finite"
        # Not torch.equal: 0 and -0 are different bits.
        same = tensor.contiguous().view(torch.uint8).eq(expected[name].contiguous().view(torch.uint8)).all()
        error = (tensor.double() - expected[name].double()).abs().max()
        assert same, f"{name} differs {where}, by {error:.3g} at most"


def run(problem: AttentionProblem) -> dict[str, Tensor]:
    return results_of_backend(cpu, problem, *random_gradients(problem, torch.Generator().manual_seed(2)))


def seeded_problem(**options: object) -> AttentionProblem:
    return random_problem(generator=torch.Generator().manual_seed(3), **options)


BIASES = [
    (2, 4, 150, 1200), (1, 4, 150, 1200), (2, 1, 150, 1200), (1, 1, 150, 1200), (1, 1, 150, 1),
    (2, 4, 1, 1200), (2, 1, 1, 1), (2, 4, 1, 1), (1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", BIASES)
def test_threads_with_bias(dtype, shape):
    problem = seeded_problem(query_length=150, key_length=1200, dtype=dtype, random_bias=shape, head_dim=8)
    results = {}
    for threads in (1, 2, 3, 3, 8):
        torch.set_num_threads(threads)
        found = run(problem)
        results.setdefault("first", found)
        assert_same_bits(found, results["first"], f"with {threads} threads")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [(6, 2), (14, 2), (71, 1)], ids=str)
def test_threads_with_a_bias_that_odd_groups_share(heads, batch):
    """Tiles end between the heads of a group, whose next head must not yet add to the same row."""
    problem = seeded_problem(
        batch=batch, heads=heads[0], kv_heads=heads[1], query_length=700, key_length=600, head_dim=8,
        random_bias=(1, 1, 700, 600),
    )  # fmt: skip
    results = {}
    for threads in (1, 2, 2, 2, 8):
        torch.set_num_threads(threads)
        found = run(problem)
        results.setdefault("first", found)
        assert_same_bits(found, results["first"], f"with {threads} threads")


OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"upper": 1050, "random_sinks": True},
    "slopes and sinks": {"random_alibi": True, "random_sinks": True},
    "dropout and softcap": {"dropout_p": 0.2, "seed": 9, "softcap": 2.0},
    "one head": {"batch": 1, "heads": 1, "kv_heads": 1},
    "many heads on one key head": {"batch": 1, "heads": 6, "kv_heads": 1, "random_alibi": True},
    "decode": {"batch": 1, "query_length": 2, "key_length": 5000},
    "decode with sinks": {"query_length": 1, "key_length": 2500, "random_sinks": True, "upper": 2300},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("in_forked_child", [False, True], ids=["OpenMP", "Python threads"])
def test_threads(monkeypatch, dtype, name, in_forked_child):
    options = {"query_length": 150, "key_length": 1200, "head_dim": 8, "dtype": dtype, **OPTIONS[name]}
    problem = seeded_problem(**options)
    torch.set_num_threads(1)
    alone = run(problem)
    monkeypatch.setattr(workers, "_in_forked_child", in_forked_child)
    for threads in (2, 3, 3, 8):
        torch.set_num_threads(threads)
        assert_same_bits(run(problem), alone, f"with {threads} threads")


PER_BATCH = ("query", "key", "value", "first", "last", "mask", "bias", "alibi_slopes")


def part(problem: AttentionProblem, batch: slice, heads: slice, kv_heads: slice) -> AttentionProblem:
    """Some batch entries and heads of a problem, as a problem of its own."""

    def pick(tensor: Tensor | None, chosen: tuple[slice, ...]) -> Tensor | None:
        if tensor is None:
            return None
        whole = slice(None)
        return tensor[tuple(whole if tensor.shape[i] == 1 else one for i, one in enumerate(chosen))]

    fields = {
        name: pick(getattr(problem, name), (batch, heads))
        for name in ("query", "mask", "bias", "alibi_slopes")
    }
    fields |= {name: pick(getattr(problem, name), (batch, kv_heads)) for name in ("key", "value")}
    fields |= {name: pick(getattr(problem, name), (batch,)) for name in ("first", "last")}
    fields["sinks"] = pick(problem.sinks, (heads,))
    return dataclasses.replace(problem, **fields)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_length", [1, 4, 150], ids=["decode 1", "decode 4", "tiles"])
@pytest.mark.parametrize("key_length", [5, 1200])
def test_batch_entry_and_key_head_alone(dtype, query_length, key_length):
    """One key head of one batch entry, with its query heads, gives the bits it gives among others."""
    last = torch.tensor([[key_length], [key_length - 2], [key_length]], dtype=torch.int32)
    problem = seeded_problem(
        batch=3, heads=4, kv_heads=2, query_length=query_length, key_length=key_length, head_dim=24,
        dtype=dtype, random_alibi=True, random_sinks=True, random_bias=(3, 4, query_length, key_length),
        last=last, softcap=3.0,
    )  # fmt: skip
    grad_out, grad_lse = random_gradients(problem)
    whole = results_of_backend(cpu, problem, grad_out, grad_lse)
    # Slopes here are shared by the batch and sinks too: their gradients are sums over it.
    per_entry = ("out", "lse", "grad_query", "grad_bias")
    for batch in range(3):
        for kv_head in range(2):
            chosen = (
                slice(batch, batch + 1),
                slice(2 * kv_head, 2 * kv_head + 2),
                slice(kv_head, kv_head + 1),
            )
            alone = results_of_backend(
                cpu, part(problem, *chosen), grad_out[chosen[:2]], grad_lse[chosen[:2]]
            )
            expected = {name: whole[name][chosen[:2]] for name in per_entry}
            expected |= {name: whole[name][chosen[0], chosen[2]] for name in ("grad_key", "grad_value")}
            found = {name: alone[name] for name in expected}
            assert_same_bits(found, expected, f"alone (batch entry {batch}, key head {kv_head})")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_length", [1, 4, 150])
@pytest.mark.parametrize("key_length", [5, 130, 1200])
@pytest.mark.parametrize("upper", [None, 750])
def test_head_alone_or_in_a_group(dtype, query_length, key_length, upper):
    """A query head that shares its keys with others gives the bits it gives on its own.

    Where later queries see more keys, its last tile is longer beside them.
    """
    problem = seeded_problem(
        batch=1,
        heads=6,
        kv_heads=1,
        query_length=query_length,
        key_length=key_length,
        head_dim=24,
        dtype=dtype,
        upper=upper,
    )
    grad_out, grad_lse = random_gradients(problem)
    whole = results_of_backend(cpu, problem, grad_out, grad_lse)
    for head in range(6):
        chosen = (slice(None), slice(head, head + 1), slice(None))
        alone = results_of_backend(cpu, part(problem, *chosen), grad_out[chosen[:2]], grad_lse[chosen[:2]])
        names = ("out", "lse", "grad_query")
        expected = {name: whole[name][chosen[:2]] for name in names}
        assert_same_bits({name: alone[name] for name in names}, expected, f"for head {head} alone")


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_in_the_batch_do_not_matter(dtype):
    """Other numbers, NaN among them, in the other entries."""
    problem = seeded_problem(batch=3, query_length=70, key_length=140, dtype=dtype)
    first = run(problem)
    for name in ("query", "key", "value"):
        tensor = getattr(problem, name)
        tensor[0], tensor[2] = -tensor[2], float("nan")
    second = run(problem)
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    assert_same_bits({n: second[n][1] for n in names}, {n: first[n][1] for n in names}, "beside NaN")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_large_scores_beside_do_not_matter(dtype, with_bias):
    """Nor does an LSE so large that float32 cannot tell its row's probabilities from it."""
    bias = (2, 4, 70, 140) if with_bias else None
    problem = seeded_problem(batch=2, query_length=70, key_length=140, dtype=dtype, random_bias=bias)
    first = run(problem)
    problem.query[0] *= 1e4
    problem.key[0] *= 1e2
    second = run(problem)
    assert second["lse"][0].abs().max() > 1e5
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    assert_same_bits({n: second[n][1] for n in names}, {n: first[n][1] for n in names}, "beside large scores")


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For every kernel run: its tasks, and the threads that came to take them."""
    seen = []
    original = engine.run

    def run(entry: object, call: array[int], tasks: int, scratch_bytes: int, work: float) -> None:
        original(entry, call, tasks, scratch_bytes, work)
        seen.append((tasks, call[NEXT_SLOT]))

    monkeypatch.setattr(engine, "run", run)
    return seen


@pytest.mark.parametrize("in_forked_child", [False, True], ids=["OpenMP", "Python threads"])
@pytest.mark.parametrize("query_length", [512, 1])
def test_one_head_occupies_several_threads(monkeypatch, visits, query_length, in_forked_child):
    monkeypatch.setattr(workers, "_in_forked_child", in_forked_child)
    torch.set_num_threads(2)
    options = {
        "batch": 1,
        "heads": 1,
        "kv_heads": 1,
        "query_length": query_length,
        "key_length": 8192,
        "head_dim": 64,
    }
    problem = seeded_problem(**options)
    most = 0
    for _ in range(100):  # a Python thread that wakes late finds nothing left to do
        run(problem)
        main_runs = [threads for tasks, threads in visits if tasks > 1]
        assert main_runs, "everything was one task"
        most = max(most, *main_runs)
        if most > 1:
            return
    pytest.fail("only one thread ever came")
