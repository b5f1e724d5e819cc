"""Training: the same learning with each attention, and runs that go on as if nothing had stopped them."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from flashtile import cli
from flashtile.train import Corpus, Settings, Training, checkpoint, command, log, options, read_corpus

SMALL: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "context": 48,
    "batch": 4,
    "warmup": 2,
    "steps": 8,
}
OPTIONS = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 5 to 150 bytes, so that most rows hold several."""
    lines = [f"{i} times {j} makes {i * j}.\n" for i in range(30) for j in range(i % 7 + 1)]
    ends = ["\n\n" if i % 4 == 3 else "" for i in range(len(lines))]
    path = tmp_path_factory.mktemp("text") / "tables.txt"
    path.write_text("".join(line + end for line, end in zip(lines, ends, strict=True)))
    return path


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return read_corpus([text], SMALL["context"])


def losses(corpus: Corpus, **changes: Any) -> list[float]:
    training = Training(Settings(**SMALL | changes), corpus)
    return [training.step() for _ in range(training.settings.steps)]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fp32_losses_agree_step_by_step(corpus, dropout):
    ours = losses(corpus, dropout=dropout)
    peers = ("standard",) if dropout else ("standard", "sdpa")
    allowed = 16 * torch.finfo(torch.float32).eps * ours[0]
    for attention in peers:
        theirs = losses(corpus, dropout=dropout, attention=attention)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= allowed
    other_seed = losses(corpus, dropout=dropout, seed=1)
    assert max(abs(a - b) for a, b in zip(ours, other_seed, strict=True)) > 100 * allowed
    assert ours[-1] < ours[0] - 0.1


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bf16_losses_agree_on_average(corpus, dropout):
    """Losses are means over tokens, each with bfloat16 roundings of its own, then means over steps."""
    ours, exact = (losses(corpus, dropout=dropout, dtype=dtype) for dtype in ("bf16", "fp32"))
    epsilon = torch.finfo(torch.bfloat16).eps * fmean(exact) / (SMALL["batch"] * SMALL["context"]) ** 0.5
    peers = ("standard",) if dropout else ("standard", "sdpa")
    in_bf16 = (losses(corpus, dropout=dropout, dtype="bf16", attention=name) for name in peers)
    for theirs in (exact, *in_bf16):
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        assert max(map(abs, differences)) <= epsilon
        assert abs(fmean(differences)) <= epsilon / len(differences) ** 0.5


def test_accumulated_parts_are_one_batch(corpus):
    whole = losses(corpus, dropout=0.0, steps=4)
    parts = losses(corpus, dropout=0.0, steps=4, batch=1, accumulate=4)
    allowed = 16 * torch.finfo(torch.float32).eps * whole[0]
    assert max(abs(a - b) for a, b in zip(whole, parts, strict=True)) <= allowed


def test_accumulated_parts_drop_entries_of_their_own(corpus):
    training = Training(Settings(**SMALL | {"dropout": 0.5}), corpus)
    training.model.train()
    row = corpus.rows(0, 1, SMALL["context"] + 1, seed=0)
    first, again, second = (training.loss(row, seed).item() for seed in (3, 3, 4))
    assert first == again != second
    assert training.validation_loss() == training.validation_loss()


def test_a_single_document_needs_no_mask(corpus, monkeypatch):
    training = Training(Settings(**SMALL), corpus)
    seen = []
    monkeypatch.setattr(training, "_loss", lambda rows, documents, seed: seen.append(documents))
    row = torch.full((1, SMALL["context"] + 1), 65)
    row[0, 0] = row[0, -1] = corpus.tokenizer.start  # begins here; the next one's start is only predicted
    training.loss(row)
    row[0, 5] = corpus.tokenizer.start
    training.loss(row)
    assert seen[0] is None
    assert seen[1][0, :-1].unique().numel() == 2


def test_the_rate_rises_and_falls():
    settings = Settings(steps=100, warmup=10, learning_rate=1.0)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.slow
def test_compiled_losses_are_those_of_the_model(corpus, monkeypatch):
    """One graph, forward and backward; no C++ compiler is asked for."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    settings = Settings(**SMALL | {"dropout": 0.2, "layers": 1})
    plain, compiled = Training(settings, corpus), Training(settings, corpus, compiled=True)
    for _ in range(2):
        assert compiled.step() == pytest.approx(plain.step(), rel=1e-6)


# The command.


def lines_of(folder: Path) -> list[dict[str, str]]:
    """The log without what the clock says."""
    with (folder / log.NAME).open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


def train(text: Path, folder: Path, *more: str) -> int:
    common = ["--threads", "1", "--checkpoint-every", "3", "--sample", "20", "--validate-every", "4"]
    return cli.main(["train", "--text", str(text), "--output", str(folder), *OPTIONS, *common, *more])


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    threads = torch.get_num_threads()
    assert train(text, folder) == 0
    torch.set_num_threads(threads)
    return folder


def test_a_run_leaves_log_picture_and_checkpoint(whole):
    lines = lines_of(whole)
    assert [int(line["step"]) for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if line["validation_loss"]] == ["4", "8"]
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    settings, content = checkpoint.load(whole)
    assert settings.layers == 2
    assert content["done"] == 8
    assert not list(whole.glob("*.unfinished"))


def test_a_killed_run_goes_on_to_the_same_losses(text, whole, tmp_path, capsys):
    folder = tmp_path / "run"
    own = [sys.executable, "-m", "flashtile", "train", "--text", str(text), "--output", str(folder)]
    own += [*OPTIONS, "--threads", "1", "--checkpoint-every", "3", "--validate-every", "4"]
    running = subprocess.Popen(own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(log.read(folder)) < 5 and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    _, errors = running.communicate()
    assert running.returncode == -signal.SIGKILL, errors
    _, content = checkpoint.load(folder)
    assert content["done"] >= 3
    for name in ("checkpoint.unfinished", "log.unfinished"):  # as a kill at a worse moment leaves them
        (folder / name).write_bytes(b"half")
    assert train(text, folder, "--resume") == 0
    assert lines_of(folder) == lines_of(whole)


def test_what_the_log_says_of_steps_after_the_checkpoint_is_forgotten(text, whole, tmp_path):
    """Killed after a checkpoint, or just after one was written."""
    for done, logged in ((3, 5), (6, 6)):
        folder = tmp_path / f"{done}-{logged}"
        folder.mkdir()
        training = Training(
            Settings(**SMALL | {"text": (str(text),), "validate_every": 4}), read_corpus([text], 48)
        )
        torch.set_num_threads(1)
        for _ in range(done):
            training.step()
        checkpoint.save(training, folder)
        kept = (whole / log.NAME).read_text().splitlines(keepends=True)[: logged + 1]
        (folder / log.NAME).write_text("".join([*kept, "9,1.0"]))  # the last line was cut off
        assert train(text, folder, "--resume") == 0
        assert lines_of(folder) == lines_of(whole)


def interrupted_after(step: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    own = Training.step

    def interrupted(self: Training) -> float:
        if self.done == step - 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return own(self)

    monkeypatch.setattr(Training, "step", interrupted)


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(text, whole, tmp_path, capsys, monkeypatch):
    interrupted_after(5, monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    assert train(text, tmp_path) == 130
    assert (
        f"saved step 5; go on with: flashtile train --resume --output {tmp_path}" in capsys.readouterr().out
    )
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert train(text, tmp_path, "--resume") == 0
    assert lines_of(tmp_path) == lines_of(whole)


def test_ctrl_c_twice_stops_at_once(text, tmp_path, capsys, monkeypatch):
    interrupted_after(5, monkeypatch, times=2)
    assert train(text, tmp_path) == 130
    assert "interrupted" in capsys.readouterr().err
    assert checkpoint.load(tmp_path)[1]["done"] == 3


def test_a_finished_run_writes_more(whole, capsys):
    arguments = [
        "train",
        "--resume",
        "--output",
        str(whole),
        "--prompt",
        "3 times ",
        "--sample",
        "9",
        "--json",
    ]
    assert cli.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["steps"] == 8
    assert 0 < len(answer["sample"].encode()) <= 3 * 9  # bytes that are no text take three each
    assert answer["loss"] == float(lines_of(whole)[-1]["loss"])
    assert answer["model_tflops"] > 0
    assert answer["card"] is None


def test_what_a_model_writes_does_not_command_a_terminal():
    assert command.printable("Ham.\n\tÉ\x1b[31m\x07") == "Ham.\n\tÉ\ufffd[31m\ufffd"


def test_byte_pairs_come_back_from_the_checkpoint(text, tmp_path, capsys):
    assert train(text, tmp_path, "--vocabulary", "300", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert train(text, tmp_path, "--vocabulary", "300", "--resume", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert first == again
    assert first["parameters"] == Settings(**SMALL).shape(300).parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "--layers", "3"], "--layers belongs to the run that is resumed, where it is 2; got 3"),
        (["--resume", "--text", "other.txt"], "--text belongs to the run that is resumed"),
        ([], "holds a run already: --resume goes on with it, another folder keeps it"),
        (["--device", "cuda:9"], "--device cuda:9: torch"),
        (["--sample", "-1"], "--sample must be at least 0, got -1"),
        (["--attention", "flash"], "invalid choice: 'flash'"),
    ],
)
def test_options_that_do_not_fit_are_refused(whole, arguments, message, capsys):
    if "--device" in arguments and torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    refused(["--output", str(whole), *arguments], message, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "there is no run to resume in"),
        (["--width", "30"], "width must be an even multiple of the 4 heads"),
        (["--dropout", "1"], "dropout must be in [0, 1), got 1.0"),
        (["--learning-rate", "-1"], "learning_rate must be at least 0, got -1.0"),
        (["--text", "absent.txt"], "text must be files of UTF-8 text, got"),
        (["--vocabulary", "3"], "vocabulary must be at least 258"),
    ],
)
def test_settings_that_make_no_run_are_refused(tmp_path, arguments, message, capsys):
    refused(["--output", str(tmp_path / "new"), *arguments], message, capsys)
    assert not (tmp_path / "new").exists()


def refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(
            ["--output", str(folder)], f"--output must be a folder that can be made, got {folder}", capsys
        )
    assert (tmp_path / "file").read_text() == "mine"


def test_compiling_without_a_compiler_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    refused(
        ["--compile", "--output", str(tmp_path / "new")], "--compile needs a C++ compiler on a CPU", capsys
    )


def test_a_text_that_has_changed_is_refused(text, tmp_path, capsys):
    own = tmp_path / "own.txt"
    own.write_text(text.read_text())
    assert train(own, tmp_path / "run") == 0
    capsys.readouterr()
    own.write_text(text.read_text().replace("makes", "gives"))
    refused(["--resume", "--output", str(tmp_path / "run")], "text has changed since the run began", capsys)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"dtype": "fp16"}, ValueError, "dtype must be one of fp32, bf16, got 'fp16'"),
        ({"dtype": torch.float32}, ValueError, "dtype must be one of fp32, bf16, got torch.float32"),
        (
            {"attention": "flash"},
            ValueError,
            "attention must be one of flashtile, sdpa, standard, got 'flash'",
        ),
        (
            {"preset": "gpt5"},
            ValueError,
            "preset must be one of play, gpt2, gpt3-1.3b, gpt3-2.7b, got 'gpt5'",
        ),
        ({"text": "hamlet.txt"}, TypeError, r"a tuple of paths, got a str; say text=\('hamlet.txt',\)"),
        ({"steps": 1.5}, TypeError, "steps must be an int, got 1.5"),
        ({"batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ({"learning_rate": "3e-3"}, TypeError, "learning_rate must be a number, got '3e-3'"),
        ({"clip": -1.0}, ValueError, "clip must be at least 0, got -1.0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        Settings(**wrong)


def test_presets_are_changed_by_options():
    settings = options.new_settings({"preset": "gpt3-2.7b", "batch": 1})
    shape = settings.shape(50304)
    assert (settings.batch, settings.accumulate, settings.dtype) == (1, 64, "bf16")
    assert shape.head_dim == 80
    assert shape.parameters == pytest.approx(2.65e9, rel=0.01)
    sizes = {name: options.new_settings({"preset": name}).shape(50304).parameters for name in options.PRESETS}
    assert sizes["gpt2"] == pytest.approx(124e6, rel=0.01)
    assert sizes["gpt3-1.3b"] == pytest.approx(1.31e9, rel=0.01)
