"""Counted is what the closed forms say, exactly; and the closed forms say what the papers say."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from flashtile import lab, masks
from flashtile.lab import paper, theory
from flashtile.lab.algorithms import band
from flashtile.lab.roofline import CARDS, Card, bound
from flashtile.lab.theory import DIRECTIONS, Moves, Shape

SIZES = ((12, 12, 4, 4), (13, 9, 5, 3), (7, 20, 3, 6), (1, 1, 1, 1))
BLOCKS = ((4, 3), (5, 7), (1, 1), (2, 30), (100, 100))
MASKS = {
    "none": None,
    "bottom-right": masks.causal(alignment="bottom-right"),
    "top-left": masks.causal(alignment="top-left"),
    "window": masks.window(left=3, right=2, alignment="top-left"),
    "narrow": masks.window(left=0, right=0, alignment="bottom-right"),
    "left": masks.window(left=2, right=None, alignment="bottom-right"),
}


def square(length: int, head_dim: int = 64, **options: object) -> Shape:
    return Shape(
        query_length=length, key_length=length, head_dim=head_dim, value_head_dim=head_dim, **options
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("algorithm", lab.ALGORITHMS)
def test_counted_is_what_theory_says(algorithm, mask, sizes):
    queries, keys, head_dim, value_head_dim = sizes
    query, key = torch.randn(1, 1, queries, head_dim), torch.randn(1, 1, keys, head_dim)
    value, grad_out = torch.randn(1, 1, keys, value_head_dim), torch.randn(1, 1, queries, value_head_dim)
    lower, upper = band(mask, queries, keys)
    for blocks, dropout in product(BLOCKS, (False, True)):
        run = lab.run(
            algorithm, query, key, value, grad_out,
            blocks=lab.Blocks(*blocks), mask=mask, dropout_p=0.5 * dropout, element_size=3,
        )  # fmt: skip
        shape = Shape(
            query_length=queries, key_length=keys, head_dim=head_dim, value_head_dim=value_head_dim,
            lower=lower, upper=upper, dropout=dropout,
        )  # fmt: skip
        for direction, counted in zip(DIRECTIONS, (run.forward, run.backward), strict=True):
            expected = theory.one_pass(algorithm, direction, shape, lab.Blocks(*blocks), element_size=3)
            assert counted == expected.counts, (direction, blocks, dropout)


@pytest.mark.parametrize("band", [(None, -4), (6, None), (2, 2), (-9, -7), (None, -40), (40, None)], ids=str)
def test_counted_is_what_theory_says_for_any_band(band):
    query, key, value, grad_out = torch.randn(4, 17, 4)
    shape = square(17, 4, lower=band[0], upper=band[1])
    setting = lab.Setting(scale=0.5, lower=band[0], upper=band[1])
    for rows, columns in BLOCKS:
        blocks = lab.Blocks(rows, columns)
        for name, module in (("flash1", lab.flash1), ("flash2", lab.flash2)):
            forward, backward = lab.Memory(), lab.Memory()
            out, *statistics = module.forward(query, key, value, blocks, setting, forward)
            module.backward(query, key, value, out, grad_out, *statistics, blocks, setting, backward)
            for direction, memory in zip(DIRECTIONS, (forward, backward), strict=True):
                assert memory.counts == theory.one_pass(name, direction, shape, blocks).counts


def test_heads_add_up_and_a_backward_pass_may_have_blocks_of_its_own():
    inputs = torch.randn(4, 2, 3, 12, 4)
    blocks, backward_blocks = lab.Blocks(6, 2), lab.Blocks(3, 4)
    run = lab.run("flash2", *inputs, blocks=blocks, backward_blocks=backward_blocks)
    assert run.forward == theory.one_pass("flash2", "forward", square(12, 4), blocks).counts.times(6)
    assert run.backward == theory.one_pass("flash2", "backward", square(12, 4), backward_blocks).counts.times(
        6
    )


@pytest.mark.parametrize(("length", "rows", "columns"), [(128, 16, 32), (100, 16, 32), (37, 64, 5)])
def test_traffic_is_the_table_of_the_docstring(length, rows, columns):
    n, d = length, 8
    r, c = n * math.ceil(n / columns), n * math.ceil(n / rows)
    expected = {
        ("standard", "forward"): 4 * n**2 + 4 * n * d,
        ("standard", "backward"): 7 * n**2 + 8 * n * d,
        ("flash1", "forward"): (3 * r + 3 * n) * d + 4 * r + 2 * n,
        ("flash1", "backward"): (5 * r + 7 * n) * d + 2 * r,
        ("flash2", "forward"): (2 * c + 2 * n) * d + n,
        ("flash2", "backward"): (4 * r + 7 * n) * d + 2 * r + n,
    }
    for (algorithm, direction), numbers in expected.items():
        found = theory.one_pass(algorithm, direction, square(n, d), lab.Blocks(rows, columns), element_size=1)
        assert found.counts.traffic == found.moves.total == numbers


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(("algorithm", "direction"), list(product(lab.ALGORITHMS, DIRECTIONS)))
def test_long_sequences_tend_to_the_leading_term(algorithm, direction, head_dim):
    numbers, length = 2**16, 2**24
    blocks = theory.block_sizes(algorithm, direction, 2 * numbers, head_dim)
    found = theory.one_pass(algorithm, direction, square(length, head_dim), blocks).moves.total
    leading = theory.leading_traffic(algorithm, direction, length, head_dim, numbers)
    # Statistics, l and m against an output of head_dim numbers, and N d are of lower order.
    assert leading <= found <= leading * (1 + 2 / head_dim)


def test_flash_attention_moves_more_where_the_small_memory_is_below_3_d_squared():
    for head_dim in (64, 128):
        for numbers, less in ((2 * head_dim**2, False), (5 * head_dim**2, True)):
            moved = {
                algorithm: theory.one_pass(
                    algorithm, "forward", square(2**20, head_dim),
                    theory.block_sizes(algorithm, "forward", 2 * numbers, head_dim),
                ).moves.total
                for algorithm in lab.ALGORITHMS
            }  # fmt: skip
            assert (moved["flash1"] < moved["standard"]) is less
            assert moved["flash2"] < moved["flash1"]


def test_the_dominant_term():
    blocks = lab.Blocks(64, 384)
    assert theory.one_pass("standard", "forward", square(4096), blocks).moves.dominant == "scores"
    assert theory.one_pass("standard", "forward", square(32), blocks).moves.dominant == "once"
    assert theory.one_pass("flash1", "forward", square(4096), blocks).moves.dominant == "per_block"
    assert theory.one_pass("flash2", "backward", square(4096), blocks).moves.dominant == "per_block"
    assert theory.one_pass("flash2", "backward", square(300), blocks).moves.dominant == "once"
    assert Moves(1, 2, 3, 9).dominant == "statistics"


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
def test_flash2_saves_what_is_derived(mask):
    inputs = torch.randn(3, 1, 1, 45, 8)
    for blocks in (lab.Blocks(16, 9), lab.Blocks(7, 45)):
        first, second = (
            lab.run(name, *inputs, blocks=blocks, mask=mask).forward for name in ("flash1", "flash2")
        )
        saved = theory.saved_by_flash2(square(45, 8, upper=None if mask is None else 0), blocks)
        assert first.other - second.other == saved > 0
        assert first.matmul == second.matmul
        assert first.rescaling > second.rescaling
        assert second.divisions == 45 * 8


def test_flash2_backward_divides_nothing():
    forms = [
        theory.one_pass(name, "backward", square(256), lab.Blocks(32, 32)).counts for name in lab.ALGORITHMS
    ]
    assert [form.divisions for form in forms] == [0, 256**2, 0]


def test_block_sizes_are_the_first_papers():
    # A100: 192 KB of fp16 are 98304 numbers; B_c = ceil(98304 / (4 x 64)), B_r = min(B_c, 64)
    assert theory.block_sizes("flash1", "forward", 192 * 1024, 64) == lab.Blocks(64, 384)
    assert theory.block_sizes("flash1", "backward", 192 * 1024, 64) == lab.Blocks(64, 384)
    assert theory.block_sizes("flash2", "forward", 192 * 1024, 64) == lab.Blocks(384, 64)
    assert theory.block_sizes("flash1", "forward", 1000, 64, element_size=4) == lab.Blocks(1, 1)
    assert theory.block_sizes("flash1", "forward", 1028, 64, element_size=4) == lab.Blocks(2, 2)
    with pytest.raises(ValueError, match="sram must hold at least one number of 4 bytes, got 3 bytes"):
        theory.block_sizes("flash1", "forward", 3, 64, element_size=4)
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        theory.block_sizes("flash1", "forward", 1024, 0)
    with pytest.raises(TypeError, match=r"sram must be an int, got 1000\.0"):
        theory.block_sizes("flash1", "forward", 1e3, 64)


def test_passes_that_do_not_exist_are_refused():
    shape = theory.Shape(query_length=4, key_length=4, head_dim=2, value_head_dim=2)
    with pytest.raises(ValueError, match="algorithm must be one of standard, flash1, flash2, got 'flash3'"):
        theory.one_pass("flash3", "forward", shape, lab.Blocks(2, 2))
    with pytest.raises(TypeError, match=r"blocks must be a flashtile.lab.Blocks.*, got \[2, 2\]"):
        theory.one_pass("flash1", "forward", shape, [2, 2])


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_a_forward_tile_takes_at_most_five_quarters_of_what_it_is_sized_for(head_dim):
    numbers = 96 * 1024
    for algorithm in ("flash1", "flash2"):
        blocks = theory.block_sizes(algorithm, "forward", numbers, head_dim, element_size=1)
        shape = square(4096, head_dim)
        on_chip = theory.one_pass(algorithm, "forward", shape, blocks, element_size=1).counts.on_chip
        # Q, K, V and O fit in 4 d B_c, the scores in d B_c; the last key of B_c may be one too many for both.
        assert numbers / 2 < on_chip <= 5 / 4 * numbers + 5 * head_dim + 2 * head_dim


def test_causal_masks_tend_to_half():
    blocks = lab.Blocks(64, 64)
    full = theory.one_pass("flash2", "forward", square(2**14), blocks).counts
    causal = theory.one_pass("flash2", "forward", square(2**14, upper=0), blocks).counts
    tiles = 2**14 // 64
    assert causal.matmul * 2 * tiles == full.matmul * (tiles + 1)


def test_the_papers_example():
    standard, flash = paper.model("standard"), paper.model("flash1")
    assert round(standard.traffic / 1e9, 1) == 25.2  # not the paper's 40.3: Algorithms 0 and 3 move less
    assert round(paper.operators_traffic() / 1e9, 1) == paper.PUBLISHED["standard"].gigabytes
    assert flash.traffic / 1e9 == pytest.approx(paper.PUBLISHED["flash1"].gigabytes, rel=0.05)
    assert standard.matmul == 6 * paper.PRODUCT * 1024
    assert flash.matmul == 7 * paper.PRODUCT * 1024
    # What the paper's FLOPs differ by is one product, of 64 heads.
    published = [1e9 * paper.PUBLISHED[name].gflops for name in ("standard", "flash1")]
    assert published[1] - published[0] == pytest.approx(64 * paper.PRODUCT, abs=1e8)


def test_operators_without_mask_and_dropout_are_algorithms_0_and_3():
    kept = [passes for what, passes in paper.OPERATORS if not what.startswith(("add the mask", "dropout"))]
    assert sum(kept) == 4 + 7
    form = theory.one_pass("standard", "forward", square(1024), lab.Blocks(1, 1)).moves
    form += theory.one_pass("standard", "backward", square(1024), lab.Blocks(1, 1)).moves
    assert form == Moves(scores=11 * 1024**2, once=12 * 1024 * 64)


def test_measured_times_of_the_paper_are_above_the_bound():
    for line in paper.comparison():
        if line.unit == "ms":
            assert 0 < line.model < line.paper


def test_the_roofline_is_the_slowest_of_three():
    card = Card(
        "card", {"fp16": 100.0, "bf16": 100.0, "fp32": 10.0}, vector=10.0, bandwidth=5.0, source="made up"
    )
    counts = lab.Counts(read=3, written=2, matmul=400, divisions=7, rescaling=3)
    limits = bound(card, counts, "fp16")
    assert (limits.matmul, limits.other, limits.memory) == (4, 1, 1)
    assert (limits.seconds, limits.limited_by) == (4, "matmul")
    assert bound(card, lab.Counts(read=60, matmul=40), "fp32").limited_by == "memory"
    assert card.attainable(2, "fp16") == 10
    assert card.attainable(1000, "fp16") == 100


def test_cards_balance_where_their_sheets_say():
    ridges = {name: card.matmul["fp16"] / card.bandwidth for name, card in CARDS.items()}
    assert {name: round(ridge) for name, ridge in ridges.items()} == {"a100": 153, "h100": 295, "h200": 206}
