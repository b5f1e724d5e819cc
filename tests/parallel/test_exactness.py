"""Every way to attend over several ranks, with every option, against the oracle of the whole sequence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flashtile import masks
from tests.oracle import assert_close_to_oracle
from tests.parallel.jobs import Case, attend, attend_twice
from tests.parallel.ranks import Ranks

_DOCUMENTS = [[0] * 20 + [1] * 3 + [2] * 38, [7] * 61]
_RANGE = torch.arange(61)
OPTIONS = {
    "plain": (None, {}),
    "causal": (masks.causal(), {}),
    "window": (masks.window(7, 0), {}),
    "both sides": (masks.window(6, 3), {}),
    "ahead": (masks.window(0, 9), {}),
    "key lengths": (masks.key_lengths([50, 3]), {}),
    "key starts": (masks.key_starts([60, 11]) & masks.causal(), {}),
    "documents": (masks.documents(_DOCUMENTS) & masks.causal(), {}),
    "prefix": (masks.prefix([0, 40]), {}),
    "chunks": (masks.chunks(16) & masks.causal(), {}),
    "ranges": (masks.key_range((60 - _RANGE)[None], (60 - _RANGE + 5).clamp(max=61)[None]), {}),
    "dense": (torch.rand(1, 4, 61, 61, generator=torch.Generator().manual_seed(1)) < 0.3, {}),
    "nothing": (masks.key_lengths([0, 61]) & masks.causal(), {"random_sinks": True}),
    "softcap": (None, {"softcap": 2.0}),
    "alibi": (masks.causal(), {"random_alibi": True}),
    "sinks": (masks.window(3, 0), {"random_sinks": True}),
    "dropout": (masks.causal(), {"dropout_p": 0.4, "seed": 2**40 + 3}),
    "all": (
        masks.window(30, 5) & masks.key_lengths([60, 44]),
        {"random_alibi": True, "random_sinks": True, "dropout_p": 0.2, "seed": -9, "softcap": 3.0},
    ),
}


def whole_results(ranks: Ranks, case: Case) -> dict[str, Tensor]:
    """The parts of all ranks put together; what belongs to all of them adds up."""
    parts = ranks.run(attend, case.ranks, case=case)
    problem, _, _ = case.problem()
    results = {}
    for name in parts[0]:
        if name in ("grad_alibi_slopes", "grad_sinks"):
            results[name] = sum(part[name] for part in parts)
            continue
        keys = name in ("grad_key", "grad_value")
        length = (problem.key if keys else problem.query).shape[2]
        places = torch.cat([case.rows(rank, length, keys) for rank in range(case.ranks)])
        assert places.sort().values.equal(torch.arange(length))
        results[name] = torch.cat([part[name] for part in parts], dim=2)[:, :, places.argsort()]
    return results


def check(ranks: Ranks, case: Case) -> None:
    assert_close_to_oracle(whole_results(ranks, case), *case.problem())


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ring(ranks, size, layout, option):
    mask, sizes = OPTIONS[option]
    check(ranks, Case(size, "ring", layout, mask, sizes=sizes))


@pytest.mark.parametrize("option", OPTIONS)
def test_allgather(ranks, option):
    mask, sizes = OPTIONS[option]
    check(ranks, Case(3, "allgather", "zigzag", mask, sizes=sizes))


@pytest.mark.parametrize("option", OPTIONS)
def test_ulysses(ranks, option):
    mask, sizes = OPTIONS[option]
    check(ranks, Case(2, "ulysses", mask=mask, sizes=sizes))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (5, 1), (2, 1), (7, 7), (12, 3)])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_ulysses_with_any_number_of_heads(ranks, size, heads, kv_heads):
    """More key heads than ranks or fewer, divisible or not; more ranks than heads."""
    sizes = {"heads": heads, "kv_heads": kv_heads, **OPTIONS["all"][1]}
    check(ranks, Case(size, "ulysses", mask=OPTIONS["all"][0], sizes=sizes))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("mesh", "layout"), [((2, 2), "zigzag"), ((4, 2), "contiguous")], ids=str)
def test_mesh(ranks, mesh, layout, option):
    mask, sizes = OPTIONS[option]
    check(ranks, Case(mesh[0] * mesh[1], "mesh", layout, mask, mesh=mesh, sizes=sizes))


PACKED = (0, 3, 40, 40, 41, 61)


@pytest.mark.parametrize("option", ["plain", "causal", "window", "dense", "all"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "ring", "zigzag"),
        Case(4, "ring", "contiguous"),
        Case(3, "ring", "zigzag"),
        Case(3, "allgather", "zigzag"),
        Case(4, "mesh", "zigzag", mesh=(2, 2)),
    ],
    ids=lambda case: f"{case.way}-{case.layout}-{case.ranks}",
)
def test_packed_documents(ranks, case, option):
    mask, sizes = OPTIONS[option]
    check(ranks, dataclasses.replace(case, documents=PACKED, mask=mask, sizes=sizes))


@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize(
    "shards",
    [([3, 40, 1], [20, 20, 20]), ([0, 9, 30], [5, 0, 34]), ([10, 1, 9], [40, 0, 1]), ([0, 0, 3], [0, 2, 0])],
    ids=str,
)
def test_shards_of_any_lengths(ranks, way, alignment, shards):
    mask = masks.window(11, 2, alignment=alignment)
    sizes = {"random_alibi": True, "dropout_p": 0.3, "seed": 4}
    check(ranks, Case(3, way, mask=mask, shards=shards, sizes=sizes))


@pytest.mark.parametrize("lengths", [(0, 0), (1, 1), (3, 50), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_short_sequences(ranks, layout, lengths):
    sizes = {"query_length": lengths[0], "key_length": lengths[1], "random_sinks": True}
    check(ranks, Case(4, "ring", layout, masks.causal(alignment="bottom-right"), sizes=sizes))


@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
def test_dtypes_and_head_dims(ranks, way, dtype):
    sizes = {"dtype": dtype, "head_dim": 33, "value_head_dim": 20, "kv_heads": 1, **OPTIONS["all"][1]}
    check(ranks, Case(4, way, mask=masks.causal(), sizes=sizes))


@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
def test_a_group_of_one(ranks, way):
    check(ranks, Case(1, way, mask=masks.causal(), sizes=OPTIONS["all"][1]))


@pytest.mark.parametrize("way", ["ring", "ulysses"])
@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_a_nan_reaches_who_sees_it_and_nobody_else(ranks, way, poisoned):
    for layout in ("contiguous", "zigzag") if way == "ring" else ("contiguous",):
        check(ranks, Case(2, way, layout, masks.window(20, 0), poisoned=poisoned))


def test_longer_sequences_than_a_tile(ranks):
    sizes = {
        "batch": 1,
        "heads": 2,
        "kv_heads": 1,
        "query_length": 1203,
        "key_length": 1203,
        **OPTIONS["all"][1],
    }
    for layout in ("contiguous", "zigzag"):
        check(ranks, Case(3, "ring", layout, masks.causal(), sizes=sizes))


@pytest.mark.parametrize("case", [
    Case(4, "ring", "zigzag", *OPTIONS["all"][:1], sizes=OPTIONS["all"][1]),
    Case(8, "ring", "contiguous", masks.window(9, 9)),
    Case(3, "ulysses", sizes={"heads": 4, "kv_heads": 1, "dtype": torch.bfloat16}),
    Case(3, "allgather", "zigzag", masks.causal(), sizes={"dtype": torch.float16}),
    Case(4, "mesh", "zigzag", masks.causal(), mesh=(2, 2)),
], ids=lambda case: case.way)  # fmt: skip
def test_the_same_bits_again(ranks, case):
    case = dataclasses.replace(
        case, sizes=case.sizes | {"query_length": 301, "key_length": 301}, mask=masks.causal()
    )
    assert all(ranks.run(attend_twice, case.ranks, case=case))
