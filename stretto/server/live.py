"""GET /engine/live: what the engine is doing, as server-sent events for whoever watches; nobody watching costs nothing.

Owns the one question to the engine that all watchers of a front end share. Nothing here knows about tokens or requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stretto.ipc.messages import Seen
from stretto.observe.step_times import COLUMNS
from stretto.server.delivery import left
from stretto.server.errors import ApiError, unavailable
from stretto.server.frontend import Frontend

PERIOD_SECONDS = 0.2
MOST_WATCHERS = 64
"""Of one front end."""
_PATIENCE_SECONDS = 5.0
_REMEMBERED = 64
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Row = list[float]


class LiveEngine(msgspec.Struct, frozen=True, tag="engine", tag_field="kind"):
    """The first event: what the engine is, and what the numbers of a step are."""

    model: str
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    overlap_depth: int
    columns: tuple[str, ...]
    """As in observe.step_times."""


class LiveUpdate(msgspec.Struct, frozen=True, tag="update", tag_field="kind"):
    """Every other event: the steps since the one before, and the engine's figures."""

    now: float
    """Seconds since the engine's start; the steps' times are on the same clock."""
    stats: dict[str, float]
    steps: list[Row]


class LiveFeed:
    """Asks the engine five times a second while there are watchers, and hands the answer to all of them."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._remembered: deque[Row] = deque(maxlen=_REMEMBERED)
        self._last_step = -1
        self._num_watchers = 0
        self._asking: asyncio.Task[None] | None = None
        self._update: LiveUpdate | None = None
        self._event = b""
        self._news = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        """The engine's recent steps and figures, as server-sent events until the client leaves. Raises ApiError 503."""
        assert self._frontend.engine is not None
        if self._num_watchers >= MOST_WATCHERS:
            raise unavailable("too many watch the engine already", "too_many_watchers", 5)
        return _LiveStream(self)

    def hello(self) -> LiveEngine:
        """The first event."""
        info = self._frontend.info
        return LiveEngine(
            model=self._frontend.names[0],
            device=info.device,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            num_pages=info.num_pages,
            page_size=info.page_size,
            overlap_depth=info.overlap_depth,
            columns=COLUMNS,
        )

    def remembered(self) -> LiveUpdate | None:
        """What a new watcher has missed; None if nobody watched before."""
        update = self._update
        return None if update is None else LiveUpdate(update.now, update.stats, list(self._remembered))

    @property
    def slow_client_timeout(self) -> float:
        """How long a watcher may read nothing."""
        return self._frontend.config.slow_client_timeout

    def begin(self) -> None:
        """One more watches."""
        self._num_watchers += 1
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())

    def end(self) -> None:
        """One less."""
        self._num_watchers -= 1
        if self._num_watchers == 0 and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def next(self) -> bytes | None:
        """The next update as an event; None when there will be none."""
        await self._news.wait()
        return None if self._asking is None else self._event

    async def _ask(self) -> None:
        """Until cancelled, the engine is dead or the server drains."""
        try:
            while not self._frontend.draining:
                with suppress(ApiError):
                    seen = await self._frontend.engine.look(self._last_step, _PATIENCE_SECONDS)
                    if seen is not None:
                        self._take(seen)
                    await asyncio.sleep(PERIOD_SECONDS)
                    continue
                break
        finally:
            if self._asking is asyncio.current_task():  # else somebody has begun to watch again meanwhile
                self._asking = None
            self._tell()

    def _take(self, seen: Seen) -> None:
        table = np.frombuffer(seen.steps).reshape(-1, len(COLUMNS))
        steps = np.round(table, 7).tolist()
        if steps:
            self._last_step = int(steps[-1][0])
            self._remembered.extend(steps)
        self._update = LiveUpdate(seen.now, seen.stats, steps)
        self._event = event(self._update)
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class _LiveStream(Response):
    """The events for one watcher. One that reads slowly misses updates; one that reads nothing is cut."""

    def __init__(self, feed: LiveFeed) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the client leaves or the engine does."""
        gone = asyncio.ensure_future(left(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        self._feed.begin()
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            sending.cancel()
            self._feed.end()
        with suppress(asyncio.CancelledError, TimeoutError):
            await sending

    async def _send_all(self, send: Send) -> None:
        await self._within(send({"type": "http.response.start", "status": 200, "headers": self.raw_headers}))
        update = self._feed.remembered()
        data: bytes | None = event(self._feed.hello()) + (b"" if update is None else event(update))
        while data is not None:
            await self._within(send({"type": "http.response.body", "body": data, "more_body": True}))
            data = await self._feed.next()
        await self._within(send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _within(self, sending: Awaitable[None]) -> None:
        await asyncio.wait_for(sending, self._feed.slow_client_timeout)


def event(message: LiveEngine | LiveUpdate) -> bytes:
    """As a server-sent event."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"
