"""Large bodies below every limit do not keep a front end from answering others."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.helpers.server_process import PATIENCE, ServerProcess

WORDS = "one two three " * 280
BODIES: dict[str, tuple[str, Any]] = {
    "texts": ("/v1/completions", {"prompt": [WORDS] * 800, "max_tokens": 1}),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a few words " * 8}] * 4096}),
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES.keys())
def test_others_are_answered_while_a_large_body_is_worked_on(server: ServerProcess, path: str, body: Any) -> None:
    data = json.dumps(body).encode()
    # Several times, as a busy machine may give none of it to whoever asks meanwhile.
    assert max(_answered_meanwhile(server, path, data) for _ in range(4)) > 3


def _answered_meanwhile(server: ServerProcess, path: str, data: bytes) -> int:
    """Requests that were answered while the body was worked on."""
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(server.post(path, data)))
    thread.start()
    meanwhile = 0
    while not answers:
        assert server.get("/live")[0] == 200
        meanwhile += not answers
    thread.join(PATIENCE)
    assert answers[0][0] in (200, 400)
    return meanwhile


def test_more_prompts_than_there_is_room_for_are_refused_before_they_are_read(server: ServerProcess) -> None:
    status, answer = server.post("/v1/completions", {"prompt": [WORDS] * 2000 + [{"not": "a prompt"}]})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "2001 samples" in answer["error"]["message"]


def test_too_many_token_ids_are_refused_by_their_number(server: ServerProcess) -> None:
    for prompt in ([7] * 10**6 + [-1], [[7, 8], [7] * 10**6 + [-1]]):
        status, answer = server.post("/v1/completions", {"prompt": prompt})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_no_objects_are_made_of_what_is_refused(server: ServerProcess) -> None:
    tools = b"[" + b",".join([b"{}"] * 10**6) + b"]"
    body = b'{"messages": [{"role": "user", "content": "hi"}], "tools": ' + tools + b"}"
    status, answer = server.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "tools", "unsupported_parameter")
