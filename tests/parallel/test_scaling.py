"""The paper model of many GPUs: its bytes are those that ranks send, its times behave as they must."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtile import masks
from flashtile.lab import scaling
from flashtile.lab.scaling import Cluster, Shape, Split
from tests.parallel.jobs import Case, bytes_sent

SPLITS = {
    "ring of 4": (Split(ring=4), Case(4, "ring", "zigzag", masks.causal())),
    "ring of 3": (Split(ring=3), Case(3, "ring", "contiguous")),
    "gathered by 3": (Split(ring=3, gathering=True), Case(3, "allgather", "zigzag", masks.causal())),
    "heads on 2": (Split(heads=2), Case(2, "ulysses", mask=masks.causal())),
    "heads on 4": (Split(heads=4), Case(4, "ulysses", mask=masks.causal())),
    "mesh": (Split(4, 2), Case(8, "mesh", "zigzag", masks.causal(), mesh=(4, 2))),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", SPLITS)
def test_bytes_are_those_that_ranks_send(ranks, name, kv_heads):
    split, case = SPLITS[name]
    for dtype in (torch.float32, torch.bfloat16):
        sizes = {"heads": 4, "kv_heads": kv_heads, "query_length": 96, "key_length": 96, "dtype": dtype}
        case = replace(case, sizes=sizes)
        shape = Shape(96, 4, kv_heads, 16, 2, causal=case.mask is not None, element_size=dtype.itemsize)
        expected = [scaling.sent(shape, split, direction).bytes for direction in ("forward", "backward")]
        assert ranks.run(bytes_sent, case.ranks, case=case) == [expected] * case.ranks


def test_without_overlap_the_same_is_sent(ranks):
    case = Case(3, "ring", mask=masks.window(9, 0))
    assert ranks.run(bytes_sent, 3, case=case) == ranks.run(bytes_sent, 3, case=case, overlapping=False)


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_hides_its_messages_from_so_many_tokens_on(kv_heads, causal):
    """Without latencies: at that length products and messages of a step take the same time."""
    cluster = Cluster(far=replace(scaling.INFINIBAND, latency=0.0))
    tokens = scaling.hiding_tokens(Shape(1, kv_heads=kv_heads, causal=causal), cluster.far, cluster)
    for share, hidden in ((1.01, True), (0.99, False)):
        shape = Shape(16 * 2 * round(share * tokens / 2), kv_heads=kv_heads, causal=causal)
        taken = scaling.time(shape, Split(ring=16), cluster, "forward")
        assert (taken.exposed == 0.0) == hidden


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_ring_and_ulysses_are_even_at_so_many_tokens(kv_heads):
    """Both over the same links, without latencies and but for the LSE, which Ulysses sends too."""
    link = replace(scaling.INFINIBAND, latency=0.0)
    cluster = Cluster(node=1, far=link)
    tokens = scaling.break_even_tokens(Shape(1, kv_heads=kv_heads), 16, link, cluster)
    shape = Shape(16 * 2 * round(tokens / 2), kv_heads=kv_heads)
    ring, heads = (
        scaling.time(shape, split, cluster, "forward").exposed for split in (Split(ring=16), Split(heads=16))
    )
    assert ring == pytest.approx(heads, rel=0.03)


def test_a_ring_that_sends_less_is_never_behind():
    """One key head for 32 query heads: a ring of 16 sends fewer numbers than all-to-alls of Q and O."""
    cluster = Cluster()
    assert scaling.break_even_tokens(Shape(1, kv_heads=1), 16, scaling.NVLINK, cluster) == 0.0
    shape = Shape(4096, kv_heads=1)
    ring, heads = (scaling.sent(shape, split, "forward").bytes for split in (Split(16), Split(heads=16)))
    assert ring < heads


def test_one_gpu_has_all_of_its_speed_and_more_tokens_share_it_better():
    cluster = Cluster()
    assert scaling.speedup_share(Shape(4096), Split(), cluster) == pytest.approx(1.0)
    for split in (Split(ring=64), Split(8, 8), Split(heads=32), Split(64, gathering=True)):
        shares = [scaling.speedup_share(Shape(2**n), split, cluster) for n in range(14, 25)]
        assert shares == sorted(shares)
        assert 0.0 < shares[0] < 0.5 < shares[-1] <= 1.0


@pytest.mark.parametrize(
    ("shape", "split", "said"),
    [
        (Shape(100), Split(ring=8), "100 tokens do not lie evenly on 8 ranks"),
        (Shape(128, heads=4, kv_heads=4), Split(heads=8), "8 ranks cannot share 4 heads"),
        (Shape(120, heads=6, kv_heads=6), Split(heads=5), "5 ranks cannot share 6 heads on 6 evenly"),
    ],
)
def test_what_has_no_closed_form_is_refused(shape, split, said):
    with pytest.raises(ValueError, match=said):
        scaling.sent(shape, split, "forward")
    with pytest.raises(ValueError, match="cannot share"):
        scaling.break_even_tokens(Shape(128), 64, scaling.NVLINK, Cluster())
