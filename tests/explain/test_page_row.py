"""One row on the page, as the reader edits it: forward, backward, line by line; as the lab computes it."""

from __future__ import annotations

import inspect
import math
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from flashtile import lab
from flashtile.lab import flash2
from flashtile.lab.memory import Memory
from tests.explain.browser import close_to, number, tensors

pytestmark = pytest.mark.xdist_group("browser")  # one start of the browser serves all

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


@pytest.mark.parametrize(
    ("kind", "written", "why"),
    [
        ("score", "1e301", "Its size may be 1e300 at most."),
        ("score", "-1e400", "Its size may be 1e300 at most."),  # hides no key
        ("value", "-1e151", "Its size may be 1e150 at most."),
        ("score", "1,000", "Its comma may separate thousands: use a decimal point, or leave it out."),
        ("value", "-12,345,678", "Its comma may separate thousands: use a decimal point, or leave it out."),
        ("value", "ln 1,000", "Its comma may separate thousands: use a decimal point, or leave it out."),
    ],
)
def test_a_number_that_is_refused_is_told_why(opened, kind, written, why):
    opened.enter(f"[data-kind={kind}]", written, 1)
    assert opened.text("#online-error").endswith(f"not “{written}”. {why}")
    assert math.isnan(opened.numbers("#online-answer")[0])
    if kind == "value":
        opened.enter("#backward-upstream", written)
        assert opened.text("#backward-error").endswith(f"not “{written}”. {why}")
        opened.enter("#backward-upstream", "1")


@pytest.mark.parametrize("written", ["0,125", "-0,125", "1,5", "1,25e3", "1,0005", "1000,125", ",500"])
def test_a_comma_that_can_only_be_a_decimal_one_is_taken(opened, written):
    opened.row(["0"], [written], 1)
    assert opened.numbers("#online-exact") == [number(written)]


def test_an_input_is_described_by_the_message_about_it(opened):
    for index in (2, 3):
        opened.enter("[data-kind=score]", "x", index)
    described = [None, None, "online-error", None]  # the message is about the first
    assert opened.attribute("[data-kind=score]", "aria-describedby") == described
    for part, name in (("backward", "upstream"), ("work", "batch")):
        for written, expected in (("", f"{part}-error"), ("1", None)):
            opened.enter(f"#{part}-{name}", written)
            assert opened.attribute(f"#{part}-{name}", "aria-describedby") == [expected]


def test_the_largest_values_and_gradients_stay_finite(opened):
    _, _, _, table, status = opened.play(
        ("row", ["0", "1", "2", "ln 3"], ["1e150", "-1e150", "1e150", "-1e150"], 2),
        ("enter", "#backward-upstream", "1e150"),
        ("step", "#backward-stepper", -1),
        ("rows", "#backward-table"),
        ("text", "#backward-status"),
    )
    assert all(math.isfinite(one) for line in table for one in line)
    assert status.startswith("All keys are done. The gradients dS of a row add up to 0:")
    opened.enter("#backward-upstream", "1")


def test_zero_has_no_sign(opened):
    *_, table, numbers = opened.play(
        ("enter", "#online-preset", "hidden"),
        ("step", "#backward-stepper", -1),
        ("each", "#backward-table td", "textContent"),
        ("rows", "#backward-table"),
    )
    assert "0" in table
    assert "\u22120" not in table
    assert any(one == 0 and math.copysign(1, one) == 1 for line in numbers for one in line)


def test_keys_are_added_and_removed_between_one_and_eight(opened):
    opened.play(*(("click", "#online-add"),) * 10, ("choose", "#online-block", 8))
    assert len(opened.each("[data-kind=score]", "value")) == 8
    opened.play(*(("click", "#online-remove"),) * 10)
    assert len(opened.each("[data-kind=score]", "value")) == 1
    assert opened.numbers("#online-answer, #online-exact") == [0, 0]


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
