"""Pages of Markdown whose code runs: their blocks, what these print, and where links lead."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
_CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_IN_LINE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


class Block(NamedTuple):
    """A block of Python, and the text that the page says it prints, if it does."""

    page: Path
    line: int  # of the page, before the first one of the source
    source: str
    printed: str | None

    def run(self, names: dict[str, Any]) -> str:
        """What the block prints; errors point at the line of the page."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * self.line + self.source, str(self.page), "exec"), names)
        return output.getvalue()


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: found.start(1)].count("\n"), found[1], found[2]) for found in _CODE.finditer(text)
    ]


def links(page: Path) -> list[str]:
    """Every relative link and picture of a page, and every anchor in it."""
    text = _IN_LINE.sub("", _FENCED.sub("", page.read_text()))
    return [target for target in _LINK.findall(text) if not target.startswith(("http:", "https:"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs name them."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    missing = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    return missing
