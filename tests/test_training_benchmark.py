"""The training benchmark: fair, checked before it is timed, and its tables and picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import training, training_figure, training_measure, training_tables
from benchmarks.training_measure import Case, Steps
from flashtile.train import ATTENTIONS, attentions, model_flops

ALL = list(ATTENTIONS)
SMALL = Case("small", "fp32", 16, 2)
ROOM = 2**40


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every preset as a model that a test has time for; the code of the large ones is the same."""
    sizes = {"layers": 1, "width": 32, "heads": 2}
    monkeypatch.setattr(training_measure, "SMALL", {**sizes, "vocabulary": 50})
    monkeypatch.setattr(training_measure, "VOCABULARY", 60)
    monkeypatch.setattr(training_measure, "PRESETS", {"gpt3-1.3b": sizes})
    monkeypatch.setattr(training, "peaks", lambda device: {"fp32": 1e12, "bf16": None})


def test_sdpa_gets_no_matrix_and_sees_the_same(monkeypatch):
    calls = []
    own = torch.nn.functional.scaled_dot_product_attention

    def noted(*args, **kwargs):
        calls.append(kwargs)
        return own(*args, **kwargs)

    monkeypatch.setattr(attentions.F, "scaled_dot_product_attention", noted)
    steps = Steps(SMALL)
    losses = {name: steps.first_loss(name)["loss"] for name in ALL}
    assert [(call["attn_mask"], call["is_causal"]) for call in calls] == [(None, True)]
    assert training_measure.disagreement(losses, SMALL) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_losses_that_disagree_are_not_timed(dtype, monkeypatch):
    def wrong(query, key, value, visible, dropout):
        return 10 * value

    monkeypatch.setitem(ATTENTIONS, "flashtile", wrong)
    result = training_measure.measure_case(replace(SMALL, dtype=dtype), ALL, 1, 1.0, ROOM)
    assert "losses disagree: flashtile" in result["disagreement"]
    assert all("seconds" not in answer for answer in result["attentions"].values())


def test_what_would_not_fit_is_left_out_with_what_it_needs():
    case = Case("small", "fp32", 8192, 1)
    assert training_measure.needed_bytes(case) == 2 * 8192**2 * 4
    assert training_measure.needed_bytes(replace(case, dtype="bf16")) == 2 * 8192**2 * 6
    assert training_measure.left_out("standard", case, 2**29) is None
    reason = training_measure.left_out("standard", case, 2**29 - 1)
    assert reason == "needs at least 0.5 GiB for its probabilities"
    assert training_measure.left_out("flashtile", case, 0) is None
    result = training_measure.measure_case(SMALL, ALL, 1, 0.1, 0)
    assert "needs at least" in result["attentions"]["standard"]["left_out"]
    assert "seconds" in result["attentions"]["sdpa"]


def test_a_run_writes_numbers_tables_and_a_picture(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(training, "measure_growth", lambda cases, attention: [1.5] * len(cases))
    arguments = [
        "--dtype",
        "fp32,bf16",
        "--contexts",
        "16,32",
        "--tokens",
        "32",
        "--rounds",
        "1",
        "--seconds",
        "0.1",
    ]
    assert training.main([*arguments, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "training.json").read_text())
    assert [(r["case"]["dtype"], r["case"]["batch"]) for r in found["results"]] == [
        ("fp32", 2), ("fp32", 1), ("bf16", 2), ("bf16", 1)
    ]  # fmt: skip
    result = found["results"][0]
    assert result["flops_per_token"] == model_flops(SMALL.shape)
    own, peer = (result["attentions"][name] for name in ("flashtile", "sdpa"))
    row = training_tables.speed_rows(found)[0]
    utilisation = own["tokens_per_s"] * result["flops_per_token"] / 1e12
    assert row[3] == f"{utilisation:.0%}"
    assert row[6] == f"{own['tokens_per_s'] / peer['tokens_per_s']:.2f}x"
    assert training_tables.speed_rows(found)[2][3] == "-"  # no peak, no utilisation
    text = capsys.readouterr().out
    assert "fp32 2 x 16" in text
    assert "1 x 32" in text
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")

    page = tmp_path / "page.md"
    page.write_text(f"before\n{training_tables.BEGIN}\nold\n{training_tables.END}\nafter\n")
    training_tables.main(["--results", str(tmp_path / "training.json"), "--document", str(page)])
    assert "| fp32 2 x 16 |" in page.read_text()
    assert "old" not in page.read_text()


def test_large_shapes_stand_beside_the_papers_numbers(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(training, "measure_growth", lambda cases, attention: [1.0] * len(cases))
    arguments = ["--preset", "gpt3-1.3b", "--contexts", "2048", "--batch", "1", "--dtype", "fp32"]
    measured = ["--attentions", "flashtile,sdpa", "--rounds", "1", "--seconds", "0.1"]
    assert training.main([*arguments, *measured, "--output", str(tmp_path)]) == 0
    line = "142 TFLOP/s without FlashAttention, 189 with it, 196 with FlashAttention-2 (63%)"
    assert line in capsys.readouterr().out
    found = json.loads((tmp_path / "training_gpt3-1.3b.json").read_text())
    found["memory"] = {}
    for answer in found["results"][0]["attentions"].values():
        answer["mib"] = 3.0  # as a GPU's steps say it
    assert "a step of sdpa, fp32 at 2048: 3 MiB" in training_tables.report(found)
    assert training_figure.memory_of(found)["flashtile"] == [{"length": 2048, "mib": 3.0}]
    training_figure.draw(found, tmp_path / "large.png")
    assert (tmp_path / "large.png").exists()


def test_memory_grows_with_the_scores_in_standard_attention_alone():
    cases = [Case("small", "fp32", context, 1) for context in (128, 512)]
    grown = {name: training_measure.growth(cases, name, 1) for name in ("flashtile", "standard")}
    probabilities = training_measure.needed_bytes(cases[1]) / 2**20
    assert grown["standard"][1] > probabilities
    assert grown["flashtile"][1] < grown["standard"][1] / 2


def test_wrong_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        training.main(["--attentions", "flash"])
    assert "expected some of flashtile,sdpa,standard, got 'flash'" in capsys.readouterr().err
