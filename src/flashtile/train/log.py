"""The log of a run as CSV, one line for each step, and its picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TypedDict

NAME = "log.csv"


class Entry(TypedDict):
    """One step: losses in nats per token (validation only now and then), and how fast it went."""

    step: int
    loss: float
    validation_loss: float | None
    learning_rate: float
    tokens_per_second: float


def read(folder: Path) -> list[Entry]:
    """The steps in a folder's log, in order, without a line that was cut off; none where there is no log."""
    path = folder / NAME
    if not path.exists():
        return []
    entries: list[Entry] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["tokens_per_second"]:
                break
            entries.append(
                {
                    "step": int(row["step"]),
                    "loss": float(row["loss"]),
                    "validation_loss": float(row["validation_loss"]) if row["validation_loss"] else None,
                    "learning_rate": float(row["learning_rate"]),
                    "tokens_per_second": float(row["tokens_per_second"]),
                }
            )
    return entries


class Log:
    """Appends to the log in a folder; what it holds of steps after ``done`` is forgotten."""

    def __init__(self, folder: Path, done: int) -> None:
        self.entries = [entry for entry in read(folder) if entry["step"] <= done]
        path, columns = folder / NAME, list(Entry.__annotations__)
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            kept = csv.DictWriter(file, columns)
            kept.writeheader()
            kept.writerows(self.entries)
        unfinished.replace(path)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns)

    def append(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._writer.writerow(entry)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def draw(entries: list[Entry], path: Path, title: str) -> None:
    """The losses by step as an image (.png, .svg or .pdf); raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [entry["step"] for entry in entries], [entry["loss"] for entry in entries],
        color="#1f6feb", alpha=0.45, linewidth=0.8, label="training",
    )  # fmt: skip
    held_out = [
        (entry["step"], entry["validation_loss"]) for entry in entries if entry["validation_loss"] is not None
    ]
    axes.plot(
        [step for step, _ in held_out], [loss for _, loss in held_out],
        color="#d1242f", marker="o", markersize=3, label="held out",
    )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
