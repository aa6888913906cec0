"""The page in a real browser: one types, reads along, stops; the lanes move; keyboard, phone and dark are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser_tab import Tab
from tests.helpers.server_process import ServerProcess

LONG = "word " * 3000


def test_an_answer_grows_while_it_comes(tab: Tab) -> None:
    tab.page.evaluate(
        """() => { window.lengths = new Set(); new MutationObserver(() =>
             lengths.add(document.querySelector('.message.assistant .text')?.textContent.length ?? 0)
           ).observe(document.querySelector('#messages'), { childList: true, subtree: true }); }"""
    )
    tab.page.evaluate("document.querySelector('#max-tokens').value = 300")
    tab.say("Hello")
    assert tab.page.locator(".message.user").inner_text() == "Hello"
    tab.wait_for_end()
    assert len(tab.page.evaluate("[...lengths]")) > 3
    assert tab.note().startswith("300 tokens · first after")
    assert "cut at the token limit" in tab.note()
    assert tab.page.input_value("#prompt") == ""


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_request_in_the_engine_too(tab: Tab, how: str) -> None:
    tab.say("Never end")
    tab.wait("document.querySelector('.message.assistant .text').textContent.length > 20")
    if how == "button":
        assert tab.page.inner_text("#send") == "Stop"
        tab.page.click("#send")
    else:
        tab.page.keyboard.press("Escape")
    tab.wait_for_end()
    tab.server.wait_until_idle()
    assert tab.note().endswith("stopped")
    assert tab.page.inner_text("#send") == "Send"
    kept = tab.answer()
    assert kept
    # What was said so far goes along; shortened, as what this model writes may fill its whole context.
    tab.page.evaluate("stretto.chat.turns.at(-1).content = 'so far'; document.querySelector('#max-tokens').value = 2")
    tab.say("Go on")
    tab.wait_for_end()
    said = [(message["role"], message["content"]) for message in tab.bodies[-1]["messages"]]
    assert said == [("user", "Never end"), ("assistant", "so far"), ("user", "Go on")]


def test_settings_go_with_the_request_and_are_kept(tab: Tab) -> None:
    tab.page.click("#open-settings")
    given = {"#system": "Be brief.", "#temperature": "0.35", "#top-p": "0.9", "#top-k": "40", "#seed": "7"}
    for field, value in {**given, "#max-tokens": "3"}.items():
        tab.page.fill(field, value)
    tab.page.press("#seed", "Escape")
    assert not tab.page.is_visible("#settings")
    texts = []
    for _ in range(2):
        tab.say("Hi")
        tab.wait_for_end()
        texts.append(tab.answer())
        tab.page.click("#new-chat")
        assert tab.page.is_visible("#welcome")
    assert texts[0] == texts[1]  # the seed
    assert tab.bodies[0] == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.35,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tab.page.reload()
    tab.page.wait_for_selector("body[data-ready]")
    assert {field: tab.page.input_value(field) for field in given} == given


def test_a_value_that_cannot_be_is_shown_and_not_sent(tab: Tab) -> None:
    tab.page.click("#open-settings")
    tab.page.fill("#temperature", "9")
    tab.page.click("#open-settings")
    tab.say("Hi")
    assert tab.page.is_visible("#temperature")
    assert tab.bodies == []
    assert tab.page.input_value("#prompt") == "Hi"


def test_the_lanes_move_with_the_engine(tab: Tab) -> None:
    def picture() -> str:
        return str(tab.page.evaluate("document.querySelector('#lanes').toDataURL()"))

    def last() -> int:
        return int(tab.page.get_attribute("#lanes", "data-last") or -1)

    tab.wait("stretto.live.updates > 1")
    before, first = picture(), last()
    tab.say("Draw")
    tab.wait(f"Number(document.querySelector('#lanes').dataset.last) > {first + 5}")
    assert picture() != before
    tab.wait_for_end()
    steps = int(tab.server.metric("engine_steps_total"))
    tab.wait(f"Number(document.querySelector('#lanes').dataset.last) >= {steps - 1}")
    for figure in ("bubbles", "window", "step-time", "rate", "running", "queued", "cache"):
        assert tab.page.inner_text(f"#{figure}") not in ("", "–"), figure
    assert "NaN" not in tab.page.inner_text("#engine")
    tab.wait("document.querySelector('#running').textContent === '0'")


def test_a_paused_picture_stays_and_its_steps_can_be_read(tab: Tab) -> None:
    tab.page.evaluate("document.querySelector('#max-tokens').value = 40")
    tab.say("Draw")
    tab.wait_for_end()
    tab.wait("stretto.lanes.shown().length > 3")
    tab.page.focus("#lanes")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("ArrowLeft")
    chosen = tab.page.evaluate("stretto.lanes.chosen.index")
    assert tab.page.inner_text("#step-details").startswith(f"Step {chosen}: device ")
    assert tab.page.get_attribute("#pause", "aria-pressed") == "true"
    tab.page.click("#pause")
    assert tab.page.get_attribute("#pause", "aria-pressed") == "false"
    count = tab.page.evaluate("stretto.lanes.count")
    tab.page.click("#more")
    assert tab.page.evaluate("stretto.lanes.count") == 2 * count


def test_refusals_are_shown_in_the_servers_words(tab: Tab) -> None:
    tab.say(LONG)
    tab.page.wait_for_selector(".trouble")
    assert "1024" in tab.page.inner_text(".trouble")
    tab.wait_for_end()
    assert [text for text in tab.trouble if "400" in text] == tab.trouble  # the browser's own line about the status
    tab.trouble.clear()
    tab.page.evaluate("document.querySelector('#max-tokens').value = 2")
    tab.say("Shorter")  # a question that was refused does not stand in the next request
    tab.wait_for_end()
    assert [message["content"] for message in tab.bodies[-1]["messages"]] == ["Shorter"]


def test_what_a_model_writes_can_only_become_text(tab: Tab) -> None:
    nasty = "\n".join(
        [
            "# <img src=x onerror=alert(1)>",
            "- **<script>alert(1)</script>** and *<b>x</b>*",
            "1. [here](javascript:alert(1)) and [there](https://example.org/<x>)",
            "> `<svg onload=alert(1)>`",
            "</p><iframe></iframe>",
            "```html",
            "<script>alert(1)</script>",
        ]
    )
    names, text, links = tab.page.evaluate(
        """(nasty) => {
          const root = document.createElement('div');
          root.append(...stretto.markdown(nasty));
          document.body.append(root);
          return [[...new Set([...root.querySelectorAll('*')].map((e) => e.tagName))], root.textContent,
            [...root.querySelectorAll('a')].map((a) => a.href)];
        }""",
        nasty,
    )
    assert set(names) <= {"H3", "UL", "OL", "LI", "STRONG", "EM", "A", "BLOCKQUOTE", "CODE", "P", "PRE", "BR"}
    assert text.count("<script>alert(1)</script>") == 2
    assert [link.split(":")[0] for link in links] == ["https"]


@pytest.mark.parametrize("text", ["a *b", "```\nopen", "**", "- \n- x\n\ny", "1) a\n2) b", "#not", "`", "\n\n", ""])
def test_unfinished_marks_lose_no_text(tab: Tab, text: str) -> None:
    shown = tab.page.evaluate(
        """(text) => {
          const root = document.createElement('div');
          root.append(...stretto.markdown(text));
          return root.textContent;
        }""",
        text,
    )
    letters = [letter for letter in text if letter.isalpha()]
    assert [letter for letter in shown if letter.isalpha()] == letters


def test_everything_can_be_done_from_the_keyboard(tab: Tab) -> None:
    tab.page.focus(".skip")
    seen = []
    for _ in range(10):
        seen.append(tab.page.evaluate("document.activeElement.id || document.activeElement.className"))
        place = tab.page.evaluate(
            """() => { const e = document.activeElement, frame = e.id === 'prompt' ? e.parentElement : e;
              return [getComputedStyle(e).outlineStyle, getComputedStyle(frame).borderTopColor]; }"""
        )
        assert place[0] != "none" or place[1] == "rgb(37, 111, 91)", seen[-1]  # the accent: one sees where one is
        tab.page.keyboard.press("Tab")
    wanted = ["skip", "new-chat", "open-settings", "messages", "prompt", "send", "fewer", "more", "pause", "lanes"]
    assert [name for name in seen if name in wanted] == wanted
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("a")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("b")
    assert tab.page.input_value("#prompt") == "a\nb"


@pytest.mark.parametrize("size", [(390, 844), (320, 568)])
def test_a_phone_shows_chat_and_lanes_without_scrolling_sideways(
    browser: Any, server: ServerProcess, size: tuple[int, int]
) -> None:
    viewport = {"width": size[0], "height": size[1]}
    tab = Tab(browser, server, viewport=viewport, is_mobile=True, has_touch=True, device_scale_factor=2)
    tab.page.evaluate("document.querySelector('#max-tokens').value = 60")
    tab.page.fill("#prompt", "Hello")
    tab.page.tap("#send")
    tab.wait_for_end()
    tab.wait("stretto.lanes.shown().length > 3")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= size[0]
    for name in ("#lanes", "#prompt", "#send", ".message.assistant", "#rate-phone", "#bubbles", "#queued"):
        box = tab.page.locator(name).bounding_box()
        assert box is not None, name
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= size[0], name
    send = tab.page.locator("#send").bounding_box()
    assert send["y"] + send["height"] <= size[1]
    assert send["height"] >= 38
    assert tab.page.evaluate("parseFloat(getComputedStyle(document.querySelector('#prompt')).fontSize)") >= 16
    assert tab.trouble == []
    tab.context.close()


def test_light_and_dark_follow_the_system_with_readable_text(browser: Any, server: ServerProcess) -> None:
    contrast = """() => {
      const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map((v) => {
          v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const back = (e) => { for (; e; e = e.parentElement) {
          const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } };
      const names = ['#welcome .big', '#welcome .dim', '#figures dt', '#figures b', '#send', '.keys', '#legend',
        '#state'];
      return names.map((name) => { const e = document.querySelector(name);
        const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
        return [name, (a + 0.05) / (b + 0.05)]; });
    }"""
    grounds = []
    for scheme in ("light", "dark"):
        tab = Tab(browser, server, color_scheme=scheme)
        assert {name: ratio for name, ratio in tab.page.evaluate(contrast) if ratio < 4.5} == {}
        grounds.append(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert tab.trouble == []
        tab.context.close()
    assert grounds[0] != grounds[1]


def test_a_hidden_page_asks_for_nothing(tab: Tab) -> None:
    tab.wait("stretto.live.updates > 1")
    tab.page.evaluate(
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    assert tab.page.evaluate("stretto.live.connection") is None
    seen = tab.page.evaluate("stretto.live.updates")
    tab.page.wait_for_timeout(500)
    assert tab.page.evaluate("stretto.live.updates") == seen
    tab.page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait(f"stretto.live.updates > {seen}")


def test_with_a_key_the_page_asks_for_it_and_a_lost_server_is_noticed(browser: Any, dummy_model: Path) -> None:
    with ServerProcess(dummy_model, "--max-model-len", "64", "--api-key", "secret") as server:
        assert server.call("GET", "/engine/live", None)[0] == 401
        tab = Tab(browser, server)
        tab.wait("document.querySelector('#state').textContent.includes('API key needed')")
        tab.say("Hi")
        tab.page.wait_for_selector(".trouble")
        assert "API key" in tab.page.inner_text(".trouble")
        tab.wait("document.activeElement.id === 'api-key'")
        assert {text for text in tab.trouble if "401" not in text} == set()
        tab.trouble.clear()
        tab.page.keyboard.type("secret")
        tab.page.keyboard.press("Enter")
        tab.wait("stretto.live.updates > 0")
        tab.say("Hi again")
        tab.wait("document.querySelector('.message.assistant .note')")
        assert tab.trouble == []
        assert tab.page.evaluate("JSON.stringify(localStorage)").count("secret") == 0
        assert server.stop() == 0  # whoever watches does not keep it from stopping
        tab.wait("document.querySelector('#state').dataset.is === 'off'")
        tab.say("Anybody?")
        tab.page.wait_for_selector("text=The server cannot be reached.")
        tab.context.close()
