"""Checkpoints: all that a run needs to go on to the same losses, in a file that is whole or not there."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flashtile.train.loop import Training
from flashtile.train.settings import Settings

NAME = "checkpoint.pt"


def save(training: Training, folder: Path) -> Path:
    """Write the run as it is now; the checkpoint before stays until this one is on disk."""
    corpus = training.corpus
    content = {
        **training.state(),
        "settings": asdict(training.settings),
        "pairs": corpus.tokenizer.pairs,
        "digest": corpus.digest,
    }
    path = folder / NAME
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return path


def load(folder: Path) -> tuple[Settings, dict[str, Any]]:
    """The settings of the run in a folder, and its state; raises ValueError where there is none."""
    path = folder / NAME
    if not path.exists():
        raise ValueError(f"there is no run to resume in {str(folder)!r}: no {NAME}")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    settings = content.pop("settings")
    return Settings(**settings | {"text": tuple(settings["text"])}), content


def check_corpus(content: dict[str, Any], digest: str) -> None:
    """Refuse to go on with another text than the run began with."""
    if content["digest"] != digest:
        raise ValueError("text has changed since the run began: its losses would not be those of one run")
