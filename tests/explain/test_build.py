"""The explainer: the page and the parts it is put together from; what the lab gives it; the command."""

from __future__ import annotations

import inspect
import json
import re
import webbrowser
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from flashtile import cli, explain, lab, masks
from flashtile.explain import code, data, page
from flashtile.lab import flash2, theory
from flashtile.lab.algorithms import band
from flashtile.lab.occupancy import Occupancy, exchanged_by_warps, occupancy
from flashtile.lab.recording import CREATED, Recorder, record

ROOT = Path(__file__).parents[2]
MARKUP = {"var", "code", "wbr"}


def shape(length: int, head_dim: int, lower: int | None, upper: int | None) -> theory.Shape:
    return theory.Shape(
        query_length=length, key_length=length, head_dim=head_dim, value_head_dim=head_dim,
        lower=lower, upper=upper,
    )  # fmt: skip


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(left=3, right=2)], ids=str)
@pytest.mark.parametrize("direction", theory.DIRECTIONS)
@pytest.mark.parametrize("algorithm", lab.ALGORITHMS)
def test_recordings_add_up_to_what_theory_counts(algorithm, direction, mask):
    lower, upper = band(mask, 13, 13)
    blocks = lab.Blocks(4, 5)
    recording = record(algorithm, direction, 13, 3, blocks, lower=lower, upper=upper, element_size=4)
    assert (
        recording.counts
        == theory.one_pass(algorithm, direction, shape(13, 3, lower, upper), blocks, 4).counts
    )
    for kind, size in (("read", recording.counts.read), ("write", recording.counts.written)):
        assert sum(event.size for event in recording.events if event.kind == kind) == size
    done = [event.flops for event in recording.events]
    assert done == sorted(done)


def test_a_recording_names_rows_and_tiles():
    events = record("flash2", "forward", 4, 2, lab.Blocks(2, 2), upper=0).events
    found = [(event.kind, event.name, event.rows.start, event.rows.stop) for event in events]
    assert found == [
        ("read", "Q", 0, 2), ("read", "K", 0, 2), ("read", "V", 0, 2), ("tile", "S", 0, 2),
        ("write", "O", 0, 2), ("write", "LSE", 0, 2),
        ("read", "Q", 2, 4), ("read", "K", 0, 2), ("read", "V", 0, 2), ("tile", "S", 2, 4),
        ("read", "K", 2, 4), ("read", "V", 2, 4), ("tile", "S", 2, 4),
        ("write", "O", 2, 4), ("write", "LSE", 2, 4),
    ]  # fmt: skip
    assert [event.columns for event in events if event.kind == "tile"] == [
        slice(0, 2),
        slice(0, 2),
        slice(2, 4),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flsh", "forward", 1, 1), "algorithm must be one of standard, flash1, flash2, got 'flsh'"),
        (("flash2", "fwd", 1, 1), "direction must be one of forward, backward, got 'fwd'"),
        (("flash2", "forward", 0, 1), "length must be at least 1, got 0"),
        (("flash2", "forward", 1, 0), "head_dim must be at least 1, got 0"),
    ],
)
def test_record_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        record(*arguments, lab.Blocks(1, 1))


def test_a_recorder_tells_parts_of_one_tensor_apart():
    query, key, value = torch.randn(3, 4, 2, dtype=torch.float64)
    recorder = Recorder({"Q": query, "K": key, "V": value}, CREATED["flash2", "forward"])
    flash2.forward(query, key, value, lab.Blocks(2, 2), lab.Setting(scale=1.0), recorder)
    assert recorder.events == record("flash2", "forward", 4, 2, lab.Blocks(2, 2)).events


def test_a_recorder_refuses_what_it_cannot_tell_apart():
    both = torch.randn(5, 2)
    with pytest.raises(ValueError, match="inputs must share no memory, got Q and K that do"):
        Recorder({"Q": both[:3], "K": both[2:]}, ())
    recorder = Recorder({"Q": both[:3]}, ())
    with pytest.raises(ValueError, match=r"must be a part of inputs .* got one of shape \(2, 2\) elsewhere"):
        recorder.load(both[3:])


@pytest.mark.parametrize(
    ("algorithm", "direction", "heads", "blocks", "found"),
    [
        ("flash1", "forward", 32, lab.Blocks(128, 64), Occupancy(32, 108)),
        ("flash2", "forward", 2, lab.Blocks(128, 64), Occupancy(2 * 8, 108)),
        ("flash2", "backward", 2, lab.Blocks(128, 64), Occupancy(2 * 16, 108)),
    ],
)
def test_thread_blocks_are_heads_or_blocks_of_the_outer_loop(algorithm, direction, heads, blocks, found):
    assert occupancy(algorithm, direction, heads, 1000, blocks, 108) == found


@pytest.mark.parametrize(
    ("thread_blocks", "rounds", "at_first", "mean"), [(1, 1, 0.1, 0.1), (10, 1, 1, 1), (11, 2, 1, 0.55)]
)
def test_places_fill_in_rounds(thread_blocks, rounds, at_first, mean):
    one = Occupancy(thread_blocks, 10)
    assert (one.rounds, one.at_first, one.mean) == (rounds, at_first, mean)


def test_a_multiprocessor_may_take_several():
    assert occupancy("flash1", "forward", 5, 1, lab.Blocks(1, 1), 3, per_multiprocessor=2).places == 6


def test_warps_exchange_only_what_they_split_over_keys():
    assert exchanged_by_warps("flash1", lab.Blocks(16, 64), 8) == 4 * 16 * 8
    assert exchanged_by_warps("flash2", lab.Blocks(16, 64), 8) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "standard"}, "algorithm must be one of flash1, flash2, got 'standard'"),
        ({"algorithm": "flsh"}, "algorithm must be one of flash1, flash2, got 'flsh'"),
        ({"direction": "fwd"}, "direction must be one of forward, backward, got 'fwd'"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"per_multiprocessor": -1}, "per_multiprocessor must be at least 1, got -1"),
    ],
)
def test_occupancy_refuses(change, message):
    arguments = {
        "algorithm": "flash2", "direction": "forward", "heads": 1, "length": 1,
        "blocks": lab.Blocks(1, 1), "multiprocessors": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        occupancy(**arguments | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("standard", 1), "algorithm must be one of flash1, flash2, got 'standard'"),
        (("flash1", -3), "value_head_dim must be at least 1, got -3"),
        (("flash2", 1, 0), "warps must be at least 1, got 0"),
    ],
)
def test_exchanged_by_warps_refuses(arguments, message):
    algorithm, *sizes = arguments
    with pytest.raises(ValueError, match=message):
        exchanged_by_warps(algorithm, lab.Blocks(1, 1), *sizes)


@pytest.mark.parametrize("size", data.BLOCKS)
@pytest.mark.parametrize(
    ("name", "window", "mask"),
    [
        ("none", 0, None),
        ("causal", 0, masks.causal()),
        ("window", 0, masks.window(left=0, right=0)),
        ("window", 5, masks.window(left=5, right=5)),
        ("causal-window", 9, masks.causal() & masks.window(left=9)),
        ("causal-window", 31, masks.causal()),
    ],
)
def test_skipped_tiles_are_those_that_the_lab_skips(name, window, mask, size):
    found = data._skipped(size, data._mask(name, window))
    lower, upper = band(mask, data.LENGTH, data.LENGTH)
    setting = lab.Setting(scale=1.0, lower=lower, upper=upper)
    blocks = [slice(start, start + size) for start in range(0, data.LENGTH, size)]
    visited = [setting.visits(rows, columns) for rows in blocks for columns in blocks]
    assert [letter != "e" for letter in found["tiles"]] == visited
    query, key, value = torch.randn(3, 1, 1, data.LENGTH, data.HEAD_DIM)
    runs = [
        lab.run(name, query, key, value, blocks=lab.Blocks(size, size), mask=mask)
        for name in ("flash1", "flash2")
    ]
    assert found["traffic"] == [run.forward.traffic for run in runs]
    assert found["matmul"] == runs[1].forward.matmul


def test_each_named_line_is_one_of_the_source():
    source = inspect.getsource(flash2.forward)
    lines = code.named_lines(source)
    assert list(lines.values()) == sorted(set(lines.values()))
    with pytest.raises(ValueError, match="must start exactly one line of the source, found 0"):
        code.named_lines(source.replace("m_i = m_new", "pass"))


def test_pieces_are_the_source():
    source = inspect.getsource(flash2.forward)
    lines = ["".join(text for _, text in line) for line in code.pieces(source)]
    assert lines == source.splitlines()
    kinds = {kind for line in code.pieces(source) for kind, _ in line}
    assert kinds == {"", "keyword", "comment", "string", "number"}


class Tags(HTMLParser):
    """The tags of a text, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag if not attrs else f"{tag} {attrs}")

    def handle_endtag(self, tag: str) -> None:
        self.found.append(f"/{tag}")


def test_a_text_has_all_languages_with_the_same_places_and_markup():
    for key, found in page.read_texts().items():
        assert list(found) == list(page.LANGUAGES), key
        assert all(text.strip() == text != "" for text in found.values()), key
        places = [sorted(re.findall(r"\{\w+\}", text)) for text in found.values()]
        assert places == [places[0]] * 3, key
        tags = [sorted(Tags(text).found) for text in found.values()]
        assert tags == [tags[0]] * 3, key
        assert {tag.lstrip("/") for tag in tags[0]} <= MARKUP, key


# Keys that the scripts put together, and what they put in.
COMPOSED = {
    "${algorithm}.head": lab.ALGORITHMS,
    "${algorithm}.name": ("flash1", "flash2"),
    "flash${index + 1}.name": ("1", "2"),
    "race.${kind}": ("read", "write"),
    "race.${kind}.rows": ("read", "write"),
    "race.around.${direction}": theory.DIRECTIONS,
    "race.counter.${name}": ("read", "written", "flops"),
    "race.legend.${name}": ("stored", "moving", "chip", "computed"),
    "race.total.${name}": ("read", "written", "share", "chip", "scratch", "matmul", "other"),
    "online.${kind}.label": ("score", "value"),
    "online.${name}": ("key", "score", "value"),
    "online.column.${name}": ("keys", "scores", "m", "factor", "l", "u", "answer"),
    "online.error.${error.kind}": ("score", "value"),
    "online.preset.${name}": ("example", "rising", "hidden", "large"),
    "skipping.${name}": ("visited", "tested", "bytes1", "bytes2", "matmul"),
    "skipping.mask.${name}": data.MASKS,
    "backward.column.${name}": (
        "key", "score", "probability", "exact", "ofValue", "ofProbability", "ofScore",
    ),
    "backward.price.${name}": ("kept", "traffic", "matmul"),
    "backward.saved.${name}": ("answer", "lse", "delta"),
    "work.${name}": ("threadBlocks", "rounds", "first", "mean"),
    "work.warps.${algorithm}": ("flash1", "flash2"),
    "code.${now.key}": (*code.LINES, "columnsEnd", "rowsEnd"),
}  # fmt: skip


def test_every_text_is_used():
    """By its key, or by one of `COMPOSED`, which has just those that the scripts put together."""
    used = "".join(page.read(name) for name in ("page.html", *(f"{name}.js" for name in page.SCRIPTS)))
    assert set(re.findall(r'\b(?:text|says|refused)\((?:"\w+", )?`([^`]+)`', used)) == set(COMPOSED)
    composed = {re.sub(r"\$\{[^}]*\}", one, found) for found, parts in COMPOSED.items() for one in parts}
    assert composed <= set(page.read_texts())
    whole = set(re.findall(r'(?:data-text=|data-label=|\btext\()"([\w-]+)"|"([\w-]+(?:\.[\w-]+)+)"', used))
    plain = {alone or dotted for alone, dotted in whole}
    assert set(page.read_texts()) - composed - plain == set()


@pytest.mark.parametrize("language", page.LANGUAGES)
def test_the_page_needs_no_other_file(language):
    built = explain.build(language)
    assert f'<html lang="{language}">' in built
    assert "{{" not in built
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", built, flags=re.DOTALL)
    loads = re.findall(
        r'<(?:script|link|img|iframe|source|object|embed)\b[^>]*(?:src|href|data)="([^"]*)"', markup
    )
    assert loads == ["data:,"]
    assert not re.findall(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b *[({\"']", built)
    for key in ("title", "race.lead", "footer.numbers"):  # without scripts, too
        assert page.read_texts()[key][language] in markup


def test_the_page_opens_in_known_languages_only():
    with pytest.raises(ValueError, match="language must be one of en, zh, pl, got 'fr'"):
        explain.build("fr")


def test_the_page_in_docs_is_the_one_that_is_built_now():
    written = (ROOT / "docs" / "explainer.html").read_text(encoding="utf-8")
    assert written == explain.build(), "run: flashtile explain --output docs/explainer.html"


def test_the_command_knows_the_languages_of_the_page(capsys):
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])
    assert f"--language {{{','.join(page.LANGUAGES)}}}" in capsys.readouterr().out


def test_the_command_writes_the_page(tmp_path, capsys, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    target = tmp_path / "page.html"
    assert cli.main(["explain", "--output", str(target), "--language", "pl", "--open"]) == 0
    assert target.read_text(encoding="utf-8") == explain.build("pl")
    assert opened == [target.as_uri()]
    assert capsys.readouterr().out.startswith(f"wrote {target}, ")


def test_the_command_takes_an_ending_in_capitals(tmp_path, capsys):
    assert cli.main(["explain", "--output", str(tmp_path / "PAGE.HTML")]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'PAGE.HTML'}, ")


def test_the_command_answers_in_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", "--json"]) == 0
    target = tmp_path / "explainer.html"
    found = json.loads(capsys.readouterr().out)
    assert found == {"output": str(target), "language": "en", "bytes": target.stat().st_size}


def test_no_browser_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert cli.main(["explain", "--output", str(tmp_path / "page.html"), "--open"]) == 1
    assert "no browser could be opened" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("page.txt", "--output must be a file ending in .html or .htm, got"),
        (".", "--output must be a file ending in .html or .htm, got"),
        ("nowhere/page.html", "--output must be in a folder that exists, got"),
    ],
)
def test_the_command_refuses_paths_before_it_works(name, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(explain, "build", pytest.fail)
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", "--output", str(tmp_path / name)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
