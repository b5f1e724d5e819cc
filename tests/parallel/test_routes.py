"""Who sends what to whom, played through without processes; and how heads and positions are shared."""

from __future__ import annotations

import random
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest

from flashtile import masks
from flashtile.parallel.heads import share_heads
from flashtile.parallel.layouts import checked_documents, even_layout
from flashtile.parallel.ring import Routes
from tests.parallel.jobs import Case, numbers_sent


def routes(needs: list[list[bool]]) -> Routes:
    return Routes(SimpleNamespace(needs=lambda rank, source: needs[rank][source]), len(needs))


@pytest.mark.parametrize("density", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_keys_reach_who_needs_them_and_gradients_come_home(size, density):
    draw = random.Random(size)
    for _ in range(20):
        needs = [[draw.random() < density for _ in range(size)] for _ in range(size)]
        ring = routes(needs)
        held = {rank: {rank} for rank in range(size)}  # own keys stay; of others, those of the last step
        home = {rank: [] for rank in range(size)}
        collected: dict[int, list[int]] = {}
        for step in range(1, size):
            arriving, handed = {}, {}
            for rank in range(size):
                source, carrier = ring.source(rank, step), ring.carrier(rank, step)
                assert (carrier is None) == (not needs[rank][source])
                if carrier is not None:
                    assert source in held[carrier]
                    arriving[rank] = source
                    handed[rank] = [*collected.pop(rank, []), rank]
            for rank, contributors in handed.items():
                source, heir = ring.source(rank, step), ring.heir(rank, step)
                if heir == source:
                    home[source] += contributors
                else:
                    assert ring.source(heir, step + 1) == source
                    collected[heir] = contributors
            held = {rank: {rank, arriving.get(rank, rank)} for rank in range(size)}
        assert not collected
        for source in range(size):
            assert sorted(home[source]) == [r for r in range(size) if needs[r][source] and r != source]


def test_a_dense_ring_only_talks_to_neighbours():
    ring = routes([[True] * 5 for _ in range(5)])
    for step in range(1, 5):
        for rank in range(5):
            assert ring.carrier(rank, step) == (rank - 1) % 5
            assert ring.heir(rank, step) == (rank + 1) % 5


# 64 positions on 4 ranks, 16 each; a shard of K and V is 2 x 2 heads x 16 x (8 + 8) numbers.
SHARD = 2 * 2 * 16 * 16


@pytest.mark.parametrize(
    ("mask", "needed"),
    [
        (None, [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]),  # by whom each rank's keys are needed
        (masks.causal(), [[1, 2, 3], [2, 3], [3], []]),
        (masks.window(5, 0), [[1], [2], [3], []]),
        (masks.window(5, 2), [[1], [2, 0], [3, 1], [2]]),
        (masks.window(17, 0), [[1, 2], [2, 3], [3], []]),
        (masks.documents([0] * 16 + [1] * 32 + [2] * 16), [[], [2], [1], []]),
        (masks.key_lengths(20), [[1, 2, 3], [0, 2, 3], [], []]),
    ],
    ids=str,
)
def test_nothing_is_sent_to_who_does_not_need_it(ranks, mask, needed):
    sizes = {"head_dim": 8, "query_length": 64, "key_length": 64}
    sent = ranks.run(numbers_sent, 4, case=Case(4, mask=mask, sizes=sizes))
    messages = sum(map(len, needed))
    # K and V forward, and again in the backward pass with dK and dV, in float32 both.
    assert sum(map(sum, sent)) == 3 * messages * SHARD
    for source, ranks_in_need in enumerate(needed):
        if not ranks_in_need and not any(source in others for others in needed):
            assert sum(sent[source]) == 0


@pytest.mark.parametrize("ranks_", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (5, 1), (12, 3), (0, 0), (6, 2)])
def test_heads_are_shared_without_gaps(ranks_, heads, kv_heads):
    shares = share_heads(heads, kv_heads, ranks_)
    assert len(shares) == ranks_
    owned = [head for share in shares for head in range(share.heads.start, share.heads.end)]
    assert owned == list(range(heads))
    for own, keys in shares:
        for index in range(own.length):  # kernels divide the heads evenly among the keys
            read = keys.start + index // (own.length // keys.length)
            assert read == (own.start + index) // (heads // kv_heads)


def test_zigzag_balances_causal_work():
    chunks = even_layout(64, 4, "zigzag")
    assert [[chunk.start for chunk in own] for own in chunks] == [[0, 56], [8, 48], [16, 40], [24, 32]]
    work = [
        sum(position + 1 for chunk in own for position in range(chunk.start, chunk.end)) for own in chunks
    ]
    assert len(set(work)) == 1


DOCUMENTS = (0, 1, 1, 17, 20, 117, 120, 121, 400)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks_", [1, 2, 3, 8])
def test_documents_are_cut_one_by_one(ranks_, layout):
    chunks = even_layout(400, ranks_, layout, DOCUMENTS)
    positions = [[p for chunk in own for p in range(chunk.start, chunk.end)] for own in chunks]
    assert sorted(chain(*positions)) == list(range(400))
    for own, places in zip(chunks, positions, strict=True):
        assert places == sorted(places)
        assert all(before.end < after.start for before, after in pairwise(own))
    for start, end in pairwise(DOCUMENTS):
        shares = [sum(start <= p < end for p in own) for own in positions]
        assert max(shares) - min(shares) <= (1 if layout == "contiguous" else 2)
    lengths = list(map(len, positions))
    assert max(lengths) - min(lengths) <= (1 if layout == "contiguous" else 2)


def test_zigzag_balances_the_causal_work_of_documents():
    """Pairs of queries and keys that see each other, and how far the busiest rank is above the average."""

    def busiest(layout: str, documents: tuple[int, ...] | None) -> float:
        starts = {p: start for start, end in pairwise(DOCUMENTS) for p in range(start, end)}
        work = [
            sum(p - starts[p] + 1 for chunk in own for p in range(chunk.start, chunk.end))
            for own in even_layout(400, 4, layout, documents)
        ]
        return max(work) * len(work) / sum(work)

    assert busiest("zigzag", DOCUMENTS) < 1.01
    assert busiest("contiguous", DOCUMENTS) > 1.5
    assert busiest("zigzag", None) > 1.2


@pytest.mark.parametrize(
    ("cu_seqlens", "length", "said"),
    [
        ([0], None, "0 and the end of every document"),
        ([1, 3], 3, "must start at 0"),
        ([0, 3, 2], 2, "must not decrease"),
        ([0, 3], 4, "the length of the sequence, 4, got 3"),
    ],
)
def test_documents_that_are_none(cu_seqlens, length, said):
    with pytest.raises(ValueError, match=f"cu_seqlens .*{said}"):
        checked_documents(cu_seqlens, length)
