"""A hook of mkdocs: what pages link to outside docs/ (sources, pictures) becomes part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add every such file, under its own path."""
    for page in list(files.documentation_pages()):
        for path, _ in _OUTSIDE.findall(page.content_string):
            if files.get_file_from_path(_name(path)) is None:
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, _name(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links point there; an anchor of a text is lost."""
    here = posixpath.dirname(page.file.src_uri)
    return _OUTSIDE.sub(lambda found: f"]({posixpath.relpath(_name(found[1]), here or '.')})", markdown)


def _name(path: str) -> str:
    """Markdown from outside is shown as it is: its own links would lead nowhere."""
    return f"{path}.txt" if path.endswith(".md") else path
