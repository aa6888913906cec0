"""/engine/live and the page as bytes: what is sent, to whom, and what it costs while nobody watches."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stretto.ipc.messages import Seen
from stretto.observe.step_times import COLUMNS
from stretto.server import live as live_module
from stretto.server.errors import ApiError, engine_dead
from stretto.server.frontend import Frontend
from stretto.server.live import LiveFeed
from tests.helpers.server_process import PATIENCE, ServerProcess


@contextmanager
def watching(server: ServerProcess) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of /engine/live as they come."""
    with urllib.request.urlopen(server.url + "/engine/live", timeout=PATIENCE) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response if line.startswith(b"data: "))


def complete(server: ServerProcess, max_tokens: int) -> None:
    status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": max_tokens})
    assert status == 200, answer


def test_watchers_see_every_step_once_with_times_in_order(server: ServerProcess) -> None:
    with watching(server) as events:
        engine = next(events)
        assert (engine["kind"], engine["model"], tuple(engine["columns"])) == ("engine", "tested", COLUMNS)
        first = next(events)
        before = max([step[0] for step in first["steps"]], default=first["stats"]["steps"] - 1)
        complete(server, 30)
        steps: list[list[float]] = []
        while len(steps) < 30:
            update = next(events)
            assert update["kind"] == "update"
            assert all(step[COLUMNS.index("device_end")] <= update["now"] for step in update["steps"])
            steps += [step for step in update["steps"] if step[0] > before]
    table = np.array(steps)
    assert table[:30, 0].tolist() == list(range(int(before) + 1, int(before) + 31))
    in_order = ("receive_begin", "schedule_begin", "launch_begin", "launch_end", "device_end", "process_end")
    times = table[:, [COLUMNS.index(name) for name in in_order]]
    assert (np.diff(times, axis=1) >= -1e-6).all()
    assert (table[:, COLUMNS.index("device_begin")] <= table[:, COLUMNS.index("device_end")]).all()


def test_a_new_watcher_sees_steps_of_before(server: ServerProcess) -> None:
    with watching(server) as events:
        complete(server, 5)
        while not next(events).get("steps"):
            pass
        with watching(server) as others:
            next(others)
            assert next(others)["steps"]


# -- the feed by itself -----------------------------------------------------------------------------------------------


class CountedEngine:
    """Makes one step per question, and counts the questions."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.dead = False

    async def look(self, after: int, seconds: float) -> Seen:
        self.asked.append(after)
        row = np.zeros(len(COLUMNS))
        row[0] = after + 1
        return Seen(float(len(self.asked)), row.tobytes(), {"num_running": 1.0})


class FakeFrontend:
    def __init__(self) -> None:
        self.made = CountedEngine()
        self.draining = False
        self.names = ("m",)
        self.config = SimpleNamespace(slow_client_timeout=0.2)
        sizes = dict.fromkeys(("max_model_len", "max_num_seqs", "num_pages", "page_size", "overlap_depth"), 1)
        self.info = SimpleNamespace(device="cpu", dtype="float32", **sizes)

    @property
    def engine(self) -> CountedEngine:
        if self.made.dead:
            raise engine_dead()
        return self.made


class Watcher:
    """A client of the feed, without a network."""

    def __init__(self, feed: LiveFeed, reads: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self.over = False
        self.leave = asyncio.Event()
        self._reads = reads
        self.task = asyncio.ensure_future(self._run(feed))

    async def _run(self, feed: LiveFeed) -> None:
        response = await feed(cast(Any, None))
        await response({"type": "http"}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self._reads:
            await asyncio.Event().wait()
        if message["type"] == "http.response.body":
            parts = message["body"].split(b"\n\n")[:-1]
            self.events += [json.loads(part.removeprefix(b"data: ")) for part in parts]
            self.over = not message["more_body"]

    async def has(self, count: int) -> None:
        while len(self.events) < count:
            await asyncio.sleep(0.001)


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> FakeFrontend:
    monkeypatch.setattr(live_module, "PERIOD_SECONDS", 0.01)
    return FakeFrontend()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def test_all_watchers_share_one_question_and_nobody_asks_when_they_have_left(front: FakeFrontend) -> None:
    async def scene() -> None:
        feed = LiveFeed(cast(Frontend, front))
        await asyncio.sleep(0.05)
        assert front.made.asked == []
        watchers = [Watcher(feed) for _ in range(5)]
        for watcher in watchers:
            await watcher.has(4)
        assert front.made.asked == list(range(-1, len(front.made.asked) - 1))  # each step asked for once
        for watcher in watchers:
            watcher.leave.set()
            await watcher.task
        asked = len(front.made.asked)
        await asyncio.sleep(0.05)
        assert len(front.made.asked) == asked
        again = Watcher(feed)
        await again.has(2)
        assert [step[0] for step in again.events[1]["steps"]][:asked] == list(range(asked))
        again.leave.set()
        await again.task

    run(scene())


@pytest.mark.parametrize("what", ["dead", "draining"])
def test_streams_end_when_the_engine_dies_or_the_server_stops(front: FakeFrontend, what: str) -> None:
    async def scene() -> None:
        watcher = Watcher(LiveFeed(cast(Frontend, front)))
        await watcher.has(3)
        setattr(front.made if what == "dead" else front, what, True)
        await watcher.task
        assert watcher.over

    run(scene())


def test_a_watcher_that_does_not_read_is_cut_and_others_go_on(front: FakeFrontend) -> None:
    async def scene() -> None:
        feed = LiveFeed(cast(Frontend, front))
        good, deaf = Watcher(feed), Watcher(feed, reads=False)
        await deaf.task  # ends by itself
        await good.has(len(good.events) + 3)
        good.leave.set()
        await good.task

    run(scene())


def test_there_are_only_so_many_watchers(front: FakeFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MOST_WATCHERS", 1)

    async def scene() -> None:
        feed = LiveFeed(cast(Frontend, front))
        one = Watcher(feed)
        await one.has(1)
        with pytest.raises(ApiError, match="too many"):
            await feed(cast(Any, None))
        one.leave.set()
        await one.task
        assert await feed(cast(Any, None))

    run(scene())


# -- the page's bytes -------------------------------------------------------------------------------------------------


def test_the_page_is_one_document_that_names_no_other(server: ServerProcess) -> None:
    status, body, headers = server.call("GET", "/", None)
    text = body.decode()
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:src|href)=[\"'](?!data:|#)", text)
    assert "@STYLE@" not in text
    assert "innerHTML" not in text
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy


def test_a_browser_that_has_the_page_is_told_so(server: ServerProcess) -> None:
    tag = server.call("GET", "/", None)[2]["etag"]
    status, body, _ = server.call("GET", "/", None, {"if-none-match": tag})
    assert (status, body) == (304, b"")
