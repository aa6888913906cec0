"""What is too large, too much, too slow or without a key is refused before it costs anything."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server_process import PATIENCE, ServerProcess, wait_until

KEY = {"authorization": "Bearer open-sesame"}
LONG = {"prompt": "the quick", "max_tokens": 900}


@pytest.fixture(scope="module")
def small(dummy_model: Path) -> Iterator[ServerProcess]:
    """A server with tight limits and a key."""
    options = (
        *("--max-model-len", "1024", "--max-num-seqs", "4", "--max-queued-requests", "4", "--max-body-bytes", "100000"),
        *("--max-header-bytes", "8192", "--slow-client-timeout", "3", "--no-clamp-max-tokens"),
        *("--allowed-origins", "http://page.example"),
    )
    with ServerProcess(dummy_model, *options, env={"STRETTO_API_KEY": "open-sesame"}) as running:
        yield running


def raw(server: ServerProcess, data: bytes) -> bytes:
    """What the server answers to these bytes until it closes or the answer is complete."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass
        return answer


def memory(server: ServerProcess) -> int:
    """Resident pages of the front end."""
    return int(Path(f"/proc/{server.worker_pids[0]}/statm").read_text().split()[1]) * resource.getpagesize()


def test_only_open_routes_work_without_a_key(small: ServerProcess) -> None:
    for path in ("/health", "/live", "/ready"):
        assert small.get(path)[0] == 200
    for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/nothing", "/health/"):
        assert small.get(path)[0] == 401, path
    for headers in (
        {"authorization": "Bearer wrong"},
        {"authorization": "open-sesame"},
        {"authorization": "Basic eA=="},
    ):
        status, body = small.get("/v1/models", headers)
        assert status == 401
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
        assert small.get(path, KEY)[0] == 200, path


def test_a_large_body_is_refused_by_its_length_alone(small: ServerProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer open-sesame\r\n"
    answer = raw(small, head + b"content-length: 104857600\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100000 bytes" in answer


def test_a_body_of_100_mb_without_a_length_is_refused_without_being_kept(small: ServerProcess) -> None:
    before = memory(small)

    def chunks() -> Iterator[bytes]:
        for _ in range(1600):
            yield b" " * 65536

    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", chunks(), KEY, encode_chunked=True)
        assert connection.getresponse().status == 413
    except ConnectionError:
        pass  # the server has hung up while we were sending
    finally:
        connection.close()
    assert memory(small) - before < 50 * 2**20
    assert small.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, KEY)[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"y" * 1_000_000,
        b"\r\n".join(b"x%d: y" % i for i in range(50_000)),
        b"\r\n".join(b"x%d: y" % i for i in range(200)),
    ],
    ids=["long", "many", "some-too-many"],
)
def test_large_headers_are_refused(small: ServerProcess, head: bytes) -> None:
    answer = raw(small, b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
    assert small.get("/health")[0] == 200


def test_a_long_path_is_refused(small: ServerProcess) -> None:
    answer = raw(small, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431")


def test_a_client_that_never_finishes_its_head_or_body_is_cut(small: ServerProcess) -> None:
    assert raw(small, b"GET /health HTTP/1.1\r\nhost:") == b""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer open-sesame\r\ncontent-length: 99\r\n\r\n{"
    )
    assert raw(small, head).startswith(b"HTTP/1.1 408")


def test_bad_lengths_are_refused(small: ServerProcess) -> None:
    for length in (b"-1", b"abc", b"9" * 30):
        answer = raw(small, b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 4")


def test_a_full_queue_is_a_429_with_a_time_to_come_back(small: ServerProcess) -> None:
    done: list[int] = []

    def post() -> None:
        done.append(small.post("/v1/completions", LONG, KEY)[0])

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: running(small) == 8, "eight requests to be open")
    status, body, headers = small.call("POST", "/v1/completions", {**LONG, "stream": True}, KEY)
    for thread in threads:
        thread.join(PATIENCE)
    assert done == [200] * 8
    assert status == 429
    assert int(headers["retry-after"]) > 0
    assert json.loads(body)["error"]["code"] == "queue_full"
    assert small.post("/v1/completions", {**LONG, "n": 9}, KEY)[0] == 400


def running(server: ServerProcess) -> float:
    _, body = server.get("/metrics", KEY)
    lines = body.decode().splitlines()
    names = ("stretto:num_requests_running{", "stretto:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def test_without_clamping_a_large_max_tokens_is_refused_in_exact_numbers(small: ServerProcess) -> None:
    status, answer = small.post("/v1/completions", {"prompt": [5] * 100, "max_tokens": 1000}, KEY)
    assert status == 400
    assert "100 tokens" in answer["error"]["message"]
    assert "1100" in answer["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"


def test_a_reader_that_does_not_read_is_cut_and_its_request_ends(small: ServerProcess) -> None:
    body = json.dumps({**LONG, "n": 4, "logprobs": 20, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer open-sesame\r\ncontent-length: %d\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", small.port))
        connection.sendall(head % len(body) + body)
        wait_until(lambda: running(small) > 0, "the request to run")
        wait_until(lambda: running(small) == 0, "the request to end")
        wait_until(lambda: "POST /v1/completions" in small.log[-1] or small.get("/metrics")[0] == 401, "its log line")
        assert small.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, KEY)[0] == 200


def test_browsers_of_other_origins_are_not_let_in(small: ServerProcess, server: ServerProcess) -> None:
    for origin, allowed in (("http://page.example", True), ("http://evil.example", False)):
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        _, _, headers = small.call("OPTIONS", "/v1/completions", None, preflight)
        assert (headers.get("access-control-allow-origin") == origin) == allowed
    _, _, headers = server.call("GET", "/health", None, {"origin": "http://page.example"})
    assert not any(name.lower().startswith("access-control") for name in headers)


def test_requests_have_ids_and_a_line_in_the_log(small: ServerProcess) -> None:
    headers = {**KEY, "x-request-id": "my-request.1"}
    body = {"prompt": "x", "max_tokens": 3, "user": "someone"}
    _, _, answered = small.call("POST", "/v1/completions", body, headers)
    assert answered["x-request-id"] == "my-request.1"
    wait_until(lambda: "id=my-request.1" in small.text, "the access log")
    (line,) = [line for line in small.log if "id=my-request.1" in line]
    assert '"POST /v1/completions" 200' in line
    assert "output=3 user='someone'" in line
    _, _, answered = small.call("GET", "/health", None, {"x-request-id": 'a"b'})
    assert '"' not in answered["x-request-id"]
    assert "open-sesame" not in small.text
