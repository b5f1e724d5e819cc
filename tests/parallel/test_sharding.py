"""shard and unshard: values, layouts, gradients, and parts that do not fit together."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.jobs import (
    Case,
    shard_and_unshard,
    shard_documents,
    sharding_gradients,
    unshard_lengths,
)

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((2, 37), 1), ((2, 3, 16, 5), -2), ((3,), 0), ((2, 0, 4), 1)])
def test_there_and_back(ranks, shape, dim, layout, kind):
    arguments = {"shape": shape, "dim": dim, "layout": layout, "dtype": kind}
    for size in (1, 2, 4):
        assert all(ranks.run(shard_and_unshard, size, **arguments))


def test_contiguous_parts_of_any_lengths(ranks):
    for whole in ranks.run(unshard_lengths, 3, lengths=[2, 0, 5], layout="contiguous"):
        assert whole.tolist() == [[0, 0, 2, 2, 2, 2, 2]]


def test_zigzag_parts_have_their_lengths(ranks):
    for message in ranks.run(unshard_lengths, 3, lengths=[2, 0, 5], layout="zigzag"):
        assert "[3, 2, 2] for 7 positions, got [2, 0, 5]" in message


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_gradients(ranks, layout):
    weights = torch.arange(1.0, 8.0)
    results = ranks.run(sharding_gradients, 3, layout=layout)
    assert sum(whole for whole, _ in results).tolist() == [weights.tolist()]
    for rank, (_, part) in enumerate(results):
        rows = Case(3, layout=layout).rows(rank, 7)
        assert part.tolist() == [(weights[rows] * (1 + 2 + 3)).tolist()]


def test_documents_one_by_one(ranks):
    """Three documents of 5, 0 and 6 tokens on 2 ranks; what is left over goes to the ranks in turn."""
    parts = {
        "contiguous": [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9, 10]],
        "zigzag": [[0, 1, 4, 5, 10], [2, 3, 6, 7, 8, 9]],
    }
    for layout, expected in parts.items():
        found = ranks.run(shard_documents, 2, documents=[0, 5, 5, 11], layout=layout)
        assert all(back for back, _, _ in found)
        assert [own.tolist() for _, own, _ in found] == expected
        for _, _, error in found:
            assert "cu_seqlens must end with the length of the sequence, 9, got 11" in error
