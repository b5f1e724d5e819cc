"""The source that the page steps through, `flashtile.lab.flash2.forward`, with names for its lines."""

from __future__ import annotations

import inspect
import io
import keyword
import tokenize
from typing import Any

from flashtile.lab import flash2

# What the page calls a line, and how the line is found. The order is that of the source.
LINES = {
    "length": "length = query.shape[0]",
    "out": "out = memory.result(",
    "lse": "lse = memory.scratch(",
    "rows": "for rows in parts(",
    "loadQuery": "Q_i = memory.load(",
    "freshOutput": "O_i = memory.fresh(",
    "freshStatistics": "l_i, m_i = (memory.fresh(",
    "columns": "for columns in parts(",
    "visits": "if not setting.visits(",
    "loadKeys": "K_j, V_j = memory.load(",
    "scores": "S = (Q_i @ K_j.T)",
    "resident": "memory.resident(",
    "mask": "S = setting.mask(",
    "newMax": "m_new = m_i.maximum(",
    "weights": "P = (S - m_new",
    "factor": "from_old = (m_i - m_new",
    "rowSum": "l_i = l_i.rescaled(",
    "dropout": "P = setting.dropout(",
    "output": "O_i = O_i.rescaled(",
    "rowMax": "m_i = m_new",
    "storeOutput": "memory.store(out[rows]",
    "storeLse": "memory.store(lse[rows]",
    "return": "return out, lse",
}

Piece = tuple[str, str]  # kind ("" for what is plain) and text


def listing() -> dict[str, Any]:
    """The source in lines of pieces, and the index of each named line."""
    source = inspect.getsource(flash2.forward)
    return {
        "name": f"{flash2.forward.__module__}.{flash2.forward.__name__}",
        "source": pieces(source),
        "lines": named_lines(source),
    }


def named_lines(source: str) -> dict[str, int]:
    """The index of the line of each name of `LINES`; a ValueError where it is not exactly one."""
    lines = [line.strip() for line in source.splitlines()]
    found = {}
    for name, start in LINES.items():
        indices = [index for index, line in enumerate(lines) if line.startswith(start)]
        if len(indices) != 1:
            raise ValueError(f"{start!r} must start exactly one line of the source, found {len(indices)}")
        found[name] = indices[0]
    return found


def pieces(source: str) -> list[list[Piece]]:
    """Lines of pieces: comments, keywords, strings, numbers, what is plain. Joined, they are the source."""
    lines: list[list[Piece]] = [[] for _ in source.splitlines()]
    done = [0] * len(lines)
    text = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = _kind(token)
        (row, start), (last, end) = token.start, token.end
        if not kind or row != last:
            continue
        line = lines[row - 1]
        if start > done[row - 1]:
            line.append(("", text[row - 1][done[row - 1] : start]))
        line.append((kind, token.string))
        done[row - 1] = end
    for line, complete, end in zip(lines, text, done, strict=True):
        if end < len(complete):
            line.append(("", complete[end:]))
    return lines


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME and keyword.iskeyword(token.string):
        return "keyword"
    return {tokenize.COMMENT: "comment", tokenize.STRING: "string", tokenize.NUMBER: "number"}.get(
        token.type, ""
    )
