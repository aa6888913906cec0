"""What the page draws can be read: on a phone, in light and in dark."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.browser_tab import Tab
from tests.helpers.server_process import ServerProcess

CONTRAST = """(pairs) => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => { const hex = style.getPropertyValue('--' + name).trim();
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  return pairs.map(([one, other]) => { const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_on_steps_and_axes_can_be_read(browser: Any, server: ServerProcess, scheme: str) -> None:
    opened = Tab(browser, server, color_scheme=scheme)
    pairs = [["on-step", "even"], ["on-step", "odd"], ["dim", "card"], ["dim", "lane"]]
    assert min(opened.page.evaluate(CONTRAST, pairs)) >= 4.5
    opened.context.close()


@pytest.mark.parametrize("size", [(390, 844), (360, 740)])
def test_a_phone_explains_the_colours_and_shows_figures_without_a_hole(
    browser: Any,
    server: ServerProcess,
    size: tuple[int, int],
) -> None:
    viewport = {"width": size[0], "height": size[1]}
    opened = Tab(browser, server, viewport=viewport, is_mobile=True, has_touch=True)
    entries = [entry.bounding_box() for entry in opened.page.locator("#legend li").all()]
    assert len(entries) == 5
    assert len({box["y"] for box in entries if box is not None}) == 1
    assert all(box is not None and box["x"] + box["width"] <= size[0] for box in entries)
    cards = [card.bounding_box() for card in opened.page.locator("#figures .card").all() if card.is_visible()]
    rows: dict[float, int] = {}
    for box in cards:
        assert box is not None
        rows[box["y"]] = rows.get(box["y"], 0) + 1
    assert len(set(rows.values())) == 1, rows
    assert opened.trouble == []
    opened.context.close()


def test_the_rate_has_a_scale_that_holds_it(browser: Any, server: ServerProcess) -> None:
    opened = Tab(browser, server)
    opened.page.evaluate("document.querySelector('#max-tokens').value = 400")
    opened.say("Hello")
    opened.wait_for_end()
    opened.wait("stretto.figures.history.some(([, value]) => value > 1)")
    opened.page.evaluate("stretto.figures.plot()")
    high = float(opened.page.evaluate("document.querySelector('#rate-plot').dataset.high"))
    most = opened.page.evaluate("Math.max(...stretto.figures.history.map(([, value]) => value))")
    assert most <= high * 1.001 < 3 * most + 3
    assert str(high).strip("0.") in ("1", "2", "5")
    assert opened.trouble == []
    opened.context.close()
