"""Every field either works or is refused with a 400 that names it; nothing is accepted and ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stretto.errors import InvalidRequest
from stretto.request import SamplingParams
from stretto.server.protocol import chat, completions, responses
from tests.helpers.server_process import ServerProcess

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
COMPLETION = {"prompt": "hi", "max_tokens": 1}
RESPONSES = {"input": "hi", "max_output_tokens": 1}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSES}


def refusal(server: ServerProcess, path: str, **fields: Any) -> dict[str, Any]:
    """The error that a request with these fields gets; it must be a 400."""
    status, answer = server.post(path, {**PATHS[path], **fields})
    assert status == 400, answer
    error: dict[str, Any] = answer["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("prompt", ["", [[]], ["a", ""]], ids=str)
def test_an_empty_prompt_is_refused_as_one(server: ServerProcess, prompt: Any) -> None:
    error = refusal(server, "/v1/completions", prompt=prompt)
    assert (error["param"], error["message"]) == ("prompt", "the prompt is empty: it needs at least one token")


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_what_top_p_may_be_is_told_alike_for_all_that_it_may_not(value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"top_p is {value}; allowed: a number above 0 and up to 1"):
        SamplingParams(top_p=value)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (path, field)
        for path, fields in zip(PATHS, (chat.NOT_BUILT, completions.NOT_BUILT, responses.NOT_BUILT), strict=True)
        for field in fields
    ],
)
def test_fields_that_are_not_built_are_refused_by_name(server: ServerProcess, path: str, field: str) -> None:
    error = refusal(server, path, **{field: ["something"]})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    status, _ = server.post(path, {**PATHS[path], field: None})
    assert status == 200


@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_refused_with_a_hint(server: ServerProcess, path: str) -> None:
    error = refusal(server, path, temprature=0.5)
    assert error["param"] == "temprature"
    assert "did you mean 'temperature'" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", True),
        ("min_p", 2),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["x"] * 33),
        ("stop", [1]),
        ("stop", ["y" * 1025]),
        ("presence_penalty", 3),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("logit_bias", {"AI": -100}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", dict.fromkeys(map(str, range(301)), 1)),
        ("logit_bias", [5]),
        ("min_tokens", -1),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [400]),
        ("stop_token_ids", list(range(17))),
        ("priority", "high"),
        ("user", 5),
        ("stream", "yes"),
    ],
)
def test_bad_values_of_shared_fields_are_refused_by_name(
    server: ServerProcess, path: str, field: str, value: Any
) -> None:
    assert field in refusal(server, path, **{field: value})["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "messages", []),
        ("/v1/chat/completions", "messages", "hi"),
        ("/v1/chat/completions", "messages", [{"role": "king", "content": "hi"}]),
        ("/v1/chat/completions", "messages", [{"role": "user"}]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "hi", "extra": 1}]),
        ("/v1/chat/completions", "top_logprobs", 3),
        ("/v1/chat/completions", "max_tokens", 0),
        ("/v1/chat/completions", "max_completion_tokens", 7),
        ("/v1/chat/completions", "n", 0),
        ("/v1/chat/completions", "n", 129),
        ("/v1/chat/completions", "stream_options", {"include_usage": True, "more": 1}),
        ("/v1/chat/completions", "chat_template_kwargs", {"chat_template": "x"}),
        ("/v1/completions", "prompt", ""),
        ("/v1/completions", "prompt", []),
        ("/v1/completions", "prompt", [[]]),
        ("/v1/completions", "prompt", [400]),
        ("/v1/completions", "prompt", [-1]),
        ("/v1/completions", "prompt", [1.5]),
        ("/v1/completions", "prompt", [True]),
        ("/v1/completions", "prompt", ["a", 1]),
        ("/v1/completions", "prompt", {"a": 1}),
        ("/v1/completions", "prompt", "\ud800"),
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "logprobs", 21),
        ("/v1/completions", "logprobs", True),
        ("/v1/responses", "input", []),
        ("/v1/responses", "input", [{"type": "function_call", "role": "user", "content": "x"}]),
        ("/v1/responses", "max_output_tokens", 0),
        ("/v1/responses", "include", ["message.output_text.logprobs", "file_search_call.results"]),
    ],
)
def test_bad_values_are_refused(server: ServerProcess, path: str, field: str, value: Any) -> None:
    refusal(server, path, **{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False},
        {"modalities": ["text"], "service_tier": "auto", "user": "me", "n": 1, "logprobs": False},
        {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y", "name": "z"}]},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]},
        {"max_tokens": 10**9, "stop": ["e"]},
        {"max_tokens": None, "stop": list("aeiou")},
    ],
)
def test_harmless_values_are_taken(server: ServerProcess, fields: dict[str, Any]) -> None:
    status, answer = server.post("/v1/chat/completions", {**CHAT, **fields})
    assert status == 200, answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt":' * 20_000,
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        json.dumps({"prompt": "x", "seed": 10**400}).encode(),
    ],
    ids=range(11),
)
def test_bodies_that_are_no_request_are_refused(server: ServerProcess, body: bytes) -> None:
    status, answer = server.post("/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["message"]


def test_unknown_paths_and_methods_are_refused_in_the_same_form(server: ServerProcess) -> None:
    assert server.post("/v1/nothing", {})[0] == 404
    status, body = server.get("/v1/completions")
    assert status == 405
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_context_that_is_too_short_is_told_in_exact_numbers(server: ServerProcess) -> None:
    message = refusal(server, "/v1/completions", prompt=[7] * 1024)["message"]
    assert "1024 tokens" in message
    assert "1023" in message
