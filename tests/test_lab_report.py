"""`flashtile lab`: its numbers are those of theory and of the algorithms, as text, JSON and a figure."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace

import pytest

from flashtile import cli, lab
from flashtile.lab import report, roofline, theory, trace
from flashtile.lab.roofline import CARDS, Card

CPU = Card(
    "this CPU", {"fp16": 2e11, "bf16": 8e11, "fp32": 2e11}, vector=2e11, bandwidth=5e10, source="measured: x"
)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert cli.main(["lab", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_json_has_the_closed_forms(capsys):
    found = as_json(capsys, "--seq", "4096", "--dim", "64", "--sram", "192k", "--heads", "3", "--batch", "2")
    shape = theory.Shape(query_length=4096, key_length=4096, head_dim=64, value_head_dim=64)
    passes = {(one["algorithm"], one["direction"]): one for one in found["passes"]}
    assert set(passes) == {(name, direction) for name in lab.ALGORITHMS for direction in theory.DIRECTIONS}
    for (algorithm, direction), one in passes.items():
        blocks = theory.block_sizes(algorithm, direction, 192 * 1024, 64)
        counts = theory.one_pass(algorithm, direction, shape, blocks).counts.times(6)
        assert {name: one[name] for name in vars(counts)} == vars(counts)
        assert one["blocks"] == (None if algorithm == "standard" else vars(blocks))
    assert {one["card"] for one in found["roofline"]} == {"A100", "H100", "H200"}
    assert "trace" not in found


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["--seq", "100"], {"length": 100}),
        (["--dim", "128"], {"head_dim": 128}),
        (["--sram", "1M"], {"sram": 2**20}),
        (["--sram", "1000"], {"sram": 1000}),
        (["--heads", "4"], {"heads": 4}),
        (["--batch", "4"], {"batch": 4}),
        (["--causal"], {"causal": True}),
        (["--dtype", "fp32"], {"dtype": "fp32"}),
        (["--blocks", "128x32"], {"blocks": {"rows": 128, "columns": 32}}),
    ],
    ids=str,
)
def test_every_option_counts(arguments, changed, capsys):
    plain, other = as_json(capsys), as_json(capsys, *arguments)
    assert other["case"] == plain["case"] | changed
    assert other["passes"] != plain["passes"]


def test_text_names_the_parts_that_dominate_and_what_is_saved(capsys):
    assert cli.main(["lab"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "4096 queries and keys, head_dim 64, batch 1, 1 head, fp16, no mask, 192 KiB on chip"
    row = next(line for line in lines if line.startswith("  FlashAttention-2, forward")).split()
    counts = report.Case(4096, 64, 192 * 1024).counts("flash2", "forward")
    assert row[2:7] == ["384x64", f"{counts.read / 2**20:.4g}", "MiB", f"{counts.written / 2**10:.4g}", "KiB"]
    assert not re.search(r"\d [kMG]B\b(?!/s)", captured.out)
    assert "scores 98%" in captured.out
    assert "5.63 M fewer FLOPs" in captured.out
    assert "A tile takes up to 320.2 KiB" in captured.out
    assert all(len(line) <= 130 for line in lines)
    assert captured.err == ""


@pytest.mark.parametrize(
    ("size", "said"), [(1023, "1023 B"), (1024, "1 KiB"), (1_047_000, "1022 KiB"), (2**60, "1024 PiB")]
)
def test_sizes_have_binary_prefixes(size, said):
    assert str(report.Case(8, 8, size)).endswith(f", {said} on chip")


def test_large_shapes_come_at_once(capsys):
    start = time.monotonic()
    assert cli.main(["lab", "--seq", str(2**22), "--causal", "--heads", "128", "--batch", "1000"]) == 0
    assert time.monotonic() - start < 20
    assert " PiB" in capsys.readouterr().out


def test_trace_runs_the_algorithms(capsys):
    arguments = ["--trace", "--seq", "60", "--dim", "8", "--sram", "1k", "--causal", "--heads", "2"]
    found = as_json(capsys, *arguments)["trace"]
    assert len(found) == 6
    for one in found:
        assert one["counted"] == one["expected"]
        assert 0 < one["error"] <= one["allowed"] < 1e-12
    assert cli.main(["lab", *arguments]) == 0
    text = capsys.readouterr().out
    assert text.count("equal") >= 6
    assert "DIFFERS" not in text


def test_a_trace_that_differs_fails(capsys, monkeypatch):
    right = theory.one_pass

    def wrong(algorithm, direction, *arguments):
        found = right(algorithm, direction, *arguments)
        if (algorithm, direction) != ("flash2", "forward"):
            return found
        return replace(found, counts=replace(found.counts, read=found.counts.read + 2))

    monkeypatch.setattr(theory, "one_pass", wrong)
    assert cli.main(["lab", "--trace", "--seq", "32", "--dim", "4", "--sram", "512"]) == 1
    assert capsys.readouterr().out.count("DIFFERS") == 1


def test_a_trace_with_wrong_results_fails(capsys, monkeypatch):
    right = trace.run

    def wrong(*arguments, **options):
        done = right(*arguments, **options)
        return replace(done, out=done.out * (1 + 1e-10))

    monkeypatch.setattr(trace, "run", wrong)
    assert cli.main(["lab", "--trace", "--seq", "32", "--dim", "4", "--sram", "512"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_cards_are_those_asked_for(capsys, monkeypatch):
    monkeypatch.setattr("flashtile.lab.command.this_cpu", lambda threads: CPU)
    found = as_json(capsys, "--cards", "cpu,h100", "--dtype", "bf16")["roofline"]
    assert [one["card"] for one in found] == 3 * ["this CPU"] + 3 * ["H100"]
    counts = report.Case(4096, 64, 192 * 1024, dtype="bf16").counts("standard")
    assert found[0]["seconds"]["matmul"] == counts.matmul / 8e11
    assert found[0]["seconds"]["memory"] == counts.traffic / 5e10


def test_this_cpu_is_measured_on_the_threads_it_is_given(monkeypatch):
    from flashtile.bench import ceilings

    def measured(threads):
        return {"fma_gflops": 100.0 * threads, "bf16_dot_gflops": None, "read_gb_per_s": 20.0}

    monkeypatch.setattr(ceilings, "measure", measured)
    card = roofline.this_cpu(3)
    assert card.matmul == {"fp16": 3e11, "bf16": 3e11, "fp32": 3e11}
    assert (card.vector, card.bandwidth) == (3e11, 2e10)
    assert "3 threads" in card.source


def test_paper_says_what_agrees_and_what_does_not(capsys):
    assert cli.main(["lab", "--paper"]) == 0
    text = capsys.readouterr().out
    for part in (
        "40.3 GB      25.2 GB",
        "40.3 GB      40.3 GB",
        "4.4 GB       4.6 GB",
        "The FLOPs do not agree",
    ):
        assert part in text
    assert as_json(capsys, "--paper")["comparison"][0]["model"] == pytest.approx(25.23, abs=0.01)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot_writes_a_figure(suffix, tmp_path, capsys):
    path = tmp_path / f"lab.{suffix}"
    assert cli.main(["lab", "--plot", str(path), "--seq", "1000", "--causal"]) == 0
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    captured = capsys.readouterr()
    assert str(path) in captured.err
    assert captured.out.startswith("1000 queries")


def test_plot_without_matplotlib_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(lab, "figure", raising=False)
    monkeypatch.setitem(sys.modules, "flashtile.lab.figure", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["lab", "--plot", str(tmp_path / "lab.png")])
    assert stop.value.code == 2
    assert "pip install 'flashtile[plot]'" in capsys.readouterr().err


def test_figure_shows_every_algorithm_and_card(tmp_path):
    from flashtile.lab import figure

    path = tmp_path / "lab.svg"
    figure.draw(report.Case(512, 64, 192 * 1024), list(CARDS.values()), path)
    text = path.read_text()
    for title in (*report.TITLES.values(), "A100", "H100", "H200"):
        assert f"<!-- {title} -->" in text
