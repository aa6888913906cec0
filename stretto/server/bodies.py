"""Reading of request bodies within limits, and what the access log is told about a request."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.types import Scope

from stretto.ipc.answer import Answer
from stretto.server.errors import ApiError
from stretto.server.settings import ServerConfig

_NOTE = "stretto.note"
REFUSED = "stretto.refused"
"""In a scope: the ApiError with which the HTTP protocol refuses the request."""
_LEAST_RATE = 1024
"""Bytes per second that a body has to come with on average, after a time of grace."""


def too_large(limit: int) -> ApiError:
    """413: refused before it is kept."""
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is too large, 408 if it does not come, or only drop by drop."""
    limit = config.max_body_bytes
    started = time.monotonic()
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        left = started + config.slow_client_timeout + size / _LEAST_RATE - time.monotonic()
        try:
            message = await asyncio.wait_for(request.receive(), min(config.slow_client_timeout, left))
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body is incomplete")
        if REFUSED in request.scope:
            raise request.scope[REFUSED]
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


class Note:
    """What the access log says about a request besides method, path and status."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.user: str | None = None

    def text(self) -> str:
        """For the log line."""
        parts = []
        if self.answer is not None:
            parts.append(f"prompt={self.answer.num_prompt_tokens} output={self.answer.num_output_tokens}")
        if self.user is not None:
            parts.append(f"user={self.user!r}")
        return " ".join(parts)


def put_note(scope: Scope) -> Note:
    """A new note for the request of this scope."""
    scope[_NOTE] = note = Note()
    return note


def note(request: Request, answer: Answer, user: str | None) -> None:
    """Tell the access log about the request's answer."""
    entry = request.scope.get(_NOTE)
    if isinstance(entry, Note):
        entry.answer, entry.user = answer, user
