"""The GPU benchmark without a GPU: its arguments, its measuring on CPU tensors, its report and its charts."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu, gpu_measure, gpu_peers
from flashtile.bench import check
from flashtile.bench.cases import Case

CPU = torch.device("cpu")
FACTS = {
    "gpu": "Imaginary GPU",
    "capability": "9.0",
    "memory_gib": 140.0,
    "cuda": "13.0",
    "cudnn": 91900,
    "versions": {"flashtile": "0", "torch": "2"},
    "commit": "0123456789ab",
}


class MadeUpClock:
    """Runs every call and says that it took some seconds."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = itertools.cycle(seconds)

    def mark(self, run: Any) -> float:
        run()
        return next(self._seconds)

    def seconds(self, mark: float) -> float:
        return mark


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that run anywhere, and ceilings of small tensors."""
    chosen = {name: gpu_peers.PEERS[name] for name in ("flashtile", "standard", "flash1")}
    monkeypatch.setattr(gpu, "PEERS", {**chosen, "flash": gpu_peers._standard})
    decoders = {name: build for name, build in gpu_peers.DECODERS.items() if name.startswith("flashtile")}
    monkeypatch.setattr(gpu, "DECODERS", {**decoders, "flash": gpu_peers._standard})
    measured = gpu_measure.measure_ceilings
    monkeypatch.setattr(gpu, "measure_ceilings", lambda clock, device: measured(clock, device, 64, 1000))
    monkeypatch.setattr(check, "TRIALS", check.TRIALS[:1])
    monkeypatch.setattr(check, "GPU_DTYPES", (torch.float32,))


def cases() -> list[Case]:
    return [
        Case("long", 2, 2, 40, 16, "bf16", causal, direction)
        for direction in ("forward", "backward")
        for causal in (False, True)
    ] + gpu_measure.decode_cases("bf16", [(2, 512)])


def found_on_cpu(minutes: float = 60.0) -> dict[str, Any]:
    options = gpu.parse(["--rounds", "3", "--minutes", str(minutes), "--jobs", "1"])
    options.cases = cases()
    return gpu.run(options, CPU, MadeUpClock(1e-3, 2e-3, 4e-3), FACTS)


@pytest.mark.usefixtures("small")
def test_everything_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = json.loads(json.dumps(found_on_cpu(), allow_nan=False))
    assert not found["skipped"]
    assert not gpu.is_wrong(found)
    assert len(found["results"]) == 5
    own = [result["peers"]["flashtile"] for result in found["results"]]
    assert all(answer["error"] <= answer["allowed"] for answer in own)
    assert all(answer["seconds"]["q25"] <= answer["seconds"]["q75"] for answer in own)
    assert {"flashtile, pages of 16", "flashtile, pages of 256"} <= set(found["results"][-1]["peers"])
    gpu.show(found)
    text = capsys.readouterr().out
    for part in (
        "Imaginary GPU",
        "commit 0123456789ab",
        "long, TFLOP/s",
        "decode, GB/s",
        "measured ceilings",
    ):
        assert part in text
    assert (
        "FlashAttention-1 schedule, backward bf16 2x2x40x16: its schedule is measured in the forward" in text
    )


@pytest.mark.usefixtures("small")
def test_what_no_time_is_left_for_is_named(capsys: pytest.CaptureFixture[str]):
    found = found_on_cpu(minutes=-1.0)
    assert not found["results"]
    gpu.show(found)
    assert f"no time left for:\n  {cases()[0].name}" in capsys.readouterr().out


def test_wrong_results_of_flashtile_are_not_timed_and_fail():
    def wrong(case: Case, device: torch.device) -> Any:
        right = gpu_peers._standard(case, device)
        return lambda query, key, value: right(query, key, value) + 0.5

    def broken(case: Case, device: torch.device) -> Any:
        raise RuntimeError("no such kernel\nand more")

    peers = {"flashtile": wrong, "flash": wrong, "flex": broken}
    budget = gpu_measure.Budget(1.0)
    result = gpu_measure.measure_case(cases()[0], peers, MadeUpClock(1.0), CPU, 3, budget)
    answers = result["peers"]
    assert answers["flashtile"]["left_out"].startswith("wrong: output is off by 5")
    assert "seconds" in answers["flash"]
    assert answers["flash"]["error"] > answers["flash"]["allowed"]
    assert answers["flex"] == {"left_out": "RuntimeError: no such kernel"}
    assert gpu.is_wrong({"check": [], "results": [result]})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_last_head_is_that_of_the_whole(direction: str):
    case = Case("long", 2, 4, 40, 8, "fp32", True, direction)
    inputs = gpu_measure.Inputs.of(case, CPU)
    exact, standard = gpu_measure.truths(case, inputs, CPU)
    whole: Any = gpu_measure.make_run(gpu_peers._standard(case, CPU), inputs, direction)()
    for name, tensor in zip(exact, whole, strict=True):
        assert exact[name].dtype == torch.float64
        torch.testing.assert_close(exact[name].float(), tensor[-1:, -1:])
        torch.testing.assert_close(standard[name], tensor[-1:, -1:])


def test_pages_hold_the_cache():
    (case,) = gpu_measure.decode_cases("fp32", [(3, 512)])
    inputs = gpu_measure.Inputs.of(case, CPU)
    tensors = (inputs.query, inputs.key, inputs.value)
    expected = gpu_peers._standard(case, CPU)(*tensors)
    for name in ("flashtile", "flashtile, pages of 16", "flashtile, pages of 256"):
        torch.testing.assert_close(gpu_peers.DECODERS[name](case, CPU)(*tensors), expected)


def test_a_peer_may_not_compile_for_ever():
    seconds = [0.0]
    budget = gpu_measure.Budget(1.0, now=lambda: seconds[0])
    budget.preparing("flex", 10.0)
    assert budget.exhausted("flex") is None
    budget.preparing("flex", 10.0)
    assert budget.exhausted("flex") == "preparing it took 20 s of 60 s already"
    assert budget.exhausted("cudnn") is None
    seconds[0] = 61.0
    assert budget.left < 0


def test_the_cases_are_those_of_the_papers():
    listed = gpu.parse([]).cases
    long = [case for case in listed if case.group == "long"]
    assert len(long) == len({case.name for case in long}) == 3 * 2 * 6 * 2
    assert all(case.batch * case.query_length == 16384 for case in long)
    assert all(case.heads * case.head_dim == 2048 for case in long)
    chosen = gpu.parse(["--cases", "backward causal 64"]).cases
    assert {(case.direction, case.causal, case.head_dim) for case in chosen} == {("backward", True, 64)}
    quick = gpu.parse(["--quick", "--dtype", "fp16"]).cases
    assert {case.query_length for case in quick} == {1, 512, 4096}
    assert {case.dtype for case in quick} == {"fp16"}


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--rounds", "2"], "at least 3"), (["--cases", "up"], "up")]
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        gpu.parse(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_and_list(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        gpu.main(["--help"])
    assert stop.value.code == 0
    assert "--check-only" in capsys.readouterr().out
    assert gpu.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert "flash1" in text
    assert "long    backward bf16 causal 1x8x16384x256" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert gpu.main([]) == 2
    assert "sees no GPU here" in capsys.readouterr().err


def made_up() -> dict[str, Any]:
    """Numbers that mean nothing, for every case."""
    results = []
    for number, case in enumerate(gpu_measure.long_cases("bf16") + gpu_measure.decode_cases("bf16")):
        names = gpu_peers.DECODERS if case.group == "decode" else gpu_peers.PEERS
        peers: dict[str, Any] = {}
        for place, name in enumerate(names):
            seconds = {"median": 1e-3, "q25": 9e-4, "q75": 2e-3, "rounds": 3}
            rate = 100.0 + 60 * place + number
            peers[name] = {
                "seconds": seconds,
                "tflops": rate,
                "error": 1e-3,
                "allowed": 2e-3,
                "peak_bytes": 0,
            }
            peers[name] |= {"gb_per_s": 10 * rate} if case.group == "decode" else {}
        peers["standard"] = {"left_out": "its scores need 99 GiB"}
        results.append({"case": case.as_dict(), "peers": peers})
    ceilings = {"matmul_tflops": 790.0, "copy_gb_per_s": 4200.0}
    return {"machine": FACTS, "check": [], "ceilings": ceilings, "results": results, "skipped": []}


def test_charts(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from benchmarks import gpu_plots

    written = gpu_plots.draw_all(made_up(), tmp_path)
    assert [path.name for path in written] == ["gpu_forward.png", "gpu_backward.png", "gpu_decode.png"]
    assert all(path.stat().st_size > 20_000 for path in written)


def test_rates_shares_and_ratios():
    found = made_up()
    result = found["results"][0]
    result["peers"]["flash"]["seconds"]["median"] = 1.5e-3
    row = gpu.report([result], found["ceilings"]).splitlines()[-1]
    assert row.split()[-4:] == ["ms", "13%", "1.50x", "0.0"]
    decode = gpu.report(found["results"][-1:], found["ceilings"]).splitlines()[-1]
    assert decode.split()[-3] == f"{100 * (1000 + 740) / 4200:.0f}%"


def test_check_runs_where_it_is_told(monkeypatch: pytest.MonkeyPatch):
    devices: list[torch.device] = []

    def noted(query: Tensor, *rest: Any, **options: Any) -> Any:
        devices.append(query.device)
        raise NotImplementedError("no values there")

    monkeypatch.setattr(check.flashtile, "attention", noted)
    trial = next(trial for trial in check.TRIALS if trial.name == "bias")
    monkeypatch.setattr(check, "compare", lambda *results: None)
    assert check.judge(trial, torch.float32, "meta").failure == "NotImplementedError: no values there"
    assert [device.type for device in devices] == ["meta"]


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        yield processes


@pytest.mark.slow
def test_processes_share_the_work(pool: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "TRIALS", check.TRIALS[:1])
    monkeypatch.setattr(check, "GPU_DTYPES", (torch.float32,))
    found = gpu.check_all(CPU, pool)
    assert [(verdict.trial, verdict.dtype, verdict.passed) for verdict in found] == [
        ("plain", "float32", True)
    ]
    gpu.compile_kernels(cases()[:1], CPU, pool, seconds=60.0)


def ended(*call: Any) -> None:
    os._exit(3)


@pytest.mark.slow
def test_a_check_that_ends_its_process_has_failed(pool: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "judge", ended)
    found = gpu.check_all(CPU, pool)
    assert [(verdict.trial, verdict.passed) for verdict in found] == [("the rest", False)]
    with pytest.raises(BrokenProcessPool):
        gpu.compile_kernels(cases()[:1], CPU, pool, seconds=60.0)


@pytest.mark.parametrize("name", ["flashtile", "flash1"])
def test_one_call_runs_what_is_measured_later(name: str, monkeypatch: pytest.MonkeyPatch):
    called: list[torch.Size] = []

    def builder(case: Case, device: torch.device) -> Any:
        return lambda query, key, value: called.append(query.shape) or query

    monkeypatch.setitem(gpu.PEERS, name, builder)
    gpu.call_once(name, cases()[0], "cpu")
    assert called == [(2, 2, 40, 16)]
