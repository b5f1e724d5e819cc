"""The page for its readers: languages, themes, narrow screens, the keyboard, playing by itself."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flashtile.explain import page
from tests.explain.browser import close_to, tensors

pytestmark = pytest.mark.xdist_group("browser")  # one start of the browser serves all

STEPPERS = ("#race-figure", "#online-stepper", "#backward-stepper", "#backward-figure", "#code")


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


def test_a_page_opens_in_the_language_it_was_built_for(opened, tmp_path):
    """Whatever was chosen on a page that was built for another one."""
    opened.enter("#language", "zh")
    polish = tmp_path / "polish.html"
    polish.write_text(page.build("pl"), encoding="utf-8")

    def shown() -> list[str]:
        opened.driver.get(polish.as_uri())
        return [*opened.each("html", "lang"), *opened.each("#language", "value")]

    try:
        assert shown() == ["pl", "pl"]
        assert opened.run('return localStorage.getItem("flashtile.language.en")') == "zh"  # seen, not taken
        opened.enter("#language", "en")
        assert shown() == ["en", "en"]
        opened.run('localStorage.setItem("flashtile.language.pl", "toString")')  # not of the page's making
        assert shown() == ["pl", "pl"]
        opened.run('localStorage.removeItem("flashtile.language.pl")')
    finally:
        opened.driver.get(opened.address)
    assert opened.each("html", "lang") == ["zh"]


def test_headings_skip_no_level(opened):
    levels = [int(name[1]) for name in opened.each("h1, h2, h3, h4, h5, h6", "localName")]
    assert levels[0] == 1
    assert [after for before, after in pairwise(levels) if after > before + 1] == []


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
