"""The page in a tab of a real headless Chromium, for tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.server_process import ServerProcess, wait_until

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
BROWSER_PATIENCE = 40.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; on Debian and Ubuntu: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


class Tab:
    """The page in a browser's tab, what it sent, and what the browser complained about."""

    def __init__(self, browser: Any, server: ServerProcess, **options: Any) -> None:
        self.server = server
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(BROWSER_PATIENCE * 1000)
        self.trouble: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", self._asked)
        self.page.goto(server.url + "/")
        self.page.wait_for_selector("body[data-ready]")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.server.url, "data:")):
            self.trouble.append(request.url)
        if request.method == "POST":
            self.bodies.append(json.loads(request.post_data))

    def say(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answer(self) -> str:
        """The text of the last answer so far."""
        return str(self.page.locator(".message.assistant .text").last.inner_text())

    def wait(self, condition: str) -> None:
        """Until this JavaScript is true. Asked from outside: the page's policy forbids it to evaluate text."""
        wait_until(lambda: bool(self.page.evaluate(condition)), condition, BROWSER_PATIENCE)

    def wait_for_end(self) -> None:
        self.wait("!stretto.chat.running")

    def note(self) -> str:
        return str(self.page.locator(".message.assistant .note").last.inner_text())


@pytest.fixture
def tab(browser: Any, server: ServerProcess) -> Iterator[Tab]:
    opened = Tab(browser, server)
    yield opened
    assert opened.trouble == []
    opened.context.close()
    server.wait_until_idle()
