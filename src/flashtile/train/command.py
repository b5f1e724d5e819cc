"""`flashtile train`: a run from its options to a sample of what was learned."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Any

import torch

from flashtile import dispatch
from flashtile.bench.console import Progress, styled
from flashtile.train import checkpoint, log
from flashtile.train.data import Tokenizer, read_corpus
from flashtile.train.flops import known_card, model_flops
from flashtile.train.loop import Training
from flashtile.train.options import check_same, given_settings, new_settings


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code: 130 where the run was stopped by Ctrl-C or SIGTERM.

    ``options.refuse`` is called with a message for options that do not go together; it does not return.
    """
    reason = dispatch.unserved_reason(options.device.partition(":")[0])
    if reason:
        options.refuse(f"--device {options.device}: {reason}")
    if options.compile and options.device == "cpu" and not cpp_compiler():
        options.refuse("--compile needs a C++ compiler on a CPU: found no g++ or clang++, and CXX names none")
    if options.sample < 0:
        options.refuse(f"--sample must be at least 0, got {options.sample}")
    try:
        training = resumed(options) if options.resume else begun(options)
    except ValueError as error:
        options.refuse(str(error))
    say = _quiet if options.json else _say
    shape, settings = training.model.shape, training.settings
    say(
        f"GPT of {shape.parameters:,} parameters, attention by {settings.attention}, {settings.dtype} on "
        f"{options.device}; {len(training.corpus.training):,} tokens to learn from, "
        f"{training.tokens_per_step:,} a step"
    )
    with Interruption() as interruption:
        entries = learn(training, options.output, options.checkpoint_every, interruption, say)
    if interruption.asked:
        say(f"saved step {training.done}; go on with: flashtile train --resume --output {options.output}")
        return 130
    answer = summary(training, entries)
    say(report(answer))
    answer["sample"] = sample(training, options.prompt, options.sample)
    if options.sample:
        say(f"\n{styled(options.prompt, 'cyan')}{printable(answer['sample'])}")
    files = [options.output / name for name in (checkpoint.NAME, log.NAME)]
    try:
        picture = options.output / "loss.png"
        log.draw(entries, picture, f"{shape.parameters:,} parameters, {settings.attention}, {settings.dtype}")
        files.append(picture)
    except ImportError:
        say("no loss.png: pip install 'flashtile[plot]' brings matplotlib")
    answer["files"] = [str(path) for path in files]
    say(f"\nwrote {', '.join(answer['files'])}")
    if options.json:
        print(json.dumps(answer, indent=2))
    return 0


def cpp_compiler() -> str | None:
    """The compiler that torch.compile would call."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)


def _say(text: str) -> None:
    print(text, flush=True)


def _quiet(text: str) -> None:
    """What --json leaves out."""


def begun(options: argparse.Namespace) -> Training:
    """A new run, at its beginning; raises ValueError."""
    folder: Path = options.output
    if (folder / checkpoint.NAME).exists():
        raise ValueError(
            f"--output {folder} holds a run already: --resume goes on with it, another folder keeps it"
        )
    settings = new_settings(given_settings(options))
    settings.shape(257)  # refuses sizes that do not fit before the text is read
    corpus = read_corpus([Path(name) for name in settings.text], settings.context, settings.vocabulary)
    training = Training(settings, corpus, options.device, compiled=options.compile)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output must be a folder that can be made, got {folder}: {error.strerror}"
        ) from error
    return training


def resumed(options: argparse.Namespace) -> Training:
    """The run in the folder, as it was saved; raises ValueError."""
    settings, content = checkpoint.load(options.output)
    check_same(settings, given_settings(options))
    texts = [Path(name) for name in settings.text]
    corpus = read_corpus(texts, settings.context, Tokenizer(content["pairs"]))
    checkpoint.check_corpus(content, corpus.digest)
    training = Training(settings, corpus, options.device, compiled=options.compile)
    training.load_state(content)
    return training


class Interruption:
    """Within it Ctrl-C and SIGTERM are noted, so that no step is left half done; the second stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> Interruption:
        for kind in (signal.SIGINT, signal.SIGTERM):
            self._before[kind] = signal.signal(kind, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def learn(
    training: Training, folder: Path, checkpoint_every: int, interruption: Interruption, say: Any
) -> list[log.Entry]:
    """All steps that are left, with log and checkpoints in the folder; returns the log."""
    settings = training.settings
    written = log.Log(folder, training.done)
    saved = training.done if training.done else None
    try:
        with Progress("training", settings.steps - training.done) as progress:
            while training.done < settings.steps and not interruption.asked:
                progress.step(f"loss {written.entries[-1]['loss']:.3f}" if written.entries else "first step")
                entry = logged_step(training)
                written.append(entry)
                if entry["validation_loss"] is not None:
                    progress.clear()
                    say(
                        f"step {entry['step']:>6}  loss {entry['loss']:.3f}  held out "
                        f"{entry['validation_loss']:.3f}  {entry['tokens_per_second']:,.0f} tokens/s"
                    )
                if training.done % checkpoint_every == 0:
                    checkpoint.save(training, folder)
                    saved = training.done
        if saved != training.done:
            checkpoint.save(training, folder)
    finally:
        written.close()
    return written.entries


def logged_step(training: Training) -> log.Entry:
    """One step, timed; every so often with the loss of the held-out text."""
    settings, start = training.settings, time.perf_counter()
    rate = settings.rate(training.done)
    loss = training.step()
    seconds = time.perf_counter() - start
    due = training.done % settings.validate_every == 0 or training.done == settings.steps
    return {
        "step": training.done,
        "loss": loss,
        "validation_loss": training.validation_loss() if due else None,
        "learning_rate": rate,
        "tokens_per_second": training.tokens_per_step / seconds,
    }


def summary(training: Training, entries: list[log.Entry]) -> dict[str, Any]:
    """What was reached and how fast: the median step's tokens, and the paper's model FLOPs of them."""
    shape = training.model.shape
    speed = median(entry["tokens_per_second"] for entry in entries)
    card = known_card(training.device)
    tflops = speed * model_flops(shape) / 1e12
    return {
        "settings": asdict(training.settings),
        "parameters": shape.parameters,
        "steps": training.done,
        "loss": entries[-1]["loss"],
        "validation_loss": entries[-1]["validation_loss"],
        "tokens_per_second": speed,
        "model_tflops": tflops,
        "card": card and card.name,
        "model_flops_utilisation": card and tflops * 1e12 / card.matmul["bf16"],
    }


def report(answer: dict[str, Any]) -> str:
    lines = (
        f"\nheld-out loss {answer['validation_loss']:.3f} nats per token; median step: "
        f"{answer['tokens_per_second']:,.0f} tokens/s, {answer['model_tflops']:.3g} TFLOP/s "
        "(6 N + 12 L d S a token)"
    )
    if answer["card"]:
        lines += f", {answer['model_flops_utilisation']:.0%} of the bfloat16 peak of an {answer['card']}"
    return lines


def printable(text: str) -> str:
    """Without characters that a terminal would obey, which an unlearned model writes, too."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def sample(training: Training, prompt: str, count: int) -> str:
    """What the model writes after the prompt at a document's beginning."""
    tokenizer = training.corpus.tokenizer
    tokens = torch.tensor([tokenizer.start, *tokenizer.encode(prompt)])
    training.model.eval()
    written = training.model.write(tokens, count, tokenizer.start, seed=training.settings.seed)
    return tokenizer.decode(written)
