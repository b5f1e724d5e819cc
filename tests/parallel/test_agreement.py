"""What does not fit together is an error on every rank, before anything is exchanged, and names the ranks."""

from __future__ import annotations

import pytest
import torch

from flashtile import masks, parallel
from flashtile.parallel import agreement
from tests.parallel.jobs import say

# By the name of what differs: sizes and options of rank 1, and what the ranks are said to have.
MISMATCHES = {
    "batch": ({"batch": 3}, {}, "2 on rank 0, 3 on rank 1, 2 on rank 2"),
    "heads": ({"heads": 6}, {}, "4 on rank 0, 6 on rank 1, 4 on rank 2"),
    "kv_heads": ({"kv_heads": 4}, {}, "2 on rank 0, 4 on rank 1, 2 on rank 2"),
    "head_dim": ({"head_dim": 9}, {"scale": 1.0}, "8 on rank 0, 9 on rank 1, 8 on rank 2"),
    "value_head_dim": ({"value_head_dim": 3}, {}, "8 on rank 0, 3 on rank 1, 8 on rank 2"),
    "dtype": (
        {"dtype": torch.float64},
        {},
        "torch.float32 on rank 0, torch.float64 on rank 1",
    ),
    "scale": ({}, {"scale": 0.5}, f"{8**-0.5} on rank 0, 0.5 on rank 1"),
    "softcap": ({}, {"softcap": 4.0}, "None on rank 0, 4.0 on rank 1, None on rank 2"),
    "dropout_p": ({}, {"dropout_p": 0.5}, "0.0 on rank 0, 0.5 on rank 1, 0.0 on rank 2"),
    "mask": ({}, {"mask": masks.causal()}, ""),
    "sinks": ({}, {"sinks": torch.zeros(4)}, "0 on rank 0, 1 on rank 1, 0 on rank 2"),
}


@pytest.mark.parametrize(
    ("backend", "expected"), [("gloo", "cpu"), ("nccl", "meta"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_facts_travel_from_the_device_of_the_arguments(backend, expected, monkeypatch):
    monkeypatch.setattr(agreement.dist, "get_backend", lambda group: backend)
    assert agreement._device_of(None, torch.empty(1, device="meta")).type == expected


@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch(ranks, way, name):
    sizes, options, said = MISMATCHES[name]
    errors = ranks.run(say, 3, way=way, changes=[{}, sizes, {}], options=[{}, options, {}])
    assert len(set(errors)) == 1
    expected = f"ValueError: {way}_attention: {name} must be the same on every rank, got {said}"
    assert errors[0].startswith(expected)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"bias": torch.zeros(1)},
            "TypeError: {way}_attention does not support bias; its options are mask, ",
        ),
        ({"softcap": -1.0}, "ValueError: softcap must be finite and above 0, got -1.0"),
        ({"mask": "causal"}, "TypeError: mask must be a flashtile.Mask or a bool tensor, got str"),
        ({"seed": "one"}, "TypeError: seed must be an int or an int64 tensor, got str"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_rank_that_refuses_is_named_to_the_others(ranks, way, options, error):
    errors = ranks.run(say, 3, way=way, changes=[{}] * 3, options=[{}, {}, options])
    assert errors[2].startswith(error.format(way=way))
    named = (
        f"ValueError: {way}_attention: rank 2 refused the arguments there; the error raised there says why"
    )
    assert errors[:2] == [named] * 2


def test_seeds_that_differ(ranks):
    options = [{"dropout_p": 0.5, "seed": seed} for seed in (1, 1, 2)]
    errors = ranks.run(say, 3, way="ring", changes=[{}] * 3, options=options)
    said = "seed must be the same on every rank, got 1 on rank 0, 1 on rank 1, 2 on rank 2"
    assert set(errors) == {f"ValueError: ring_attention: {said}"}


def test_masks_that_differ_in_values_alone(ranks):
    """So many ids that their values do not show in the mask's name."""
    options = [{"mask": masks.documents([0] * own + [1] * (18 - own))} for own in (5, 5, 6)]
    errors = ranks.run(say, 3, way="ring", changes=[{}] * 3, options=options)
    assert len(set(errors)) == 1
    assert "mask_first must be the same on every rank" in errors[0]


def test_a_mask_of_the_shard_instead_of_the_whole(ranks):
    options = [{"mask": masks.documents([0] * 6)}] * 3
    errors = ranks.run(say, 3, way="ring", changes=[{}] * 3, options=options)
    assert all(error.startswith("ValueError: documents: ") and "length 18" in error for error in errors)


def test_zigzag_shards_of_other_lengths(ranks):
    changes = [{"query_length": 6}, {"query_length": 8}, {"query_length": 4}]
    errors = ranks.run(say, 3, way="ring", changes=changes, options=[{"layout": "zigzag"}] * 3)
    assert len(set(errors)) == 1
    assert errors[0].startswith('ValueError: query with layout="zigzag" must have the lengths that')
    assert "[6, 6, 6] for 18 positions, got [6, 8, 4]" in errors[0]


def test_without_a_process_group():
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="init_process_group"):
        parallel.ring_attention(query, query, query)
    with pytest.raises(RuntimeError, match="init_process_group"):
        parallel.shard(query)
    with pytest.raises(TypeError, match="DeviceMesh, got int"):
        parallel.mesh_attention(query, query, query, mesh=3)
