"""A server made by hand: answers with prepared server-sent events, and keeps what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Script = Callable[[dict[str, Any]], Sequence[bytes]]
"""From a request's body to the pieces of the answer's body, sent one by one."""


def event(**fields: Any) -> bytes:
    """One server-sent event of a completion."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(text: str | None = None, finish: str | None = None, **delta: Any) -> bytes:
    """A chunk of a chat completion."""
    content = {} if text is None else {"content": text}
    return event(choices=[{"index": 0, "delta": {**delta, **content}, "finish_reason": finish}])


def usage(prompt: int, completion: int) -> bytes:
    """The chunk that counts tokens."""
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


class FakeOpenAI:
    """Runs while its `with` block does."""

    def __init__(self, script: Script, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = 0
        self.loading = 0
        """Questions for the models that are still to be answered with a 503."""
        self.lock = threading.Lock()
        self.gate: threading.Barrier | None = None
        """Where requests wait for each other before they are answered."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.loading -= 1
                self._whole(200 if fake.loading < 0 else 503, {"data": [{"id": "made-by-hand"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with fake.lock:
                    fake.bodies.append(body)
                    fake.headers.append({name.lower(): value for name, value in self.headers.items()})
                    fake.open += 1
                    fake.most_open = max(fake.most_open, fake.open)
                if fake.gate is not None:
                    fake.gate.wait(30)
                try:
                    if status != 200:
                        self._whole(status, {"error": {"message": "no such luck"}})
                    else:
                        self._stream(script(body))
                finally:
                    with fake.lock:
                        fake.open -= 1

            def _whole(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, pieces: Sequence[bytes]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_WR)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
