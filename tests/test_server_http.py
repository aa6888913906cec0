"""What clients do on the wire, well-behaved and not: every answer is HTTP in OpenAI's form, counted and logged."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server_process import PATIENCE, ServerProcess, wait_until

BODY = json.dumps({"prompt": "the quick", "max_tokens": 5, "temperature": 0}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY)
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


class Wire:
    """A connection of bytes."""

    def __init__(self, server: ServerProcess) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, method: str = "POST") -> tuple[int, bytes, dict[str, str]]:
        """The next answer: status, body and headers. Raises OSError or HTTPException if there is none."""
        response = http.client.HTTPResponse(_Unbuffered(self.socket), method=method)  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, response.read(), headers


class _Unbuffered:
    """For HTTPResponse: reads no more than it is asked for, so that the next answer stays in the socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def makefile(self, mode: str) -> Any:
        return self._socket.makefile(mode, buffering=0)


@pytest.fixture
def wire(server: ServerProcess) -> Iterator[Wire]:
    made = Wire(server)
    yield made
    made.socket.close()


def expected(server: ServerProcess) -> str:
    return str(server.post("/v1/completions", BODY)[1]["choices"][0]["text"])


@pytest.mark.parametrize(
    "offers",
    [
        H2C,
        H2C.replace(b"Upgrade, HTTP2-Settings", b"keep-alive, Upgrade, HTTP2-Settings"),
        b"connection: upgrade\r\nupgrade: websocket\r\n",
        b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\nConnection: keep-alive\r\n",
    ],
    ids=["h2c", "kept", "websocket", "tls"],
)
@pytest.mark.parametrize("split", ["whole", "head-then-body", "bytes"])
def test_offers_of_another_protocol_are_left_alone(
    server: ServerProcess, wire: Wire, offers: bytes, split: str
) -> None:
    text = expected(server)
    for _ in range(2):  # the connection goes on as if nothing had been offered
        request = HEAD + offers + LENGTH + BODY
        if split == "bytes":
            for index in range(len(request)):
                wire.send(request[index : index + 1])
        elif split == "whole":
            wire.send(request)
        else:
            wire.send(request[: -len(BODY)])
            time.sleep(0.05)
            wire.send(BODY)
        status, body, _ = wire.answer()
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, text)


def test_offers_change_nothing_about_chunks_pipelines_and_heads_without_bodies(
    server: ServerProcess, wire: Wire
) -> None:
    text = expected(server)
    chunked = HEAD + H2C + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n"
    wire.send(chunked + get + HEAD + H2C + LENGTH + BODY + get)
    for method in ("POST", "GET", "POST", "GET"):
        status, body, _ = wire.answer(method)
        assert status == 200
        assert method == "GET" or json.loads(body)["choices"][0]["text"] == text


MALFORMED = {
    "rubbish": b"\x00\x01\x02rubbish\r\n\r\n",
    "version": b"GET /health HTTP/9.9\r\n\r\n",
    "length": HEAD + b"content-length: 12x\r\n\r\n",
    "negative": HEAD + b"content-length: -1\r\n\r\n",
    "two-lengths": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "header": b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + b"\x07" * 64,
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_http_gets_the_error_object_a_count_and_a_line(
    server: ServerProcess, wire: Wire, data: bytes
) -> None:
    before = refusals(server, 400)
    wire.send(data)
    status, body, headers = wire.answer()
    assert status == 400
    assert json.loads(body)["error"] == {
        "message": "this is not valid HTTP",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    request_id = headers["x-request-id"]
    wire.socket.close()
    wait_until(lambda: f"id={request_id}" in server.text, "the access log")
    assert refusals(server, 400) == before + 1


def refusals(server: ServerProcess, status: int, path: str = "other") -> float:
    _, body = server.get("/metrics", server.headers)
    pattern = rf'^stretto:http_requests_total{{.*path="{re.escape(path)}",status="{status}"}} (\S+)$'
    return sum(map(float, re.findall(pattern, body.decode(), re.M)))


def test_a_malformed_body_is_refused_as_its_request(server: ServerProcess, wire: Wire) -> None:
    before = refusals(server, 400, "/v1/completions")
    wire.send(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
    status, body, headers = wire.answer()
    assert (status, json.loads(body)["error"]["message"]) == (400, "this is not valid HTTP")
    wait_until(lambda: f"id={headers['x-request-id']}" in server.text, "the access log")
    assert refusals(server, 400, "/v1/completions") == before + 1


def test_rubbish_after_a_request_leaves_its_answer_whole(server: ServerProcess, wire: Wire) -> None:
    text = expected(server)
    wire.send(HEAD + LENGTH + BODY + b"\x00rubbish\r\n\r\n")
    status, body, _ = wire.answer()
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, text)
    assert wire.answer()[0] == 400


def test_large_heads_are_answered_counted_and_logged(server: ServerProcess, wire: Wire) -> None:
    before = refusals(server, 431)
    wire.send(b"GET /health HTTP/1.1\r\nx-request-id: large.1\r\nx: " + b"y" * 100_000)
    status, body, headers = wire.answer()
    assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
    wire.socket.close()
    wait_until(lambda: f"id={headers['x-request-id']}" in server.text, "the access log")
    assert refusals(server, 431) == before + 1


def test_whoever_asks_for_the_head_only_gets_it(server: ServerProcess, wire: Wire) -> None:
    for path in ("/health", "/ready", "/live", "/version", "/metrics", "/v1/models", "/v1/models/tested", "/"):
        wire.send(b"HEAD %s HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        assert wire.answer("HEAD")[:2] == (200, b""), path
    wire.send(b"HEAD /engine/live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert wire.answer("HEAD")[0] == 405


def test_nobody_is_sent_to_another_host(server: ServerProcess, wire: Wire) -> None:
    for path in (b"/health/", b"/v1/models/", b"/tokenize/"):
        wire.send(b"GET %s HTTP/1.1\r\nhost: evil.example\r\n\r\n" % path)
        status, _, headers = wire.answer("GET")
        assert status == 404
        assert "location" not in headers


@pytest.fixture(scope="module")
def strict(dummy_model: Path) -> Iterator[ServerProcess]:
    """A server with a key, two connections, one allowed origin, and little patience."""
    options = (
        *("--api-key", "secret", "--slow-client-timeout", "2", "--max-connections", "8", "--max-model-len", "2048"),
        *("--allowed-origins", "http://page.example", "--max-num-seqs", "2"),
    )
    with ServerProcess(dummy_model, *options) as running:
        running.headers = {"authorization": "Bearer secret"}
        yield running


STAINLESS = ("arch", "lang", "os", "package-version", "retry-count", "runtime", "runtime-version", "timeout")


def test_the_official_client_may_come_from_an_allowed_page(strict: ServerProcess) -> None:
    wanted = ",".join(["authorization", "content-type", *(f"x-stainless-{name}" for name in STAINLESS)])
    preflight = {
        "origin": "http://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    status, _, headers = strict.call("OPTIONS", "/v1/chat/completions", None, preflight)
    assert status == 200
    assert set(wanted.split(",")) <= set(headers["access-control-allow-headers"].lower().replace(" ", "").split(","))
    status, _, headers = strict.call("GET", "/v1/models", None, {**strict.headers, "origin": "http://page.example"})
    assert status == 200
    exposed = headers["access-control-expose-headers"].lower()
    assert "x-request-id" in exposed
    assert "retry-after" in exposed
    status, _, headers = strict.call("OPTIONS", "/v1/models", None, {**preflight, "origin": "http://evil.example"})
    assert "access-control-allow-origin" not in headers


def test_a_refusal_for_want_of_a_key_is_counted_under_its_route(strict: ServerProcess) -> None:
    for path, route in (("/v1/models/x", "/v1/models/{model:path}"), ("/metrics", "/metrics"), ("/nothing", "other")):
        before = refusals(strict, 401, route)
        assert strict.get(path, {"x": "y"})[0] == 401
        wait_until(lambda path=route, least=before: refusals(strict, 401, path) == least + 1, route)


def test_too_many_connections_are_answered_and_counted(strict: ServerProcess) -> None:
    kept = [Wire(strict) for _ in range(8)]
    try:
        more = Wire(strict)
        status, body, headers = more.answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
        assert int(headers["retry-after"]) > 0
        more.socket.close()
    finally:
        for wire in kept:
            wire.socket.close()
    wait_until(lambda: f"id={headers['x-request-id']}" in strict.text, "the access log")


def test_a_body_that_comes_drop_by_drop_is_refused(strict: ServerProcess) -> None:
    wire = Wire(strict)
    wire.send(HEAD + b"authorization: Bearer secret\r\ncontent-length: 5000\r\n\r\n")
    wire.socket.setblocking(False)

    def answered() -> bool:
        try:
            wire.send(b" ")
            return bool(wire.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False

    started = time.monotonic()
    while not answered():
        assert time.monotonic() - started < PATIENCE
        time.sleep(0.2)
    wire.socket.setblocking(True)
    assert wire.answer()[0] == 408
    wire.socket.close()


def test_a_client_that_reads_nothing_is_cut_although_the_system_buffers(strict: ServerProcess) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", strict.port))
        head = HEAD + b"authorization: Bearer secret\r\nx-request-id: unread\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        wait_until(lambda: "id=unread" in strict.text, "the end of the request")
    (line,) = [line for line in strict.log if "id=unread" in line]
    (found,) = re.findall(r"output=(\d+)", line)
    assert 0 < int(found) < 2000
