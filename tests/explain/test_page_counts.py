"""What the page counts: the race of the algorithms, skipped tiles, thread blocks; as the lab counts it."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from flashtile import lab, masks
from flashtile.explain import data
from flashtile.lab import theory
from flashtile.lab.algorithms import band
from flashtile.lab.occupancy import MULTIPROCESSORS, exchanged_by_warps, occupancy
from flashtile.lab.recording import record
from flashtile.lab.theory import Shape
from tests.explain.browser import close_to

pytestmark = pytest.mark.xdist_group("browser")  # one start of the browser serves all

TICK = 128  # bytes


def counted(recording: Any, moved: int) -> list[int]:
    """Bytes read and written and FLOPs done when so many bytes have moved."""
    read = written = done = 0
    for event in recording.events:
        part = min(event.size, moved - done)
        read += part * (event.kind == "read")
        written += part * (event.kind == "write")
        if part < event.size:
            return [read, written, event.flops]
        done += part
    return [read, written, recording.counts.flops]


@pytest.mark.parametrize(("direction", "size"), [("forward", 8), ("backward", 16)])
def test_the_race_counts_as_the_lab_does(opened, direction, size):
    figure = {"forward": "#race-figure", "backward": "#backward-figure"}[direction]
    opened.choose(f"#{direction}-block", size)
    last = opened.step(figure, 0)
    steps = [0, 1, 7, 23, last // 2, last]
    look = [("numbers", f"{figure} [data-algorithm={algorithm}] dd") for algorithm in lab.ALGORITHMS]
    found = opened.play(*(action for step in steps for action in (("step", figure, step), *look)))
    for index, algorithm in enumerate(lab.ALGORITHMS):
        recording = record(algorithm, direction, data.LENGTH, data.HEAD_DIM, lab.Blocks(size, size))
        assert found[index + 1 :: 4] == [counted(recording, TICK * step) for step in steps]


@pytest.mark.parametrize("size", data.BLOCKS)
@pytest.mark.parametrize("direction", theory.DIRECTIONS)
def test_the_totals_are_those_of_theory(opened, direction, size):
    figure = {"forward": "#race-figure", "backward": "#backward-figure"}[direction]
    _, last, shown, *at_the_end = opened.play(
        ("choose", f"#{direction}-block", size),
        ("step", figure, -1),
        ("rows", f"{figure} table"),
        *(("numbers", f"{figure} [data-algorithm={algorithm}] dd") for algorithm in lab.ALGORITHMS),
    )
    shape = Shape(
        query_length=data.LENGTH, key_length=data.LENGTH,
        head_dim=data.HEAD_DIM, value_head_dim=data.HEAD_DIM,
    )  # fmt: skip
    counts = [
        theory.one_pass(algorithm, direction, shape, lab.Blocks(size, size)).counts
        for algorithm in lab.ALGORITHMS
    ]
    columns = [
        [
            one.read,
            one.written,
            one.traffic / counts[0].traffic,
            one.on_chip or math.nan,
            one.intermediate,
            one.matmul,
            one.other,
        ]
        for one in counts
    ]
    for line, expected in zip(shown, zip(*columns, strict=True), strict=True):
        assert line == close_to(list(expected))
    assert TICK * (last - 1) < max(one.traffic for one in counts) <= TICK * last
    assert at_the_end == [[one.read, one.written, one.flops] for one in counts]


def test_the_race_shows_the_tile_at_work(opened):
    look = ("attribute", "#race-figure [data-algorithm=flash2] .tile", "class")
    doing = ("text", "#race-figure [data-algorithm=flash2] .doing")
    opened.choose("#forward-block", 16)
    _, tiles, does = opened.play(("step", "#race-figure", 0), look, doing)
    assert tiles == ["tile now", "tile ahead", "tile ahead", "tile ahead"]
    assert does == "reads Q, rows 0\u201315"
    # Q, K and V of 128 bytes each, then K again: V of the second tile is next.
    _, tiles, does = opened.play(("step", "#race-figure", 4), look, doing)
    assert tiles == ["tile computed", "tile now", "tile ahead", "tile ahead"]
    assert does == "reads V, rows 16\u201331"
    _, tiles, does = opened.play(("step", "#race-figure", -1), look, doing)
    assert tiles == ["tile computed"] * 4
    assert does == "finished"


def test_the_race_shows_no_tile_while_delta_is_computed(opened):
    panel = "#backward-figure [data-algorithm=flash2]"
    look = [
        ("attribute", f"{panel} .tile", "class"),
        ("attribute", f"{panel} .chip", "class"),
        ("text", f"{panel} .doing"),
    ]
    opened.choose("#backward-block", 16)
    found = {}
    for step in range(16):  # dQ is set to 0, then D comes from dO and O, then K of the first tile is read
        _, tiles, chips, does = opened.play(("step", "#backward-figure", step), *look)
        found[does] = tiles, len(chips)
        if "reads K" in does:
            break
    *before, (_, (tiles, chips)) = found.items()
    assert {does for does, _ in before} == {
        "writes dQ",
        *(f"{what}, rows {rows}" for what in ("reads dO", "reads O") for rows in ("0\u201315", "16\u201331")),
        "writes D, rows 0\u201315",  # rows 16 to 31 fall between two steps
    }
    assert all(seen == (["tile ahead"] * 4, 0) for _, seen in before)
    assert tiles == ["tile now"] + ["tile ahead"] * 3
    assert chips > 0


def test_real_sizes_are_those_of_theory(opened):
    for length, shown in zip(data.REAL_LENGTHS, opened.rows("#real-table"), strict=True):
        shape = Shape(query_length=length, key_length=length, head_dim=64, value_head_dim=64)
        assert shown == [
            theory.one_pass(
                name, "forward", shape, theory.block_sizes(name, "forward", 192 * 1024, 64)
            ).counts.traffic
            for name in lab.ALGORITHMS
        ]


@pytest.mark.parametrize("size", data.BLOCKS)
@pytest.mark.parametrize("name", data.MASKS)
def test_tiles_are_skipped_as_in_the_lab(opened, name, size):
    window = 6
    right = 0 if "causal" in name else window
    mask = {"none": None, "causal": masks.causal()}.get(name, masks.window(left=window, right=right))
    lower, upper = band(mask, data.LENGTH, data.LENGTH)
    setting = lab.Setting(scale=1.0, lower=lower, upper=upper)
    visible = torch.ones(data.LENGTH, data.LENGTH)
    if mask is not None:
        visible = mask.dense(1, data.LENGTH, data.LENGTH)[0, 0]
    blocks = [slice(start, start + size) for start in range(0, data.LENGTH, size)]
    expected = [
        "empty"
        if not setting.visits(rows, columns)
        else "full"
        if visible[rows, columns].all()
        else "partial"
        for rows, columns in product(blocks, blocks)
    ]
    *_, drawn, runs, table, disabled = opened.play(
        ("enter", "#skipping-mask", name),
        ("choose", "#skipping-block", size),
        ("enter", "#skipping-window", window),
        ("attribute", "#skipping-picture .tile", "class"),
        ("attribute", "#skipping-picture .visible", "width"),
        ("rows", "#skipping-table"),
        ("each", "#skipping-window", "disabled"),
    )
    assert drawn == [f"tile {kind}" for kind in expected]
    assert [round((float(run) + 4) / 10) for run in runs] == visible.sum(1).tolist()
    query = torch.ones(1, 1, data.LENGTH, data.HEAD_DIM)
    masked, whole = (
        [
            lab.run(algorithm, query, query, query, blocks=lab.Blocks(size, size), mask=one).forward
            for algorithm in ("flash1", "flash2")
        ]
        for one in (mask, None)
    )
    lines = [
        (len(expected) - expected.count("empty"), len(expected)),
        (expected.count("partial"), len(expected)),
        (masked[0].traffic, whole[0].traffic),
        (masked[1].traffic, whole[1].traffic),
        (masked[1].matmul, whole[1].matmul),
    ]
    for shown, (ours, everything) in zip(table, lines, strict=True):
        assert shown == close_to([ours, everything, ours / everything])
    assert disabled == ["window" not in name]


def test_the_price_of_computing_again_is_what_theory_says(opened):
    shape = Shape(query_length=4096, key_length=4096, head_dim=64, value_head_dim=64)
    passes = [
        theory.one_pass(name, "backward", shape, theory.block_sizes(name, "backward", 192 * 1024, 64)).counts
        for name in lab.ALGORITHMS
    ]
    kept, traffic, matmul = opened.rows("#price-table")
    assert kept == [2 * 4096**2, 2 * 2 * 4096, 2 * 4096]
    assert traffic == [one.traffic for one in passes]
    assert matmul == [one.matmul for one in passes]


@pytest.mark.parametrize("direction", theory.DIRECTIONS)
@pytest.mark.parametrize("card", MULTIPROCESSORS)
def test_thread_blocks_fill_the_card_as_in_the_lab(opened, card, direction):
    places = MULTIPROCESSORS[card]
    for batch, heads, length, block in (
        (1, 8, 16384, 128),
        (2, 64, 100, 64),
        (54, 2, 1, 1),
        (4, 3, 1000, 96),
    ):
        *_, table, first, second, exchanged = opened.play(
            ("enter", "#work-card", card),
            ("enter", "#work-direction", direction),
            ("enter", "#work-batch", batch),
            ("enter", "#work-heads", heads),
            ("enter", "#work-length", length),
            ("enter", "#work-block", block),
            ("rows", "#work-table"),
            ("attribute", "#work-pictures figure:nth-child(1) .busy", "class"),
            ("attribute", "#work-pictures figure:nth-child(2) .busy", "class"),
            ("numbers", "[data-exchanged]"),
        )
        blocks = lab.Blocks(block, block)
        found = [
            occupancy(name, direction, batch * heads, length, blocks, places) for name in ("flash1", "flash2")
        ]
        columns = [[one.thread_blocks, one.rounds, one.at_first, one.mean] for one in found]
        assert table == [close_to(list(line)) for line in zip(*columns, strict=True)]
        for one, busy in zip(found, (first, second), strict=True):
            last = one.thread_blocks - (one.rounds - 1) * places if one.rounds > 1 else 0
            assert len(busy) == min(one.thread_blocks, places) + last
        assert exchanged == [exchanged_by_warps(name, blocks, 64) for name in ("flash1", "flash2")]


@pytest.mark.parametrize("written", ["", "0", "-1", "2.5", "4097", "1e2"])
def test_a_batch_must_be_a_whole_number(opened, written):
    opened.enter("#work-batch", written)
    assert opened.text("#work-error") == "Batch must be a whole number from 1 to 4,096."
    assert opened.rows("#work-table") == []
    opened.play(("enter", "#work-batch", 3), ("enter", "#work-heads", 16))
    assert opened.text("#work-error") == ""
    assert opened.rows("#work-table")[0][0] == 3 * 16
