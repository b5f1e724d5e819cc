"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import cli
from flashtile.cpu import engine, entries, plans


@pytest.mark.parametrize(
    "command", ["info", "check", "warmup", "masks", "bench", "demo", "train", "lab", "explain"]
)
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"flashtile {command}" in text.split("examples:")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["bench", "--shape", "1,2,3"], "BATCH,HEADS,LENGTH,HEAD_DIM"),
        (["bench", "--shape", "1,2,3,0"], "at least 1"),
        (["bench", "--dtype", "fp32,int8"], "'int8'"),
        (["check", "--dtype", "fp12"], "'fp12'"),
        (["info", "--dtype", "fp32,bf16"], "expected one of fp32,bf16,fp16,fp64, got 'fp32,bf16'"),
        (["check", "--device", "mps"], "--device mps: no backend serves mps tensors"),
        (["info", "--threads", "0"], "at least 1"),
        (["check", "--threads", "99999"], "the processors of this machine, got 99999"),
        (["bench", "--seconds", "-1"], "--seconds: expected a number above 0, got '-1'"),
        (["demo", "--minutes", "0"], "--minutes: expected a number above 0, got '0'"),
        (["demo", "--minutes", "inf"], "expected a number above 0, got 'inf'"),
        (["demo", "--output", f"{__file__}/demo"], "test_cli.py is none that can be written to"),
        (["warmup", "--dtype", "int8"], "expected some of fp32,bf16,fp16,fp64, got 'int8'"),
        (["masks", "--only", "spiral"], "--only must be part of a mask's name, got 'spiral'"),
        (["info", "--device", "tpv"], "expected cpu, cuda or cuda:N, got 'tpv'"),
        (["info", "--heads", "many"], "expected a whole number of at least 1, got 'many'"),
        (["bench", "--group", "small", "--dtype", "fp32", "--pass", "forward"], "leave out --dtype, --pass"),
        (["bench", "--kv-heads", "3"], "--kv-heads must divide the 8 heads, got 3"),
        (["lab", "--sram", "192q"], "expected bytes such as 196608, 192k or 1m, got '192q'"),
        (["lab", "--sram", "k"], "expected bytes such as 196608, 192k or 1m, got 'k'"),
        (
            ["lab", "--sram", "3", "--dtype", "fp32"],
            "--sram must hold at least one number of fp32, got 3 bytes",
        ),
        (["lab", "--blocks", "64"], "expected ROWSxCOLUMNS such as 64x128, got '64'"),
        (["lab", "--blocks", "64x0"], "expected ROWSxCOLUMNS such as 64x128, got '64x0'"),
        (["lab", "--blocks", "64x64", "--sram", "1m"], "--blocks takes the place of what --sram is for"),
        (["lab", "--cards", "a100,v100"], "expected some of a100,h100,h200,cpu, got 'v100'"),
        (["lab", "--trace", "--seq", "8192"], "--trace runs at most 16777216 scores, got 1 x 8192 x 8192"),
        (["lab", "--trace", "--blocks", "1x1"], "--trace runs at most 32768 tiles, got 262144"),
        (["lab", "--paper", "--seq", "8", "--causal"], "leave out --seq, --causal"),
        (["lab", "--plot", "lab.txt"], "--plot must be a file ending in .png, .svg or .pdf, got 'lab.txt'"),
        (
            ["lab", "--plot", "nowhere/lab.png"],
            "--plot must be in a folder that exists, got 'nowhere/lab.png'",
        ),
    ],
)
def test_wrong_arguments_exit_with_2_and_say_what_was_expected(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_info_prints_machine_versions_and_the_explanation_of_a_call(capsys):
    assert cli.main(["info", "--dtype", "bfloat16", "--heads", "6", "--kv-heads", "2"]) == 0
    text = capsys.readouterr().out
    for part in ("instruction set", "threads", "cache folder", f"torch {torch.__version__}", "bfloat16"):
        assert part in text
    assert "backend: flashtile.cpu" in text
    assert "3 query heads share each key head" in text


def test_info_names_what_hinders_a_call(capsys):
    assert cli.main(["info", "--heads", "5", "--kv-heads", "2"]) == 1
    text = capsys.readouterr().out
    assert "backend: none" in text
    assert "5 query heads" in text


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["flashtile"] == flashtile.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["call"][1] == "backend: flashtile.cpu"


def test_threads_are_set(capsys):
    assert cli.main(["info", "--json", "--threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["threads"] == 1


def test_warmup_asks_for_every_kernel_and_says_where_they_are(capsys, monkeypatch):
    asked = set()

    def recorded(kernel, kind):
        asked.add(f"{kernel.py_func.__name__}-{kind.name}")
        return entries.entry(kernel, kind)

    for module in (engine, plans):
        monkeypatch.setattr(module, "entry", recorded)
    monkeypatch.setattr(plans, "_plans", {})  # a plan that is remembered asks for nothing
    assert cli.main(["warmup", "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["seconds"]["fp32"]) == {"forward", "backward", "decode"}
    names = ("forward", "decode", "merge", "row_deltas", "backward")
    assert asked == {f"{name}-float32" for name in names}
    assert asked <= {file.name.rpartition("-")[0] for file in Path(found["cache_folder"]).iterdir()}


def test_masks_are_drawn(capsys):
    assert cli.main(["masks", "--only", "prefix"]) == 0
    assert capsys.readouterr().out.strip().startswith("prefix([3])   8 queries, 8 keys")


@pytest.mark.parametrize("command", [["flashtile.masks"], ["flashtile", "masks"]])
def test_a_reader_that_stops_early_is_no_error(command):
    writer = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait() == 141
    writer.stderr.close()


def test_check_passes_here(capsys):
    assert cli.main(["check", "--dtype", "fp32"]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    assert "13 of 13 passed" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_no_gpu_is_named_as_the_reason(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["check", "--device", "cuda:1"])
    assert stop.value.code == 2
    assert "--device cuda:1: torch" in capsys.readouterr().err
    assert cli.main(["info", "--device", "cuda"]) == 1
    assert "sees no GPU here" in capsys.readouterr().out


@pytest.mark.gpu
def test_check_passes_on_a_gpu(capsys):
    assert cli.main(["check", "--device", "cuda", "--dtype", "fp16"]) == 0
    assert "13 of 13 passed" in capsys.readouterr().out


def test_check_fails_on_a_wrong_kernel(capsys, monkeypatch):
    for name in ("attention", "attention_varlen"):
        right = getattr(flashtile, name)

        def wrong(*args, right=right, **kwargs):
            out, lse = right(*args, **kwargs)
            return out * 1.001, lse

        monkeypatch.setattr(flashtile, name, wrong)
    assert cli.main(["check", "--dtype", "fp32", "--json"]) == 1
    verdicts = json.loads(capsys.readouterr().out)
    assert not any(verdict["passed"] for verdict in verdicts)


def test_check_reports_an_error_instead_of_stopping(capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(flashtile, "attention", broken)
    assert cli.main(["check", "--dtype", "fp32"]) == 1
    assert "RuntimeError: no such instruction" in capsys.readouterr().out
    assert cli.main(["check", "--dtype", "fp32", "--json"]) == 1
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[0]["error"] is None


def test_bench_as_json(capsys):
    arguments = [
        "bench",
        "--shape",
        "1,2,64,16",
        "--dtype",
        "fp32",
        "--rounds",
        "2",
        "--no-ceilings",
        "--json",
    ]
    assert cli.main([*arguments, "--causal", "both"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["case"]["name"] for result in found["results"]] == [
        "forward fp32 1x2x64x16",
        "forward fp32 causal 1x2x64x16",
        "backward fp32 1x2x64x16",
        "backward fp32 causal 1x2x64x16",
    ]
    for result in found["results"]:
        assert set(result["seconds"]) == {"flashtile", "torch", "standard"}
        assert all(0 < timing["p20"] <= timing["p80"] for timing in result["seconds"].values())


def test_bench_as_a_table(capsys):
    shape = ["--shape", "1,4,1,16", "--kv-heads", "2", "--key-length", "64"]
    options = ["--dtype", "bf16", "--pass", "forward", "--against", "torch", "--rounds", "1", "--no-ceilings"]
    assert cli.main(["bench", *shape, *options]) == 0
    captured = capsys.readouterr()
    assert "forward bf16 1x4x1x16 kv 2x64" in captured.out
    assert "standard" not in captured.out
    assert captured.err == ""  # progress only on a terminal


def test_interruption_exits_with_130(capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(flashtile.dispatch, "explain", interrupt)
    assert cli.main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_module_is_the_command():
    command = [sys.executable, "-m", "flashtile", "bench", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ.copy())
    assert answer.returncode == 0
    assert answer.stdout.startswith("usage: flashtile bench")


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"flashtile {flashtile.__version__}\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    """`flashtile info | head -1`"""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "flashtile", "info"]
    answer = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert answer.stderr == ""
    assert answer.returncode == 141
