"""Plain-text output for people: tables on stdout, progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """`text` in a style, where the stream is a terminal and NO_COLOR is not set."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def heading(text: str) -> None:
    print("\n" + styled(text, "bold"), flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], emphasis: str | None = None) -> str:
    """An aligned table: first column to the left, the rest to the right.

    Rows whose first cell starts with `emphasis` are set in colour on a terminal.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([row[0].ljust(widths[0]), *padded]).rstrip()

    lines = [styled(line(header), "dim"), styled("  ".join("-" * width for width in widths), "dim")]
    for row in cells:
        marked = emphasis is not None and row[0].startswith(emphasis)
        lines.append(styled(line(row), "cyan") if marked else line(row))
    return "\n".join("  " + text for text in lines)


def bar(share: float, width: int = 30) -> str:
    """A bar of `share` (0 to 1) of `width` characters, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


class Progress:
    """A progress bar on stderr with the time left; silent where stderr is not a terminal.

    Use as a context manager and call `step(label)` before each of `total` steps.
    """

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, max(total, 1), -1
        self.start = time.monotonic()
        self.shown = sys.stderr.isatty()

    def step(self, label: str) -> None:
        self.done = min(self.done + 1, self.total)
        if not self.shown:
            return
        elapsed = time.monotonic() - self.start
        left = f"{elapsed / self.done * (self.total - self.done):4.0f} s left" if self.done else ""
        line = f"{self.title} {bar(self.done / self.total, 24)} {self.done}/{self.total} {left}  {label}"
        print(f"\r\x1b[2K{line[: self._columns()]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the bar away until the next step, for a line of text."""
        if self.shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

    @staticmethod
    def _columns() -> int:
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns - 1
        except (OSError, ValueError):
            return 79

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
