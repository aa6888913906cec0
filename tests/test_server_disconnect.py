"""However a client leaves, its request ends within a step or two and everything it held is free again."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.helpers.server_process import PATIENCE, ServerProcess, wait_until

LONG = {"model": "tested", "prompt": "the quick", "max_tokens": 900, "temperature": 1.0}


@pytest.fixture(autouse=True)
def baseline(server: ServerProcess) -> Any:
    """Nothing runs before and nothing after."""
    server.wait_until_idle()
    yield
    server.wait_until_idle()


def connect(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """A raw connection on which the request was sent."""
    data = json.dumps(body).encode()
    made = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    made.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return made


def reset(connection: socket.socket) -> None:
    """Close it with a reset instead of an orderly end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_running(server: ServerProcess) -> bool:
    return server.metric("num_requests_running") > 0


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_socket_ends_the_request(
    server: ServerProcess, stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    generated = server.metric("engine_generation_tokens_total")
    connection = connect(server, {**LONG, "stream": stream, "n": 4})
    if stream:
        assert b"200 OK" in connection.recv(100)
    else:
        wait_until(lambda: is_running(server) or server.metric("engine_generation_tokens_total") > generated, "a start")
    leave(connection)
    server.wait_until_idle()
    assert server.metric("engine_generation_tokens_total") - generated < 4 * 900


@pytest.mark.parametrize("way", ["stream.close", "client.close", "break"])
def test_a_client_that_leaves_its_stream_ends_the_request(server: ServerProcess, way: str) -> None:
    generated = server.metric("engine_generation_tokens_total")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    stream = client.completions.create(**LONG, n=4, stream=True)
    next(iter(stream))
    if way == "stream.close":
        stream.close()
    elif way == "client.close":
        client.close()
    else:
        with stream:
            for _ in stream:
                break
    server.wait_until_idle()
    assert server.metric("engine_generation_tokens_total") - generated < 4 * 900
    client.close()


def test_a_client_that_times_out_on_a_whole_answer_ends_the_request(server: ServerProcess) -> None:
    aborted = server.metric("request_success_total")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=0.3)
    with pytest.raises(openai.APITimeoutError), client:
        client.completions.create(**{**LONG, "n": 16})
    server.wait_until_idle()
    assert server.metric("request_success_total") == aborted + 16


def test_requests_that_wait_for_a_slot_end_too(server: ServerProcess) -> None:
    connections = [connect(server, {**LONG, "n": 8, "stream": True}) for _ in range(6)]
    wait_until(lambda: server.metric("num_requests_waiting") > 0, "a queue")
    for connection in connections:
        connection.close()


def test_clients_that_leave_do_not_harm_those_that_stay(server: ServerProcess, client: openai.OpenAI) -> None:
    """Sixty clients read one chunk and vanish in three ways while others are answered as if they were alone."""
    options = {"model": "tested", "prompt": "a fugue", "seed": 6, "max_tokens": 150}
    alone = client.completions.create(**options).choices[0].text
    texts: list[str] = []

    def stay() -> None:
        texts.extend(client.completions.create(**options).choices[0].text for _ in range(4))

    def vanish(number: int) -> None:
        connection = connect(server, {**LONG, "stream": True})
        connection.recv(300)
        if number % 3 == 0:
            reset(connection)
        elif number % 3 == 1:
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    threads = [threading.Thread(target=stay), *(threading.Thread(target=vanish, args=(i,)) for i in range(60))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert texts == [alone] * 4
