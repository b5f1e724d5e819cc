"""What the tests do with the explainer in a browser, and how they read what it shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
RELATIVE = 1e-13  # both sides compute in float64, a handful of operations

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
