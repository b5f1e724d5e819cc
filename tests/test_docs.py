"""docs/: the code runs and prints what the pages say, links lead somewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest

import flashtile
from tests.documents import ROOT, anchors, blocks, broken, links

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
COMING = {"explainer.html", "scaling.md"}  # linked from index.md, written elsewhere

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
@pytest.mark.usefixtures("inactive_after", "launched_alone")
def test_code_runs_in_order_and_prints_what_the_page_says(page):
    names: dict[str, Any] = {}
    for block in blocks(page):
        printed = block.run(names)
        assert printed == (block.printed or ""), f"{page.name}, line {block.line}"


@each_page
def test_links_and_anchors_lead_somewhere(page):
    assert set(broken(page)) <= (COMING if page.name == "index.md" else set())


def test_broken_links_and_anchors_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A head: `two`\n[a](#a-head-two) [b](#b) [c](page.md#a-head-two) [d](page.md#d) [e](e.md)\n"
        "```text\n# no heading\n[f](f.md)\n```\n`[g](g.md)` [h](https://h)\n"
    )
    assert anchors(page) == {"a-head-two"}
    assert broken(page) == ["#b", "page.md#d", "e.md"]


def test_every_page_can_be_reached_from_the_first():
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in reached and page.suffix == ".md" and page.parent == DOCS.resolve() and page.exists():
            reached.add(page)
            waiting += [page.parent / link.partition("#")[0] for link in links(page)]
    assert {page.name for page in reached} == {page.name for page in PAGES}


@each_page
def test_formulas_within_a_line_survive_markdown(page):
    """GitHub takes a backslash before punctuation for an escape, and a line's end for the end."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for formula in re.findall(r"\$([^$`]+)\$", text):
        assert not re.search(r"\\[^A-Za-z]|\n", formula), formula


def test_every_public_name_is_somewhere():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in flashtile.__all__:
        assert re.search(rf"\b(flashtile\.|import .*){name}\b", text), name


def test_the_site_has_every_page():
    pages = set(re.findall(r"\b[\w-]+\.md\b", (ROOT / "mkdocs.yml").read_text()))
    assert {page.name for page in PAGES} <= pages
