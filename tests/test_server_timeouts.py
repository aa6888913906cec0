"""A request that takes too long ends by the engine's own clock: 504, or an error as the stream's last event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server_process import ServerProcess


@pytest.fixture(scope="module")
def hasty(dummy_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(dummy_model, "--request-timeout", "0.3", "--max-model-len", "8192") as running:
        yield running


ENDLESS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 8000, "n": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8000, "n": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 8000},
}


def count(server: ServerProcess, reason: str) -> float:
    _, body = server.get("/metrics")
    lines = [line for line in body.decode().splitlines() if f'finished_reason="{reason}"' in line]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.parametrize("path", ENDLESS)
def test_a_request_that_takes_too_long_is_a_504_and_counted_as_such(hasty: ServerProcess, path: str) -> None:
    before = count(hasty, "timeout"), count(hasty, "abort")
    status, answer = hasty.post(path, ENDLESS[path])
    assert (status, answer["error"]["code"]) == (504, "timeout")
    hasty.wait_until_idle()
    assert (count(hasty, "timeout"), count(hasty, "abort")) == (before[0] + ENDLESS[path].get("n", 1), before[1])


@pytest.mark.parametrize("path", ENDLESS)
def test_a_stream_that_takes_too_long_ends_with_the_error(hasty: ServerProcess, path: str) -> None:
    status, body, _ = hasty.call("POST", path, {**ENDLESS[path], "stream": True})
    assert status == 200
    assert b"[DONE]" not in body
    *events, last = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: ")]
    assert len(events) > 3
    assert "the request took too long" in json.dumps(last)
    assert not any(choice["finish_reason"] for event in events for choice in event.get("choices", ()))
    hasty.wait_until_idle()


def test_requests_that_are_quick_enough_are_answered(hasty: ServerProcess) -> None:
    assert hasty.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
