"""The HTML report in a real browser: opens from disk, loads nothing, zooms, selects, and stays quick."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.observe.trace import analyze
from stretto.observe.trace.report_html import as_html
from tests.helpers.traces import SAMPLE, Host, overlap_loop, write


def wait_until(page: Any, condition: str) -> None:
    """Wait for a condition on the page, which forbids the `eval` that playwright's own waiting needs."""
    end = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never true: {condition}"
        time.sleep(0.02)


def page_of(folder: Path, *hosts: Host) -> Path:
    path = folder / "report.html"
    path.write_text(as_html(analyze(write(folder / "trace.json", *hosts))), encoding="utf-8")
    return path


def test_the_page_is_one_file_that_names_no_other(tmp_path: Path) -> None:
    text = page_of(tmp_path, overlap_loop(5, bug="sync@sample")).read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", text)
    assert "@SCRIPT@" not in text


def test_names_in_a_trace_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    host = Host()
    for _ in range(4):
        host.launch(50, "</script><script>alert(1)</script>")
        host.work(500, "</SCRIPT>.py(1): <img src=x>")
    text = page_of(tmp_path, host).read_text(encoding="utf-8")
    assert text.lower().count("</script>") == 3  # the page's own


class Page:
    """A report in the browser, and what the browser complained about or asked for."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        self.trouble: list[str] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("requestfailed", lambda request: self.trouble.append(request.url))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=20_000)

    def _asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.trouble.append(url)

    def range(self) -> tuple[float, float]:
        begin, end = self.page.evaluate("[stretto.timeline.begin, stretto.timeline.end]")
        return begin, end

    def place(self, kind: str, name: str) -> tuple[float, float]:
        """Where in the window a span in view is drawn."""
        x, y = self.page.evaluate(
            """([kind, name]) => {
              const t = stretto.timeline, box = t.canvas.getBoundingClientRect();
              const rows = t.lanes.all.filter((lane) => lane.kind === kind).flatMap((lane) =>
                lane.rows.map((place) => ({ lane, ...place })));
              for (const { lane, row, y, height } of rows)
                for (let i = row.after(t.begin); i < row.n && row.start[i] < t.end; i++)
                  if (t.lanes.name(lane, row, i) === name) {
                    const a = Math.max(t.x(row.start[i]), 168), b = Math.min(t.x(row.end[i]), box.width);
                    if (b - a > 2) return [box.left + (a + b) / 2, box.top + y + height / 2 + 46 - t.scroll.scrollTop];
                  }
            }""",
            [kind, name],
        )
        return x, y


@pytest.fixture(scope="module")
def lost(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(browser, page_of(tmp_path_factory.mktemp("page"), overlap_loop(30, bug="sync@sample")))
    yield page
    assert page.trouble == []
    page.page.close()


def test_it_opens_from_disk_and_says_what_is_wrong(lost: Page) -> None:
    assert "Overlap is lost" in lost.page.inner_text("#verdict")
    first = lost.page.inner_text(".finding >> nth=0")
    assert "engine/sampler.py(41): sample" in first
    assert "1.22× faster" in first
    assert "18." in lost.page.inner_text("#legend")


def test_it_opens_at_the_worst_gap(lost: Page) -> None:
    begin, end = lost.range()
    at, until = lost.page.evaluate("stretto.trace.devices[0].findings[0].at")
    assert begin < at < until < end < begin + 6e6


def test_the_wheel_zooms_at_the_pointer_and_dragging_pans(lost: Page) -> None:
    lost.page.evaluate("stretto.timeline.show(5e6, 9e6)")
    box = lost.page.locator("#timeline").bounding_box()
    x, y = box["x"] + 600, box["y"] + 70
    under = lost.page.evaluate("(x) => stretto.timeline.time(x)", 600)
    lost.page.mouse.move(x, y)
    lost.page.mouse.wheel(0, -240)
    wait_until(lost.page, "stretto.timeline.range < 3e6")
    assert lost.page.evaluate("(x) => stretto.timeline.time(x)", 600) == pytest.approx(under, abs=2e3)
    before = lost.range()
    lost.page.mouse.down()
    lost.page.mouse.move(x - 200, y, steps=4)
    lost.page.mouse.up()
    after = lost.range()
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])


def test_keys_and_buttons_zoom_too(lost: Page) -> None:
    lost.page.click("#all")
    whole = lost.range()
    assert whole[0] == 0
    lost.page.focus("#timeline")
    lost.page.keyboard.press("w")
    assert lost.range()[1] - lost.range()[0] < 0.8 * whole[1]
    lost.page.click("#in")
    lost.page.click("#out")
    lost.page.keyboard.press("d")
    assert lost.range()[0] > 0


def test_a_click_shows_what_it_is_and_who_launched_it(lost: Page) -> None:
    lost.page.evaluate("stretto.timeline.show(5e6, 8e6)")
    lost.page.mouse.click(*lost.place("stream", "forward"))
    details = lost.page.inner_text("#details")
    assert "forward" in details
    assert "cudaGraphLaunch" in details
    assert "engine/loop.py(5): run" in details
    lost.page.mouse.click(*lost.place("gaps", "host blocked in a sync"))
    assert SAMPLE in lost.page.inner_text("#details")


def test_hovering_names_what_is_under_the_pointer(lost: Page) -> None:
    lost.page.evaluate("stretto.timeline.show(5e6, 8e6)")
    lost.page.mouse.move(*lost.place("thread", "cudaStreamSynchronize"))
    assert "cudaStreamSynchronize" in lost.page.inner_text("#tip")


def test_a_thread_opens_to_all_its_frames(lost: Page) -> None:
    count = "stretto.lanes.all.find((lane) => lane.kind === 'thread').rows.length"
    before = lost.page.evaluate(count)
    y = lost.page.evaluate("stretto.lanes.all.find((lane) => lane.kind === 'thread').y + 46 + 8")
    lost.page.click("#timeline", position={"x": 60, "y": y})
    assert lost.page.evaluate(count) > before
    lost.page.click("#timeline", position={"x": 60, "y": y})
    assert lost.page.evaluate(count) == before


def test_a_step_in_the_table_is_shown_above(lost: Page) -> None:
    lost.page.click("#steps-body .row >> nth=7")
    begin, end = lost.range()
    start = lost.page.evaluate("stretto.trace.devices[0].steps.start[7]")
    assert begin < start < end
    lost.page.click("#steps-head button >> nth=3")
    lost.page.click("#steps-head button >> nth=0")
    assert lost.page.inner_text("#steps-body .row >> nth=0").startswith("0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_light_and_dark_and_can_be_switched(browser: Any, tmp_path: Path, scheme: str) -> None:
    page = Page(browser, page_of(tmp_path, overlap_loop(6)), scheme)
    colour = "getComputedStyle(document.body).backgroundColor"
    first = page.page.evaluate(colour)
    assert page.page.evaluate("document.documentElement.dataset.theme") == scheme
    page.page.click("#theme")
    assert page.page.evaluate(colour) != first
    assert page.trouble == []
    page.page.close()


def test_ten_thousand_steps_stay_responsive(browser: Any, tmp_path: Path) -> None:
    page = Page(browser, page_of(tmp_path, overlap_loop(10_000, bug="sync@sample", stacks=False)))
    page.page.click("#all")
    # Of each drawing, not of the machine's mood: no view draws more than a few spans per pixel of each row.
    drawn = page.page.evaluate(
        """async () => {
          const t = stretto.timeline, context = CanvasRenderingContext2D.prototype, result = [];
          let count = 0;
          const fill = context.fillRect;
          context.fillRect = function (...a) { count++; return fill.apply(this, a); };
          for (const range of [1, 0.3, 0.1, 0.01, 0.001]) {
            t.show(t.trace.length * 0.4, t.trace.length * (0.4 + 0.6 * range));
            count = 0;
            t.draw();
            result.push(count);
          }
          context.fillRect = fill;
          return result;
        }"""
    )
    rows = page.page.evaluate("stretto.lanes.all.reduce((sum, lane) => sum + lane.rows.length, 0)")
    assert max(drawn) < 6 * 1280 * rows
    assert page.page.evaluate("document.querySelectorAll('#steps-body .row').length") < 60
    page.page.evaluate("document.getElementById('steps-scroll').scrollTop = 9990 * 28")
    wait_until(
        page.page, "[...document.querySelectorAll('#steps-body .row')].some((r) => r.innerText.startsWith('9995'))"
    )
    assert page.trouble == []
    page.page.close()
