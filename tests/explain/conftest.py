"""The explainer's page in one browser, for all tests that take it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from flashtile import explain
from tests.explain.browser import OPTIONS, Page


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all tests; at the end, it has asked no server for anything."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium (or google-chrome) and chromedriver")
    folder = tmp_path_factory.mktemp("explainer")
    target = folder / "page.html"
    target.write_text(explain.build(), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SE_OFFLINE", "true")  # the driver is here: selenium need not look for one
        patch.setenv("SE_AVOID_STATS", "true")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
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
