"""Every 400 names its field in `param`: of all fields of all endpoints, bad values and their lack."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.server.endpoints_service import DetokenizeRequest, TokenizeRequest
from stretto.server.protocol.chat import ChatRequest
from stretto.server.protocol.completions import CompletionRequest
from stretto.server.protocol.responses import ResponsesRequest
from tests.helpers.server_fixture import CONTEXT
from tests.helpers.server_process import ServerProcess

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [5]},
}
KINDS = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
LONG_TEXT = "one two three four " * CONTEXT
VAST_TEXT = "x" * 10**6
BAD: dict[str, list[Any]] = {
    "model": [5],
    "messages": [
        *([], "hi", 5, [5], [{"role": "user"}], [{"content": "hi"}], [{"role": "king", "content": "hi"}]),
        *([{**MESSAGES[0], "extra": 1}], [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        *([{"role": "user", "content": LONG_TEXT}], [{"role": "user", "content": VAST_TEXT}]),
    ],
    "prompt": [5, VAST_TEXT],
    "input": [5, [], [{"role": "user"}], [{"type": "function_call", "role": "user", "content": "x"}], LONG_TEXT],
    "tokens": ["x", [-1], [400], [1.5]],
    "instructions": [5],
    "metadata": [{"a": 1}, {"a": "b" * 513}, "x"],
    "include": ["x", ["file_search_call.results"]],
    "temperature": [-0.1, "hot", True, 1e31],
    "top_p": [-0.1, 1.5, "x"],
    "stream": ["yes", 1],
    "user": [5],
    "top_k": [-2, True, 2**31],
    "min_p": [2, -1],
    "seed": [2**63, 1.5],
    "stop": ["", ["x"] * 33, [1], ["y" * 1025], 5],
    "presence_penalty": [3, -3, "x"],
    "frequency_penalty": [3, "much"],
    "repetition_penalty": [0, -1],
    "logit_bias": [
        {"a": 1},
        {"5": 101},
        {"5": "x"},
        {"999999": 1},
        dict.fromkeys(map(str, range(301)), 1),
        {"5": 1, "05": 2},
        [5],
    ],
    "min_tokens": [-1, 2],
    "ignore_eos": [1],
    "stop_token_ids": [[-1], [400], list(range(17)), 5],
    "skip_special_tokens": [1],
    "include_stop_str_in_output": ["x"],
    "priority": ["high", 2**31],
    "max_tokens": [-1, 1.5, "x"],
    "max_completion_tokens": [0, 7],
    "max_output_tokens": [0, "x"],
    "n": [0, 129, 1.5],
    "best_of": [0, 2],
    "echo": [1],
    "stream_options": [5, {"include_usage": True, "more": 1}, {"include_usage": 1}, {"include_usage": True}],
    "logprobs": [5.5, "x"],
    "top_logprobs": [-1, 3, "x"],
    "prompt_logprobs": [-1, 21, "x"],
    "add_generation_prompt": [1],
    "continue_final_message": [1],
    "chat_template_kwargs": [5, {"chat_template": "x"}, {"a b": 1}],
    "add_special_tokens": [1],
    "return_token_strs": [1],
}
"""Values that no endpoint takes."""
ALSO_BAD: dict[tuple[str, str], list[Any]] = {
    (CHAT, "max_tokens"): [0],
    (COMPLETIONS, "max_tokens"): [0],
    (COMPLETIONS, "prompt"): [
        *("", [], [[]], [400], [-1], [1.5], [True], ["a", 1], {"a": 1}, [7] * CONTEXT, LONG_TEXT, ["a", [400]]),
    ],
    (COMPLETIONS, "logprobs"): [21, True],
    (CHAT, "messages"): [MESSAGES * 2000],
    (TOKENIZE, "add_generation_prompt"): [True, False],  # of a plain prompt
}


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path in KINDS for field in KINDS[path].__struct_fields__]
)
def test_a_bad_value_is_refused_with_its_field_as_param(server: ServerProcess, path: str, field: str) -> None:
    for value in BAD[field] + ALSO_BAD.get((path, field), []):
        body = {**GOOD[path], field: value}
        if field == "messages" and path == TOKENIZE:
            if "content" in str(value) and len(str(value)) > 1000:
                continue  # may be as long as it likes
            del body["prompt"]
        status, answer = server.post(path, body)
        assert status == 400, (value, answer)
        error = answer["error"]
        named = str(error["param"]).replace("[", ".").split(".")[0]
        assert named == field, error
        assert error["type"] == "invalid_request_error"
        assert "$" not in error["message"], error


@pytest.mark.parametrize(
    ("path", "param"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input"), (DETOKENIZE, "tokens")]
)
def test_a_field_that_is_missing_is_named(server: ServerProcess, path: str, param: str) -> None:
    status, answer = server.post(path, {})
    assert (status, answer["error"]["param"]) == (400, param)
    status, answer = server.post(path, {**GOOD[path], "temprature": 0.5})
    assert (status, answer["error"]["param"]) == (400, "temprature")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": [7] * 900, "n": 128, "echo": True, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"prompt": [7] * 900, "n": 128, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [7, 8], "add_special_tokens": True}, "add_special_tokens"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"stream_options": {}}, "stream_options"),
        (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (TOKENIZE, {"prompt": None, "messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        (TOKENIZE, {"messages": MESSAGES}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_the_field_is_named_as_the_endpoint_calls_it(
    server: ServerProcess, path: str, fields: dict[str, Any], param: str
) -> None:
    status, answer = server.post(path, {**GOOD[path], **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize("text", [LONG_TEXT, VAST_TEXT], ids=["tokens", "characters"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(
    server: ServerProcess, text: str, stream: bool
) -> None:
    for path, fields in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["short", text]}),
        (RESPONSES, {"input": text}),
    ):
        status, answer = server.post(path, {**GOOD[path], **fields, "stream": stream})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_nucleus_of_nothing_takes_the_likeliest_token(server: ServerProcess) -> None:
    greedy = server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 12, "temperature": 0})[1]["choices"][0]["text"]
    for seed in range(3):
        options = {"prompt": "hi", "max_tokens": 12, "temperature": 1.9, "top_p": 0, "seed": seed}
        assert server.post(COMPLETIONS, options)[1]["choices"][0]["text"] == greedy


@pytest.mark.parametrize("value", [True, False, None])
def test_parallel_calls_of_no_tools_are_harmless(server: ServerProcess, value: bool | None) -> None:
    for path in (CHAT, RESPONSES):
        assert server.post(path, {**GOOD[path], "parallel_tool_calls": value})[0] == 200
