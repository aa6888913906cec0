"""Gate: the outermost layer of the application. Request ids, API keys, size limits by header, access log, last resort.

Everything that a request without a right to be here could cost is refused here, before anything is read or kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.server.bodies import REFUSED, Note, put_note, too_large
from stretto.server.delivery import SEND, ClientLeft
from stretto.server.errors import ApiError, internal_error
from stretto.server.metrics import Metrics
from stretto.server.settings import ServerConfig

access = logging.getLogger("stretto.access")
logger = logging.getLogger("stretto.server")

OPEN_ROUTES = frozenset({"/", "/live", "/ready", "/health"})
"""What needs no API key: the page (which holds nothing) and what load balancers ask."""
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_LINGER_SECONDS = 2.0
CLIENT_LEFT = 499


class Gate:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], config: ServerConfig, metrics: Metrics) -> None:
        """`routes` are those of `app`: what is refused before it gets there is counted under them."""
        self._app = app
        self._routes = routes
        self._config = config
        self._metrics = metrics
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _request_id(scope)
        note = put_note(scope)
        scope[SEND] = send
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            try:
                self._check(scope)
                await self._app(scope, receive, send_with_id)
            except ApiError as error:  # raised here, not in a route
                await _refuse(error, scope, receive, send_with_id)
        except ClientLeft:
            status = CLIENT_LEFT
        except Exception:
            logger.exception("request %s fails", request_id.decode())
            if status == 0:
                await internal_error().response()(scope, receive, send_with_id)
        finally:
            self._log(scope, status, started, request_id, note)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError unless the request may come in."""
        if REFUSED in scope:
            raise scope[REFUSED]
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        if self._key_digests and scope["path"] not in OPEN_ROUTES and not self._has_key(headers):
            raise ApiError(401, "a valid API key is needed", kind="authentication_error", code="invalid_api_key")
        for name, value in headers:
            if name == b"content-length":
                if not value.isdigit() or len(value) > 18:
                    raise ApiError(400, "content-length is not a number")
                if int(value) > self._config.max_body_bytes:
                    raise too_large(self._config.max_body_bytes)

    def _has_key(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                digest = hashlib.sha256(key.strip()).digest()
                known = [hmac.compare_digest(digest, other) for other in self._key_digests]
                return scheme.lower() == b"bearer" and any(known)
        return False

    def _log(self, scope: Scope, status: int, started: float, request_id: bytes, note: Note) -> None:
        self._metrics.http(self._route(scope), status)
        if self._config.access_log:
            client = scope.get("client") or ("-", 0)
            access.info(
                '%s "%s %s" %d %.3fs id=%s %s',
                client[0],
                scope["method"],
                scope["raw_path"].decode("latin-1")[:200],
                status,
                time.monotonic() - started,
                request_id.decode(),
                note.text(),
            )

    def _route(self, scope: Scope) -> str:
        """The path of the route that the request is for; never what the client made up."""
        route: Any = scope.get("route")
        if route is None:
            route = next((one for one in self._routes if one.matches(scope)[0] is not Match.NONE), None)
        return getattr(route, "path", "other")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, then read and drop for a moment what the client still sends: else it may never see the answer."""
    response = error.response()
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})

    async def drop() -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(drop(), _LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _request_id(scope: Scope) -> bytes:
    """The client's own, if it is a harmless one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()
