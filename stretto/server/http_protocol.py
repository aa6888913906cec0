"""The HTTP protocol of a connection, with limits: how large heads may be, how long a client may say or read nothing.

What is refused here (no HTTP, too large a head, too many connections) goes through the application as a request that is
refused: so its answer, its line in the access log and its count in the metrics are those of any other.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stretto.server.bodies import REFUSED
from stretto.server.delivery import ABORT
from stretto.server.errors import BUSY_RETRY, ApiError, bad_request, unavailable

MAX_HEADERS = 128
_OF_THE_CONNECTION = frozenset({b"upgrade", b"http2-settings"})
"""What a client offers to change on the connection; offers are not taken."""


class LimitedProtocol(HttpToolsProtocol):
    """Refuses large heads while they arrive, and cuts connections that do not finish them or do not read."""

    max_header_bytes = 64 * 1024
    max_connections = 16_384
    quiet_seconds = 60.0

    url = b""
    _in_headers = True
    _header_bytes = 0
    _refused = False
    _offers_upgrade = False
    """The head being read has an offer that makes the parser stop after it; it is read again without."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects."""
        super().connection_made(transport)
        _watch_reader(transport, self.quiet_seconds)
        if len(self.connections) > self.max_connections:
            self._refuse(unavailable("too many connections", "too_many_connections", BUSY_RETRY), linger=False)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._in_headers:
            self._header_bytes += len(data)
        self._feed(data)
        if self._in_headers and self._header_bytes and self._timer is None and not self._refused:
            self._start_timer()
        if self._in_headers and self._header_bytes > self.max_header_bytes:
            self._refuse(_head_too_large())

    def _feed(self, data: bytes) -> None:
        """Parse. Offers of another protocol are left alone, as a server may (RFC 9110, 7.8)."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._refused:
                return
            if not self._offers_upgrade:
                self._refuse(_no_http())
                return
            head = self._head_without_offers()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(head + data[stop.args[0] :])
        except httptools.HttpParserError:
            self._refuse(_no_http())

    def _head_without_offers(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() not in _OF_THE_CONNECTION]
                value = b",".join(kept)
            if name not in _OF_THE_CONNECTION:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._offers_upgrade = False
        self.scope[ABORT] = self._abort  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        """All headers are here."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._stop_timer()
        if size > self.max_header_bytes or len(self.headers) > MAX_HEADERS:
            self._refuse(_head_too_large(), self.parser.get_method())
        elif self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers_upgrade = True
        else:
            super().on_headers_complete()
            self._in_headers = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._refused and not self._offers_upgrade:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next one may begin."""
        if self._refused or self._offers_upgrade:
            return
        super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.quiet_seconds, self._no_headers)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_headers(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _abort(self) -> None:
        self.transport.abort()

    # -- refusals -----------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError, method: bytes = b"-", *, linger: bool = True) -> None:
        """Answer `error` after what is answered already, then nothing; `linger` until the client has read it."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        if self._in_headers:
            self._begin_refusal(error, method, linger)
        else:  # the body of a request that the application has begun with
            self.cycle.scope[REFUSED] = error  # type: ignore[literal-required]
            self.cycle.keep_alive = False
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _begin_refusal(self, error: ApiError, method: bytes, linger: bool) -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": method.decode("ascii"),
            "root_path": self.root_path,
            "path": "",
            "raw_path": self.url or b"-",
            "query_string": b"",
            "headers": list(self.headers or ()),
            "state": {},
            REFUSED: error,
        }
        cycle = RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        cycle.more_body = linger
        if not linger:
            cycle.message_event.set()
        before, self.cycle = self.cycle, cycle
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))


def _head_too_large() -> ApiError:
    return ApiError(431, "the headers are too large", code="headers_too_large")


def _no_http() -> ApiError:
    return bad_request("this is not valid HTTP")


def _watch_reader(transport: asyncio.Transport, seconds: float) -> None:
    """Let the system cut a client that acknowledges nothing for so long, or whose network is gone.

    What the system takes for sending hides from this process that nobody reads it, and TCP alone waits for ever.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        whole = max(1, int(seconds))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, whole)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, whole)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def limited_protocol(max_header_bytes: int, max_connections: int, quiet_seconds: float) -> type[Any]:
    """The protocol with these limits."""
    limits = {
        "max_header_bytes": max_header_bytes,
        "max_connections": max_connections,
        "quiet_seconds": quiet_seconds,
    }
    return type("Protocol", (LimitedProtocol,), limits)
