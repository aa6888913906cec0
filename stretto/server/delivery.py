"""How an answer reaches its client: whole, or as server-sent events. However the client leaves, its request ends.

Owns the race between the engine and the client's departure, and what a slow reader may cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stretto.server.errors import ApiError
from stretto.server.frontend import Frontend, OpenRequest, answer_error

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
ABORT = "stretto.abort"
"""In a scope: cuts the connection, whatever still waits to be written."""
SEND = "stretto.send"
"""In a scope: the server's own `send`, for parts of a body; those that wrap it look at the start of a response only."""
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """The client has hung up; nobody reads the response."""


class Events(Protocol):
    """Turns what is new in an answer into events."""

    def begin(self) -> bytes:
        """Events that come before the first token."""

    def new(self) -> bytes:
        """Events for what came since the last call; empty if nothing can be shown."""

    def end(self) -> bytes:
        """Events after the last token of a complete answer."""

    def failed(self, error: ApiError) -> bytes:
        """Events that end a stream whose answer cannot be completed."""


async def left(receive: Receive) -> None:
    """Wait until the client hangs up. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(frontend: Frontend, opened: OpenRequest, request: Request) -> None:
    """Wait for the complete answer. Raises ClientLeft or ApiError; then the engine's work for it ends."""
    try:
        await _unless_left(opened.answer.end(), request)
        error = answer_error(opened.answer)
        if error is not None:
            raise error
    finally:
        frontend.close(opened)


async def ready(opened: OpenRequest, request: Request, is_ready: Callable[[], bool]) -> None:
    """Wait until `is_ready`, or until nothing more will come. Raises ClientLeft. The answer can be streamed after."""
    answer = opened.answer

    async def wait() -> None:
        while not is_ready() and not answer.finished:
            await answer.news()
        answer.wake()  # the stream shall not wait for the news that this has taken

    await _unless_left(wait(), request)


async def _unless_left(work: Coroutine[Any, Any, None], request: Request) -> None:
    """Do `work`, but raise ClientLeft as soon as the client hangs up."""
    done = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientLeft
        done.result()
    finally:
        done.cancel()
        gone.cancel()


class EventStream(Response):
    """An answer as it grows. One write per step, however many samples the request has."""

    def __init__(self, frontend: Frontend, opened: OpenRequest, events: Events) -> None:
        """Takes over `opened`: it is closed when the stream ends, however that happens."""
        self.status_code = 200
        self.background = None
        self.body_iterator: Any = None
        self.raw_headers = list(_HEADERS)
        self._frontend = frontend
        self._opened = opened
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that leaves, or does not read for too long, only ends it early."""
        gone = asyncio.ensure_future(self._abort_when_left(receive))
        self._opened.give_up = scope.get(ABORT)
        try:
            await self._send_all(send, scope.get(SEND, send))
        finally:
            gone.cancel()
            self._frontend.close(self._opened)

    async def _abort_when_left(self, receive: Receive) -> None:
        await left(receive)
        self._opened.answer.abort()

    async def _send_all(self, send: Send, send_part: Send) -> None:
        answer, events, opened = self._opened.answer, self._events, self._opened
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = events.begin()
        more = True
        while more:
            if data:
                opened.sending_since = time.monotonic()
                await send_part({"type": "http.response.body", "body": data, "more_body": True})
                opened.sending_since = None
            await answer.news()
            if answer.aborted:
                return
            data = events.new()
            more = not answer.finished
        error = answer_error(answer)
        data += events.end() if error is None else events.failed(error)
        opened.sending_since = time.monotonic()
        await send_part({"type": "http.response.body", "body": data, "more_body": False})
