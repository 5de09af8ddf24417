"""The chat page in headless Chromium (`make page-test`); the screenshot is the one in docs/serving.md."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.browser
SCREENSHOT = os.environ.get("CLOVER_SCREENSHOT")


@pytest.fixture
def browser(front: str, tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-sync", "window-size=900,760"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.get(front)
    yield driver
    driver.quit()


def ask(browser: webdriver.Chrome, text: str) -> None:
    box = browser.find_element(By.ID, "prompt")
    box.send_keys(text, Keys.ENTER)


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    return [each.text for each in browser.find_elements(By.CSS_SELECTOR, selector)]


def idle(browser: webdriver.Chrome) -> bool:
    return browser.find_element(By.ID, "send").is_enabled()


def test_a_block_fills_in_and_the_answer_appears(browser: webdriver.Chrome) -> None:
    browser.execute_script(  # watches what is drawn: a pass is over before a test can look
        "window.seen = []; new MutationObserver(() => window.seen.push([...document.querySelectorAll('.token')]"
        ".map(t => [t.textContent, t.className, t.style.background])))"
        ".observe(document.getElementById('block'), {childList: true})"
    )
    threshold = browser.find_element(By.ID, "threshold")
    threshold.clear()
    threshold.send_keys("1")
    ask(browser, "What is 12 + 13?")
    WebDriverWait(browser, 30).until(lambda b: texts(b, ".assistant") == ["25"] and idle(b))
    drawn: list[list[Any]] = [tokens for tokens in browser.execute_script("return window.seen") if tokens]
    assert len(drawn) > 2, "one drawing a pass"
    unfilled = [sum("filled" not in kind for _, kind, _ in tokens) for tokens in drawn]
    assert unfilled[0] > unfilled[-1]
    assert any(background for tokens in drawn for _, _, background in tokens)
    figures = browser.find_element(By.ID, "figures").text
    assert "tokens/s" in figures
    assert "TPF" in figures
    browser.refresh()
    browser.execute_script("document.getElementById('pause').value = 400; document.getElementById('threshold').value = 0.9999")
    ask(browser, "Switch off the kitchen television.")
    WebDriverWait(browser, 30).until(lambda b: len(b.find_elements(By.CSS_SELECTOR, ".token.filled")) >= 9)
    assert not idle(browser)
    if SCREENSHOT:
        browser.save_screenshot(SCREENSHOT)
    WebDriverWait(browser, 60).until(idle)
    (call,) = texts(browser, ".assistant")
    assert call.startswith("switch({")
    assert '"television"' in call
    assert [
        entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ] == []


def test_errors_are_shown_and_stop_stops(browser: webdriver.Chrome) -> None:
    browser.execute_script("document.getElementById('prompt').value = 'many words '.repeat(4000)")
    ask(browser, "")
    WebDriverWait(browser, 30).until(lambda b: any("the limit is" in text for text in texts(b, ".error")))
    browser.execute_script("document.getElementById('threshold').value = 1")
    ask(browser, "Say <script>alert(1)</script>")
    WebDriverWait(browser, 30).until(idle)
    assert "<script>" in texts(browser, ".user")[-1], "text is shown, never run"


def test_the_page_needs_nothing_from_outside(browser: webdriver.Chrome, front: str) -> None:
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith(front) for name in loaded)
