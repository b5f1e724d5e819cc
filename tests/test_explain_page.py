"""The explainer in a real browser: everything is tried, and what it shows is what the library computes."""

from __future__ import annotations

import inspect
import json
import math
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from flashtile import explain, lab, masks
from flashtile.explain import data, page
from flashtile.lab import flash2, theory
from flashtile.lab.algorithms import band
from flashtile.lab.memory import Memory
from flashtile.lab.occupancy import MULTIPROCESSORS, exchanged_by_warps, occupancy
from flashtile.lab.recording import record
from flashtile.lab.theory import Shape

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome was found"),
    pytest.mark.skipif(CHROMEDRIVER is None, reason="no chromedriver was found"),
    pytest.mark.xdist_group("browser"),  # one start of the browser serves all
]

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
RELATIVE = 1e-13  # both sides compute in float64, a handful of operations
TICK = 128  # bytes
STEPPERS = ("#race-figure", "#online-stepper", "#backward-stepper", "#backward-figure", "#code")

# What a reader does and sees. Values are set as if by hand; a step of -1 is the last one.
ACTIONS = """
const all = (selector) => [...document.querySelectorAll(selector)];
const act = {
  enter(selector, value, index = 0) {
    const element = all(selector)[index];
    element.value = value;
    for (const kind of ["input", "change"]) element.dispatchEvent(new Event(kind, { bubbles: true }));
  },
  click: (selector) => document.querySelector(selector).click(),
  choose: (fieldset, value) => act.click(`${fieldset} input[value="${value}"]`),
  step(part, step) {
    const range = `${part} input[type=range]`;
    const last = Number(document.querySelector(range).max);
    act.enter(range, step < 0 ? last : step);
    return last;
  },
  row(scores, values, size) {
    const count = () => all("[data-kind=score]").length;
    while (count() < scores.length) act.click("#online-add");
    while (count() > scores.length) act.click("#online-remove");
    scores.forEach((score, index) => act.enter("[data-kind=score]", score, index));
    values.forEach((value, index) => act.enter("[data-kind=value]", value, index));
    act.choose("#online-block", size);
  },
  text: (selector) => document.querySelector(selector).textContent,
  each: (selector, name) => all(selector).map((one) => one[name]),
  attribute: (selector, name) => all(selector).map((one) => one.getAttribute(name)),
  numbers: (selector) => all(selector).map((one) => one.dataset.value ?? "NaN"),
  rows: (table) =>
    all(`${table} tbody tr`).map((row) =>
      [...row.querySelectorAll("td.number")].map((one) => one.dataset.value ?? "NaN")),
};
return arguments[0].map(([name, ...rest]) => act[name](...rest));
"""


def as_numbers(found: Any) -> Any:
    """Numbers of JavaScript, written out, in lists of lists; NaN where an element shows none."""
    if isinstance(found, list):
        return [as_numbers(one) for one in found]
    return float(found.replace("Infinity", "inf"))


class Page:
    """The page in the browser."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.address = address

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def play(self, *actions: tuple[Any, ...]) -> list[Any]:
        """Do these of `ACTIONS`, one after the other; what each of them found."""
        found: list[Any] = self.run(ACTIONS, actions)
        for index, (name, *_) in enumerate(actions):
            if name in ("numbers", "rows"):
                found[index] = as_numbers(found[index])
        return found

    def __getattr__(self, name: str) -> Any:
        """A single action."""
        return lambda *arguments: self.play((name, *arguments))[0]

    def width(self, pixels: int) -> None:
        """As wide as this, where it is not."""
        if self.run("return innerWidth") == pixels:
            return
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all tests; at the end, it has asked no server for anything."""
    folder = tmp_path_factory.mktemp("explainer")
    target = folder / "page.html"
    target.write_text(explain.build(), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SE_OFFLINE", "true")  # the driver is here: selenium need not look for one
        patch.setenv("SE_AVOID_STATS", "true")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    try:
        driver.get(target.as_uri())
        yield Page(driver, target.as_uri())
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        requests = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        asked = {one["request"]["url"] for one in requests if one["documentURL"] == target.as_uri()}
        assert {address for address in asked if not address.startswith("data:")} == {target.as_uri()}
    finally:
        driver.quit()


@pytest.fixture
def opened(browser: Page) -> Iterator[Page]:
    """The page in English with its first example; whatever a test does, it raises no error."""
    browser.width(1200)
    if browser.each("#language", "value") != ["en"]:
        browser.enter("#language", "en")
    browser.enter("#online-preset", "example")
    yield browser
    assert [entry["message"] for entry in browser.driver.get_log("browser")] == []


def number(written: str) -> float:
    """What a reader means by it."""
    written = written.replace(",", ".")
    return math.log(float(written[3:])) if written.startswith("ln") else float(written)


def tensors(scores: list[str], values: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    read = [
        torch.tensor([number(one) for one in numbers], dtype=torch.float64) for numbers in (scores, values)
    ]
    return read[0], read[1][:, None]


def close_to(expected: Any) -> Any:
    return pytest.approx(expected, rel=RELATIVE, abs=RELATIVE, nan_ok=True)


def counted(recording: Any, moved: int) -> list[int]:
    """Bytes read and written and FLOPs done when so many bytes have moved."""
    read = written = done = 0
    for event in recording.events:
        part = min(event.size, moved - done)
        read += part * (event.kind == "read")
        written += part * (event.kind == "write")
        if part < event.size:
            return [read, written, event.flops]
        done += part
    return [read, written, recording.counts.flops]


@pytest.mark.parametrize(("direction", "size"), [("forward", 8), ("backward", 16)])
def test_the_race_counts_as_the_lab_does(opened, direction, size):
    figure = {"forward": "#race-figure", "backward": "#backward-figure"}[direction]
    opened.choose(f"#{direction}-block", size)
    for algorithm in lab.ALGORITHMS:
        recording = record(algorithm, direction, data.LENGTH, data.HEAD_DIM, lab.Blocks(size, size))
        last = opened.step(figure, 0)
        steps = [0, 1, 7, 23, last // 2, last]
        shown = opened.play(
            *(
                action
                for step in steps
                for action in (
                    ("step", figure, step),
                    ("numbers", f"{figure} [data-algorithm={algorithm}] dd"),
                )
            )
        )
        assert shown[1::2] == [counted(recording, TICK * step) for step in steps]


@pytest.mark.parametrize("size", data.BLOCKS)
@pytest.mark.parametrize("direction", theory.DIRECTIONS)
def test_the_totals_are_those_of_theory(opened, direction, size):
    figure = {"forward": "#race-figure", "backward": "#backward-figure"}[direction]
    _, last, shown = opened.play(
        ("choose", f"#{direction}-block", size), ("step", figure, -1), ("rows", f"{figure} table")
    )
    shape = Shape(
        query_length=data.LENGTH, key_length=data.LENGTH,
        head_dim=data.HEAD_DIM, value_head_dim=data.HEAD_DIM,
    )  # fmt: skip
    counts = [
        theory.one_pass(algorithm, direction, shape, lab.Blocks(size, size)).counts
        for algorithm in lab.ALGORITHMS
    ]
    columns = [
        [
            one.read,
            one.written,
            one.traffic / counts[0].traffic,
            one.on_chip or math.nan,
            one.intermediate,
            one.matmul,
            one.other,
        ]
        for one in counts
    ]
    for line, expected in zip(shown, zip(*columns, strict=True), strict=True):
        assert line == close_to(list(expected))
    assert TICK * (last - 1) < max(one.traffic for one in counts) <= TICK * last
    for algorithm, one in zip(lab.ALGORITHMS, counts, strict=True):
        at_the_end = opened.numbers(f"{figure} [data-algorithm={algorithm}] dd")
        assert at_the_end == [one.read, one.written, one.flops]


def test_the_race_shows_the_tile_at_work(opened):
    look = ("attribute", "#race-figure [data-algorithm=flash2] .tile", "class")
    doing = ("text", "#race-figure [data-algorithm=flash2] .doing")
    opened.choose("#forward-block", 16)
    _, tiles, does = opened.play(("step", "#race-figure", 0), look, doing)
    assert tiles == ["tile now", "tile ahead", "tile ahead", "tile ahead"]
    assert does == "reads Q, rows 0\u201315"
    # Q, K and V of 128 bytes each, then K again: V of the second tile is next.
    _, tiles, does = opened.play(("step", "#race-figure", 4), look, doing)
    assert tiles == ["tile computed", "tile now", "tile ahead", "tile ahead"]
    assert does == "reads V, rows 16\u201331"
    _, tiles, does = opened.play(("step", "#race-figure", -1), look, doing)
    assert tiles == ["tile computed"] * 4
    assert does == "finished"


def test_real_sizes_are_those_of_theory(opened):
    for length, shown in zip(data.REAL_LENGTHS, opened.rows("#real-table"), strict=True):
        shape = Shape(query_length=length, key_length=length, head_dim=64, value_head_dim=64)
        assert shown == [
            theory.one_pass(
                name, "forward", shape, theory.block_sizes(name, "forward", 192 * 1024, 64)
            ).counts.traffic
            for name in lab.ALGORITHMS
        ]


ROWS = [
    (["0", "0", "ln 3", "ln 3"], ["0", "0", "1", "1"]),
    (["-1.5", "0,25", "2", "1e-3", "3"], ["1", "-2", "0.5", "3", "-1e2"]),
    (["-inf", "-inf", "1", "-inf"], ["5", "-4", "1", "7"]),
    (["-inf", "-inf"], ["1", "2"]),
    (["1000", "-1000", "1e300", "-1e300"], ["1", "2", "3", "4"]),
    (["7"], ["-3"]),
]
each_row = pytest.mark.parametrize(("scores", "values"), ROWS, ids=" ".join)


@each_row
def test_one_row_is_that_of_the_lab_for_every_block_size(opened, scores, values):
    read_scores, read_values = tensors(scores, values)
    exact = lab.elementwise(read_scores, read_values).item()
    opened.row(scores, values, 1)
    by_size = opened.rows("#online-sizes")
    for size in range(1, len(scores) + 1):
        steps = lab.steps(read_scores, read_values, size)
        mean = lab.mean_of_blocks(read_scores, read_values, size).item()
        _, last, table, answers, verdict = opened.play(
            ("choose", "#online-block", size),
            ("step", "#online-stepper", -1),
            ("rows", "#online-steps"),
            ("numbers", "#online-answer, #online-exact, #online-mean"),
            ("text", "#online-verdict"),
        )
        assert last == len(steps)
        for shown, one in zip(table, steps, strict=True):
            state = one.row_max, one.rescale, one.row_sum, one.unnormalised, one.answer
            assert shown == close_to([part.item() for part in state])
        assert answers == close_to([exact, exact, mean])
        assert by_size[size - 1] == close_to([exact, exact, mean])
        right = math.isclose(mean, exact, rel_tol=1e-12, abs_tol=1e-12)
        assert verdict.startswith("✓" if right else "✗")


def test_steps_show_what_is_known_so_far(opened):
    scores, values = tensors(*ROWS[1])
    steps = lab.steps(scores, values, 2)
    opened.row(*ROWS[1], 2)
    for step in range(len(steps) + 1):
        _, answer, table = opened.play(
            ("step", "#online-stepper", step), ("numbers", "#online-answer"), ("rows", "#online-steps")
        )
        assert answer == close_to([steps[step - 1].answer.item() if step else math.nan])
        assert [math.isnan(line[0]) for line in table] == [index >= step for index in range(len(steps))]


def test_the_wrong_average_is_shown_with_its_number(opened):
    assert opened.text("#online-exact") == opened.text("#online-answer") == "0.75"
    assert opened.text("#online-mean") == "0.5"
    assert opened.text("#online-verdict") == "✗ wrong by 0.25"
    assert "rescale = exp(0 \u2212 1.0986) = 0.33333" in opened.text("#online-formulas")
    assert opened.text("#online-status").endswith("rescale factor 0.33333, l 2.6667, u 2, answer u / l 0.75.")


def test_the_end_stays_the_end_where_the_block_size_changes(opened):
    for size in (1, 4, 3, 2):
        assert opened.play(("choose", "#online-block", size), ("text", "#online-answer"))[1] == "0.75"


def test_examples_are_ready(opened):
    for name in ("rising", "hidden", "large", "example"):
        _, _, written, answers = opened.play(
            ("enter", "#online-preset", name),
            ("step", "#online-stepper", -1),
            ("each", "#online-inputs input", "value"),
            ("numbers", "#online-answer, #online-exact"),
        )
        scores, values = tensors(written[::2], written[1::2])
        assert answers == close_to([(scores.softmax(0) @ values).item()] * 2)


@pytest.mark.parametrize(
    ("kind", "written", "shown"),
    [
        ("score", "", "nothing"),
        ("score", "   ", "nothing"),
        ("score", "abc", "“abc”"),
        ("score", "inf", "“inf”"),
        ("score", "NaN", "“NaN”"),
        ("score", "ln 0", "“ln 0”"),
        ("score", "ln(3", "“ln(3”"),
        ("score", "1e301", "“1e301”"),
        ("score", "1 2", "“1 2”"),
        ("score", "<b>1</b>", "“<b>1</b>”"),
        ("value", "-inf", "“-inf”"),
        ("value", "0x10", "“0x10”"),
    ],
)
def test_what_is_no_number_is_named_and_nothing_is_shown(opened, kind, written, shown):
    opened.enter(f"[data-kind={kind}]", written, 1)
    message = opened.text("#online-error")
    assert message.startswith(f"The {kind} of key 1 must be a number")
    assert message.endswith(f"not {shown}.")
    assert opened.attribute(f"[data-kind={kind}]", "aria-invalid") == ["false", "true", "false", "false"]
    opened.play(*(("step", part, -1) for part in ("#online-stepper", "#backward-stepper", "#code")))
    tables = opened.play(("rows", "#online-steps"), ("rows", "#online-sizes"), ("rows", "#backward-table"))
    assert tables == [[], [], []]
    numbers = opened.numbers("#online-answer, #online-exact, #online-mean, #code td")
    assert all(math.isnan(one) for one in numbers)
    opened.enter(f"[data-kind={kind}]", "0", 1)
    assert opened.text("#online-error") == ""
    assert opened.text("#online-exact") == "0.75"


def test_keys_are_added_and_removed_between_one_and_eight(opened):
    opened.play(*(("click", "#online-add"),) * 10, ("choose", "#online-block", 8))
    assert len(opened.each("[data-kind=score]", "value")) == 8
    opened.play(*(("click", "#online-remove"),) * 10)
    assert len(opened.each("[data-kind=score]", "value")) == 1
    assert opened.numbers("#online-answer, #online-exact") == [0, 0]


@pytest.mark.parametrize("size", data.BLOCKS)
@pytest.mark.parametrize("name", data.MASKS)
def test_tiles_are_skipped_as_in_the_lab(opened, name, size):
    window = 6
    right = 0 if "causal" in name else window
    mask = {"none": None, "causal": masks.causal()}.get(name, masks.window(left=window, right=right))
    lower, upper = band(mask, data.LENGTH, data.LENGTH)
    setting = lab.Setting(scale=1.0, lower=lower, upper=upper)
    visible = torch.ones(data.LENGTH, data.LENGTH)
    if mask is not None:
        visible = mask.dense(1, data.LENGTH, data.LENGTH)[0, 0]
    blocks = [slice(start, start + size) for start in range(0, data.LENGTH, size)]
    expected = [
        "empty"
        if not setting.visits(rows, columns)
        else "full"
        if visible[rows, columns].all()
        else "partial"
        for rows, columns in product(blocks, blocks)
    ]
    *_, drawn, runs, table, disabled = opened.play(
        ("enter", "#skipping-mask", name),
        ("choose", "#skipping-block", size),
        ("enter", "#skipping-window", window),
        ("attribute", "#skipping-picture .tile", "class"),
        ("attribute", "#skipping-picture .visible", "width"),
        ("rows", "#skipping-table"),
        ("each", "#skipping-window", "disabled"),
    )
    assert drawn == [f"tile {kind}" for kind in expected]
    assert [round((float(run) + 4) / 10) for run in runs] == visible.sum(1).tolist()
    query = torch.ones(1, 1, data.LENGTH, data.HEAD_DIM)
    masked, whole = (
        [
            lab.run(algorithm, query, query, query, blocks=lab.Blocks(size, size), mask=one).forward
            for algorithm in ("flash1", "flash2")
        ]
        for one in (mask, None)
    )
    lines = [
        (len(expected) - expected.count("empty"), len(expected)),
        (expected.count("partial"), len(expected)),
        (masked[0].traffic, whole[0].traffic),
        (masked[1].traffic, whole[1].traffic),
        (masked[1].matmul, whole[1].matmul),
    ]
    for shown, (ours, everything) in zip(table, lines, strict=True):
        assert shown == close_to([ours, everything, ours / everything])
    assert disabled == ["window" not in name]


@each_row
def test_backward_gives_the_gradients_of_the_lab(opened, scores, values):
    read_scores, read_values = tensors(scores, values)
    size = min(2, len(scores))
    opened.row(scores, values, size)
    for upstream in ("1", "-0.5"):
        _, last, saved, table = opened.play(
            ("enter", "#backward-upstream", upstream),
            ("step", "#backward-stepper", -1),
            ("numbers", "#backward-saved dd"),
            ("rows", "#backward-table"),
        )
        assert last == -(-len(scores) // size)
        key, value = read_scores[None, None, :, None], read_values[None, None]
        one, grad_out = (torch.full((1, 1, 1, 1), number(n), dtype=torch.float64) for n in ("1", upstream))
        run = lab.run("flash2", one, key, value, grad_out, blocks=lab.Blocks(1, size), scale=1.0)
        assert run.gradients is not None
        _, grad_key, grad_value = (gradient.flatten().tolist() for gradient in run.gradients)
        answer = run.out.item()
        assert saved == close_to([answer, read_scores.logsumexp(0).item(), answer * number(upstream)])
        softmax = read_scores.softmax(0).nan_to_num(0.0).tolist()
        for index, shown in enumerate(table):
            grad_probability = number(upstream) * read_values[index].item()
            expected = [softmax[index], softmax[index], grad_value[index], grad_probability, grad_key[index]]
            # exp of a difference from the LSE, which is rounded to its own size
            assert shown[1:] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    opened.enter("#backward-upstream", "much")
    assert opened.text("#backward-error") == "dO must be a number or ln of one, not “much”."
    assert opened.rows("#backward-table") == []
    opened.enter("#backward-upstream", "1")


def test_the_price_of_computing_again_is_what_theory_says(opened):
    shape = Shape(query_length=4096, key_length=4096, head_dim=64, value_head_dim=64)
    passes = [
        theory.one_pass(name, "backward", shape, theory.block_sizes(name, "backward", 192 * 1024, 64)).counts
        for name in lab.ALGORITHMS
    ]
    kept, traffic, matmul = opened.rows("#price-table")
    assert kept == [2 * 4096**2, 2 * 2 * 4096, 2 * 4096]
    assert traffic == [one.traffic for one in passes]
    assert matmul == [one.matmul for one in passes]


@pytest.mark.parametrize("direction", theory.DIRECTIONS)
@pytest.mark.parametrize("card", MULTIPROCESSORS)
def test_thread_blocks_fill_the_card_as_in_the_lab(opened, card, direction):
    places = MULTIPROCESSORS[card]
    for batch, heads, length, block in (
        (1, 8, 16384, 128),
        (2, 64, 100, 64),
        (54, 2, 1, 1),
        (4, 3, 1000, 96),
    ):
        *_, table, first, second, exchanged = opened.play(
            ("enter", "#work-card", card),
            ("enter", "#work-direction", direction),
            ("enter", "#work-batch", batch),
            ("enter", "#work-heads", heads),
            ("enter", "#work-length", length),
            ("enter", "#work-block", block),
            ("rows", "#work-table"),
            ("attribute", "#work-pictures figure:nth-child(1) .busy", "class"),
            ("attribute", "#work-pictures figure:nth-child(2) .busy", "class"),
            ("numbers", "[data-exchanged]"),
        )
        blocks = lab.Blocks(block, block)
        found = [
            occupancy(name, direction, batch * heads, length, blocks, places) for name in ("flash1", "flash2")
        ]
        columns = [[one.thread_blocks, one.rounds, one.at_first, one.mean] for one in found]
        assert table == [close_to(list(line)) for line in zip(*columns, strict=True)]
        for one, busy in zip(found, (first, second), strict=True):
            last = one.thread_blocks - (one.rounds - 1) * places if one.rounds > 1 else 0
            assert len(busy) == min(one.thread_blocks, places) + last
        assert exchanged == [exchanged_by_warps(name, blocks, 64) for name in ("flash1", "flash2")]


@pytest.mark.parametrize("written", ["", "0", "-1", "2.5", "4097", "1e2"])
def test_a_batch_must_be_a_whole_number(opened, written):
    opened.enter("#work-batch", written)
    assert opened.text("#work-error") == "Batch must be a whole number from 1 to 4,096."
    assert opened.rows("#work-table") == []
    opened.play(("enter", "#work-batch", 3), ("enter", "#work-heads", 16))
    assert opened.text("#work-error") == ""
    assert opened.rows("#work-table")[0][0] == 3 * 16


def executed(scores: torch.Tensor, values: torch.Tensor, size: int) -> tuple[list[int], list[float]]:
    """The lines of `flash2.forward` that run for a row, in order from 0, and its output and LSE."""
    first = flash2.forward.__code__.co_firstlineno
    lines: list[int] = []

    def follow(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not flash2.forward.__code__:
            return None
        if event == "line":
            lines.append(frame.f_lineno - first)
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        one, setting = torch.ones(1, 1, dtype=torch.float64), lab.Setting(scale=1.0)
        out, lse = flash2.forward(one, scores[:, None], values, lab.Blocks(1, size), setting, Memory())
    finally:
        sys.settrace(before)
    different = [lines[0], *(after for line, after in pairwise(lines) if after != line)]
    return different, [out.item(), lse.item()]


@each_row
def test_the_code_runs_line_by_line_as_python_runs_it(opened, scores, values):
    size = min(2, len(scores))
    read_scores, read_values = tensors(scores, values)
    lines, results = executed(read_scores, read_values, size)
    opened.row(scores, values, size)
    last = opened.step("#code", 0)
    variables = "[data-variable=l_i], [data-variable=O_i], [data-variable=m_i]"
    look = ("attribute", "#code-source .line", "aria-current"), ("numbers", variables)
    found = opened.play(*(action for step in range(last + 1) for action in (("step", "#code", step), *look)))
    marked = [[index for index, one in enumerate(current) if one == "step"] for current in found[1::3]]
    assert marked == [[line] for line in lines]
    source = inspect.getsource(flash2.forward).splitlines()
    assert [one.strip() for one in opened.each("#code-source .line", "textContent")] == [
        one.strip() for one in source
    ]
    assert opened.numbers("[data-variable=out], [data-variable=lse]") == close_to(results)
    states = [
        state for line, state in zip(lines, found[2::3], strict=True) if source[line].strip() == "m_i = m_new"
    ]
    assert states == [
        close_to([one.row_sum.item(), one.unnormalised.item(), one.row_max.item()])
        for one in lab.steps(read_scores, read_values, size)
    ]


@pytest.mark.parametrize("language", page.LANGUAGES)
def test_a_language_changes_everything(opened, language):
    texts = page.read_texts()
    _, chosen, shown, keys, labels = opened.play(
        ("enter", "#language", language),
        ("each", "html", "lang"),
        ("each", "[data-text]", "innerHTML"),
        ("attribute", "[data-text]", "data-text"),
        ("attribute", "[data-label]", "aria-label"),
    )
    assert chosen == [language]
    assert shown == [texts[key][language] for key in keys]
    assert labels == [texts[key][language] for key in opened.attribute("[data-label]", "data-label")]
    opened.play(*(("step", part, step) for part in STEPPERS for step in (0, 1, -1)))
    body = opened.each("body", "innerText")[0]
    for wrong in ("undefined", "NaN", "{", *(key for key in texts if "." in key)):
        assert wrong not in body
    assert opened.text("#online-exact") == {"pl": "0,75"}.get(language, "0.75")
    opened.driver.get(opened.address)
    assert opened.each("html, #language", "lang")[0] == language  # remembered


def luminance(color: str) -> float:
    channels = [int(one) / 255 for one in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


COLOURS = """
const behind = (element) => {
  const color = getComputedStyle(element).backgroundColor;
  return color === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : color;
};
const found = new Set();
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const disabled = element.closest(".disabled, [aria-disabled=true]");
  if (!own || disabled || element.closest("script, noscript, svg")) continue;
  found.add(`${getComputedStyle(element).color}/${behind(element)}`);
}
return [...found];
"""


def test_themes_change_the_colours_and_all_text_stands_out(opened):
    """At least 4.5 : 1 (WCAG 2, AA) between a text and what lies behind it."""
    paper = "return getComputedStyle(document.body).backgroundColor"
    papers = []
    for theme in ("light", "dark"):
        opened.enter("#theme", theme)
        papers.append(opened.run(paper))
        pairs = opened.run(COLOURS)
        assert len(pairs) > 4
        for pair in pairs:
            low, high = sorted(luminance(color) for color in pair.split("/"))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (theme, pair)
    assert papers[0] != papers[1]
    opened.enter("#theme", "auto")
    for scheme, expected in zip(("light", "dark"), papers, strict=True):
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        assert opened.run(paper) == expected
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("language", page.LANGUAGES)
def test_nothing_is_wider_than_a_narrow_screen(opened, language):
    opened.width(360)
    opened.play(
        ("enter", "#language", language),
        ("row", ["-1000000.5"] * 8, ["-0.00012345"] * 8, 3),
        *(("step", part, -1) for part in STEPPERS),
    )
    wide = opened.run(
        """const page = document.documentElement;
        return [page.scrollWidth > page.clientWidth, ...document.querySelectorAll("body *")]
          .filter((one) => one === true || one.getBoundingClientRect?.().right > page.clientWidth + 0.5)
          .map((one) => one.outerHTML?.slice(0, 90) ?? "the page")"""
    )
    assert wide == []


def test_the_keyboard_does_everything(opened):
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        opened.driver.switch_to.active_element.send_keys(*keys)

    def focus(selector: str) -> None:
        opened.run("document.querySelector(arguments[0]).focus()", selector)

    where = ("text", "#online-stepper .where")
    focus("#online-stepper input")
    for key, expected in (
        (Keys.HOME, "0 / 2"),
        (Keys.ARROW_RIGHT, "1 / 2"),
        (Keys.TAB, "1 / 2"),  # to the buttons: arrows work there, too
        (Keys.ARROW_RIGHT, "2 / 2"),
        (Keys.ARROW_RIGHT, "2 / 2"),
        (Keys.ENTER, "1 / 2"),  # the button itself: back
    ):
        press(key)
        assert opened.play(where) == [expected]
    assert opened.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    focus("#online-block :checked")
    press(Keys.ARROW_RIGHT)  # the next radio button, which keeps the focus
    assert opened.run("return document.activeElement.value") == "3"
    focus("[data-kind=score]")
    press(Keys.BACKSPACE, Keys.DELETE, "l", "n", " ", "3")
    scores, values = tensors(["ln 3", "0", "ln 3", "ln 3"], ["0", "0", "1", "1"])
    assert opened.numbers("#online-exact") == close_to([(scores.softmax(0) @ values).item()])
    unnamed = opened.run(
        """return [...document.querySelectorAll("button, input, select, a, [tabindex]")]
          .filter((one) => !one.ariaLabel && !one.textContent.trim() && !one.labels?.length)
          .map((one) => one.outerHTML)"""
    )
    assert unnamed == []


def test_play_goes_to_the_end_and_stops(opened):
    _, last, _, label, live = opened.play(
        ("choose", "#forward-block", 8),
        ("step", "#race-figure", -1),
        ("click", "#race-figure .play"),  # from the end: again from the beginning
        ("text", "#race-figure .play"),
        ("attribute", "#race-figure [role=status]", "aria-live"),
    )
    assert (label, live) == ("Pause", ["off"])
    opened.step("#race-figure", last - 2)  # by hand, which stops it
    assert opened.text("#race-figure .play") == "Play"
    opened.click("#race-figure .play")
    opened.driver.set_script_timeout(10)
    opened.driver.execute_async_script(
        """const done = arguments[0];
        const button = document.querySelector("#race-figure .play");
        const look = () => (button.textContent === "Play" ? done() : setTimeout(look, 20));
        look();"""
    )
    assert opened.text("#race-figure .where") == f"{last} / {last}"
    assert opened.attribute("#race-figure [role=status]", "aria-live") == ["polite"]
