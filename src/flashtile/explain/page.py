"""Puts the page together: markup, style, scripts, texts and data in one file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from flashtile.checks import check_choice
from flashtile.explain.data import gather

# In the order in which they build on each other.
SCRIPTS = ("base", "row", "stepper", "race", "online", "skipping", "backward", "work", "code", "start")
LANGUAGES = {"en": "English", "zh": "中文", "pl": "Polski"}

Texts = Mapping[str, Mapping[str, str]]  # {key: {language: text}}


def build(language: str = "en") -> str:
    """The whole page as HTML, which refers to no other file; ``language`` is the one that it opens in."""
    check_choice("language", language, LANGUAGES)
    texts = read_texts()
    parts = {
        "style": read("page.css"),
        "data": script_json({"languages": LANGUAGES, **gather()}),
        "texts": script_json(texts),
        "script": "\n".join(read(f"{name}.js") for name in SCRIPTS),
    }
    page = read("page.html").replace('<html lang="en">', f'<html lang="{language}">')
    page = with_texts(page, texts, language)
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]].strip(), page)


def read(name: str) -> str:
    """A file of the folder `web`."""
    return (files("flashtile.explain") / "web" / name).read_text(encoding="utf-8")


def read_texts() -> Texts:
    """All texts of the page in all languages."""
    texts: Texts = json.loads(read("texts.json"))
    return texts


def with_texts(page: str, texts: Texts, language: str) -> str:
    """Markup with the text of each ``data-text`` in its element, and of each ``data-label`` as its label.

    The scripts do the same when the language changes; this is for readers, and programs, without scripts.
    """
    page = re.sub(
        r'(data-label="([\w.]+)")',
        lambda found: f'{found[1]} aria-label="{html.escape(texts[found[2]][language])}"',
        page,
    )
    return re.sub(r'(data-text="([\w.]+)"[^>]*>)', lambda found: found[1] + texts[found[2]][language], page)


def script_json(content: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
