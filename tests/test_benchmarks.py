"""The benchmarks' own machinery, with the libraries that are always there."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import cpu, doors, plots, readme, worker
from benchmarks.peers import TITLES, LeftOutError, OnnxMultiHead, Torch, heads_of, rows_of
from flashtile.bench import runs
from flashtile.bench.cases import Case
from tests.documents import ROOT

SMALL = Case("long", 1, 2, 65, 16, causal=True)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("library", ["flashtile", "torch", "standard"])
def test_prepared_calls_are_checked_against_float64(library, direction):
    case = Case("long", 1, 4, 65, 16, causal=True, direction=direction, kv_heads=2)
    run, answer = worker.prepare(Torch(library, torch.get_num_threads()), case)
    assert run is not None
    assert answer["error"] < 2e-6
    assert answer["calls"] >= 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_last_rows_are_those_of_the_whole(direction):
    case = Case("long", 2, 4, 40, 8, causal=True, direction=direction, kv_heads=2)
    name = "output" if direction == "forward" else "dquery"
    whole = runs.outputs(runs.standard_attention(case), case, torch.float64)[name]
    torch.testing.assert_close(worker.exact_rows(case), whole[:, :, -worker.ROWS :])


def test_doors_are_measured_and_agree(tmp_path):
    cases = doors.cache_cases(512) + doors.packed_cases((3, 40, 9))
    assert len(cases) == 12
    found = doors.measure([case for case in cases if "fp32" in case.name], rounds=1)
    assert [len(row) for row in doors.rows(found)] == [len(doors.COLUMNS)] * 6


def test_a_call_that_differs_is_not_measured():
    case = doors.Comparison(
        "wrong", {doors.OURS: lambda: torch.ones(2, 3), "other": lambda: torch.zeros(2, 3)}
    )
    with pytest.raises(AssertionError, match="wrong: other differs by 1"):
        doors.check(case)
    case.calls["other"] = lambda: torch.ones(3, 2)
    with pytest.raises(AssertionError, match=r"wrong: other has shape \(3, 2\)"):
        doors.check(case)


def test_wrong_results_show_as_errors():
    class Wrong:
        def prepare(self, case):
            right = Torch("torch", 1).prepare(case)
            return lambda: right() + 0.5

    _, answer = worker.prepare(Wrong(), SMALL)
    assert answer["error"] == pytest.approx(0.5, abs=1e-5)


def test_what_cannot_be_done_is_left_out_with_the_reason():
    class Unable:
        def prepare(self, case):
            raise LeftOutError("no such thing")

    class Broken:
        def prepare(self, case):
            raise ZeroDivisionError("oh\nmore")

    assert worker.prepare(Unable(), SMALL) == (None, {"left_out": "no such thing"})
    assert worker.prepare(Broken(), SMALL) == (None, {"left_out": "ZeroDivisionError: oh"})
    run, answer = worker.prepare(OnnxMultiHead(1), Case("long", 1, 2, 8, 8, direction="backward"))
    assert run is None
    assert "backward" in answer["left_out"]


def test_layouts_are_inverse():
    array = torch.randn(2, 3, 5, 7).numpy()
    assert rows_of(array).shape == (2, 5, 21)
    assert (heads_of(rows_of(array), 3) == array).all()


@pytest.mark.slow
def test_worker_process_answers_and_stops(tmp_path):
    with (tmp_path / "log").open("w") as log:
        one = cpu.Worker("torch", 1, log)
        answer = cpu.measure(SMALL, [one], rounds=2)["peers"]["torch"]
        one.process.kill()
        one.process.wait()
        assert "process ended" in one.ask(prepare=asdict(SMALL))["left_out"]
        one.stop()
    assert answer["error"] < 2e-6
    assert answer["seconds"]["rounds"] == 2


def test_a_quick_run_does_not_replace_the_results():
    assert cpu.parse(["--quick"]).output.name == "quick"
    assert cpu.parse([]).output.name == "results"


def test_arguments():
    options = cpu.parse(["--cases", "forward bf16 causal", "--peers", "flashtile,torch"])
    assert {(case.dtype, case.causal, case.direction) for case in options.cases} == {
        ("bf16", True, "forward")
    }
    assert options.peers == ["flashtile", "torch"]


@pytest.mark.parametrize("arguments", [["--peers", "nobody"], ["--cases", "sideways"]])
def test_unknown_names_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cpu.parse(arguments)
    assert stop.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_report_names_the_best_peer():
    def timed(seconds):
        return {"seconds": {"median": seconds, "p20": seconds, "p80": seconds, "rounds": 1}, "error": 0.0}

    peers = {
        "flashtile": timed(1e-3),
        "torch": timed(2e-3),
        "openvino": timed(1.5e-3),
        "flex": {"left_out": "no"},
    }
    result = {"case": SMALL.as_dict(), "peers": peers}
    ceiling = {"fma_gflops": 100.0, "bf16_dot_gflops": None, "read_gb_per_s": 10.0}
    row = cpu.report([result], ceiling, list(peers)).splitlines()[-1]
    assert row.split()[-3:] == ["2.00x", "1.50x", "openvino"]
    assert " - " in row


def test_the_picture_of_decoding_has_the_ceilings_of_the_table():
    found = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    steps = [result for result in found["results"] if result["case"]["group"] == "decode"]
    axes = Figure().subplots()
    plots.draw_decode(axes, steps, found["ceilings"])
    own = next(bars for bars in axes.containers if bars.get_label() == TITLES["flashtile"])
    lines = [line.get_segments()[0][0][1] for line in axes.collections]
    drawn = [bar.get_height() / line for bar, line in zip(own, lines, strict=True)]
    assert len(drawn) >= 3
    for share, result in zip(drawn, steps, strict=True):
        assert readme.work_row(result, found["ceilings"])[3] == f"{100 * share:.0f}% reread"


def test_every_plot_is_drawn(tmp_path):
    found = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    written = plots.draw_all(found, tmp_path)
    assert {path.name for path in written} == {
        "forward.png", "backward.png", "decode_and_small.png", "memory.png", "roofline.png"
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_largest_ceiling_counts():
    assert cpu.largest({"a": 1.0, "b": None}, {"a": 2.0, "b": None}) == {"a": 2.0, "b": None}
