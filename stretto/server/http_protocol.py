"""The HTTP protocol of a connection, with limits: how large headers may be, and how long a client may say nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stretto.server.delivery import ABORT

MAX_HEADERS = 128


class LimitedProtocol(HttpToolsProtocol):
    """Refuses large headers with a 431 while they arrive, and cuts connections that do not finish their headers."""

    max_header_bytes = 64 * 1024
    max_connections = 16_384
    header_seconds = 60.0

    _in_headers = True
    _header_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(b"503 Service Unavailable", b"too many connections", b"retry-after: 1\r\n")
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes and self._timer is None:
            self._start_timer()
        if self._in_headers and self._header_bytes > self.max_header_bytes and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", b"the headers are too large")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[ABORT] = self._abort  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        """All headers are here."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._in_headers = False
        self._stop_timer()
        if size > self.max_header_bytes or len(self.headers) > MAX_HEADERS:
            self._refuse(b"431 Request Header Fields Too Large", b"the headers are too large")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next one may begin."""
        if self.cycle is not None:
            super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_seconds, self._no_headers)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_headers(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _abort(self) -> None:
        self.transport.abort()

    def _refuse(self, status: bytes, text: bytes, headers: bytes = b"") -> None:
        body = b'{"error":{"message":"' + text + b'","type":"invalid_request_error","param":null,"code":null}}'
        self.transport.write(
            b"HTTP/1.1 "
            + status
            + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
            + headers
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()


def limited_protocol(max_header_bytes: int, max_connections: int, header_seconds: float) -> type[Any]:
    """The protocol with these limits."""
    limits = {
        "max_header_bytes": max_header_bytes,
        "max_connections": max_connections,
        "header_seconds": header_seconds,
    }
    return type("Protocol", (LimitedProtocol,), limits)
