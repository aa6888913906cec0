"""Log-probabilities of prompts and answers on every endpoint, as the official client and lm-eval-harness read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from stretto import LLM, SamplingParams
from stretto.request import Logprob
from tests.helpers.server_fixture import CONTEXT
from tests.helpers.server_process import ServerProcess

TEXT = "the quick brown fox, où 日本"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
NEAR = pytest.approx


@pytest.fixture(scope="module")
def offline(dummy_model: Path) -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(str(dummy_model), load_format="dummy", dtype="float32", max_model_len=CONTEXT) as llm:
        yield llm


def rows_of(llm: LLM, prompt: Any, tops: int) -> list[dict[int, Logprob] | None]:
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=tops), use_tqdm=False)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def score_as_a_harness_does(choice: Any, context_length: int) -> tuple[float, bool]:
    """(log-likelihood, is greedy) of what follows the context, from an echo with one token more."""
    logprobs = choice.logprobs.token_logprobs[context_length:-1]
    tops = choice.logprobs.top_logprobs[context_length:-1]
    return sum(logprobs), all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))


def test_a_harness_scores_continuations(client: openai.OpenAI, offline: LLM) -> None:
    """Prompts of token ids, one with the greedy continuation, in one request."""
    context = offline.tokenizer.encode("the quick brown")
    greedy_params = SamplingParams(temperature=0, max_tokens=5)
    (greedy,) = offline.generate([context], greedy_params, use_tqdm=False)
    prompts = [[*context, *greedy.outputs[0].token_ids], [*context, 7, 8, 9, 10]]
    answer = client.completions.create(
        model="tested", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        score, is_greedy = score_as_a_harness_does(choice, len(context))
        rows = rows_of(offline, prompt, 1)
        expected = sum(rows[i][prompt[i]].logprob for i in range(len(context), len(prompt)))  # type: ignore[index]
        assert score == NEAR(expected, abs=1e-4)
        assert is_greedy == (prompt is prompts[0])


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_the_log_probabilities_of_the_prompt(client: openai.OpenAI, offline: LLM, max_tokens: int) -> None:
    ids = offline.tokenizer.encode(TEXT)
    answer = client.completions.create(
        model="tested", prompt=TEXT, temperature=0, max_tokens=max_tokens, logprobs=2, echo=True
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens
    assert answer.usage.prompt_tokens == len(ids)
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert {len(entries) for entries in lists} == {len(ids) + max_tokens}
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    for i, row in enumerate(rows_of(offline, TEXT, 2)):
        assert logprobs.tokens[i] == offline.tokenizer.decode([ids[i]], skip_special_tokens=False)
        if row is not None:
            assert logprobs.token_logprobs[i] == NEAR(row[ids[i]].logprob, abs=1e-4)
            assert max(logprobs.top_logprobs[i].values()) == NEAR(max(e.logprob for e in row.values()), abs=1e-4)
            assert logprobs.tokens[i] in logprobs.top_logprobs[i]
    assert choice.text.startswith(TEXT)
    assert max_tokens or choice.text == TEXT


def assert_offsets_point_into_the_text(choice: Any) -> None:
    """Each token begins where its offset says; the parts of a character where the character does."""
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    whole = 0
    for token, offset in zip(choice.logprobs.tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset : offset + len(token)] == token
            whole += 1
    assert whole > 3


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_point_into_the_text(client: openai.OpenAI, echo: bool) -> None:
    answer = client.completions.create(model="tested", prompt=TEXT, seed=4, max_tokens=30, logprobs=1, echo=echo)
    choice = answer.choices[0]
    if echo:
        assert_offsets_point_into_the_text(choice)
        assert any(token == "\ufffd" for token in choice.logprobs.tokens)
    else:
        assert choice.logprobs.text_offset[0] == 0
        assert_offsets_point_into_the_text(choice)


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_streamed_echo_is_the_whole_one_in_parts(client: openai.OpenAI, max_tokens: int) -> None:
    options: dict[str, Any] = {
        "model": "tested", "prompt": [TEXT, "fox"], "n": 2, "seed": 3, "max_tokens": max_tokens, "logprobs": 1,
        "echo": True,
    }  # fmt: skip
    whole = client.completions.create(**options)
    texts, tokens, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]  # type: ignore[var-annotated]
    reasons: list[str | None] = [None] * 4
    usage = None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                tokens[choice.index] += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
                offsets[choice.index] += choice.logprobs.text_offset
    for index, choice in enumerate(whole.choices):
        assert texts[index] == choice.text
        assert reasons[index] == choice.finish_reason == "length"
        assert [token for token, _ in tokens[index]] == choice.logprobs.tokens
        assert [value for _, value in tokens[index]][1:] == NEAR(choice.logprobs.token_logprobs[1:], abs=1e-4)
        assert offsets[index] == choice.logprobs.text_offset
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 4 * max_tokens


def test_max_tokens_0_echoes_without_log_probabilities_too(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tested", prompt=TEXT, max_tokens=0, echo=True).choices[0]
    assert (choice.text, choice.logprobs, choice.finish_reason) == (TEXT, None, "length")
    chunks = list(client.completions.create(model="tested", prompt=TEXT, max_tokens=0, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0") as caught:
        client.completions.create(model="tested", prompt=TEXT, max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_prompt_logprobs_have_a_field_of_their_own(server: ServerProcess, offline: LLM) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "prompt_logprobs": 2, "n": 2, "seed": 1}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    expected = rows_of(offline, TEXT, 2)
    for choice in answer["choices"]:
        assert choice["logprobs"] is None
        assert_scores(choice["prompt_logprobs"], expected)
    (prompt,) = [
        output.prompt_token_ids for output in offline.chat(MESSAGES, SamplingParams(max_tokens=1), use_tqdm=False)
    ]
    chat = {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0}
    status, answer = server.post("/v1/chat/completions", chat)
    assert status == 200, answer
    assert_scores(answer["prompt_logprobs"], rows_of(offline, prompt, 0))
    _, plain = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
    assert "prompt_logprobs" not in plain


def assert_scores(found: list[Any], expected: list[dict[int, Logprob] | None]) -> None:
    assert len(found) == len(expected)
    assert found[0] is None
    for row, other in zip(found[1:], expected[1:], strict=True):
        assert other is not None
        assert row.keys() == {str(token_id) for token_id in other}
        for token_id, entry in other.items():
            told = row[str(token_id)]
            assert told["logprob"] == NEAR(entry.logprob, abs=1e-4)
            assert (told["rank"], told["decoded_token"]) == (entry.rank, entry.decoded_token)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "fox", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "fox", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "fox", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "fox", "echo": True, "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": [[5] * 900] * 40, "n": 4, "echo": True, "logprobs": 20}, "logprobs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/responses", {"input": "fox", "top_logprobs": 1}, "top_logprobs"),
        ("/v1/responses", {"input": "fox", "include": ["message.output_text.logprobs"], "top_logprobs": 21}, None),
        ("/v1/responses", {"input": "fox", "include": ["reasoning.encrypted_content"]}, "include[0]"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(
    server: ServerProcess, path: str, fields: dict[str, Any], param: str | None
) -> None:
    status, answer = server.post(path, fields)
    assert status == 400, answer
    assert param is None or answer["error"]["param"] == param


def test_the_largest_prompt_comes_with_all_its_log_probabilities(client: openai.OpenAI) -> None:
    prompt = [5 + i % 300 for i in range(CONTEXT - 1)]
    choice = client.completions.create(model="tested", prompt=prompt, max_tokens=0, logprobs=20, echo=True).choices[0]
    assert len(choice.logprobs.token_logprobs) == CONTEXT - 1
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs[1:])


# -- cached tokens --------------------------------------------------------------------------------------------------


def test_cached_tokens_are_told_whatever_ends_the_answer(client: openai.OpenAI) -> None:
    """By length, by a stop string, streamed too; and none where the prompt's log-probabilities need computing."""
    prompt = [11 + i % 50 for i in range(200)]
    options: dict[str, Any] = {"model": "tested", "prompt": prompt, "seed": 2, "max_tokens": 100}
    free = client.completions.create(**options).choices[0].text
    stop = next(free[i : i + 2] for i in range(4, len(free)) if free[i : i + 2].isascii())
    by_length = client.completions.create(**options).usage.prompt_tokens_details.cached_tokens
    assert by_length >= 128
    stopped = client.completions.create(**options, stop=stop)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.prompt_tokens_details.cached_tokens == by_length
    *_, last = client.completions.create(**options, stop=stop, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == by_length
    scored = client.completions.create(**{**options, "max_tokens": 1}, echo=True, logprobs=0)
    assert scored.usage.prompt_tokens_details.cached_tokens == 0


# -- answers --------------------------------------------------------------------------------------------------------


def test_responses_have_the_log_probabilities_of_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tested", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3, max_tokens=12
    ).choices[0]
    options: dict[str, Any] = {
        "model": "tested", "input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 12,
        "include": ["message.output_text.logprobs"], "top_logprobs": 3,
    }  # fmt: skip
    whole = client.responses.create(**options)
    told = whole.output[0].content[0].logprobs
    assert whole.top_logprobs == 3
    assert [entry.model_dump() for entry in told] == near_dumps(chat.logprobs.content)
    events = list(client.responses.create(**options, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [entry for event in deltas for entry in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    for entries in (streamed, done.logprobs):
        assert [entry.token for entry in entries] == [entry.token for entry in told]
        assert [entry.logprob for entry in entries] == NEAR([entry.logprob for entry in told], abs=1e-4)
        assert {len(entry.top_logprobs) for entry in entries} == {3}
        assert all("bytes" not in entry.model_dump() for entry in entries)
    final = events[-1].response.output[0].content[0].logprobs
    assert [entry.bytes for entry in final] == [entry.bytes for entry in told]


def near_dumps(entries: list[Any]) -> list[Any]:
    """What chat told, with numbers that may differ in their last digits."""

    def near(entry: dict[str, Any]) -> dict[str, Any]:
        return {name: NEAR(value, abs=1e-4) if name == "logprob" else value for name, value in entry.items()}

    dumps = [entry.model_dump() for entry in entries]
    return [{**near(dump), "top_logprobs": [near(top) for top in dump["top_logprobs"]]} for dump in dumps]


def test_responses_that_do_not_ask_have_none(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tested", input="fox", max_output_tokens=3)
    assert whole.output[0].content[0].logprobs == []


def test_an_answer_with_log_probabilities_may_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="tested", input="fox", max_output_tokens=3, include=["message.output_text.logprobs"]
    )
    message = first.output[0].model_dump(exclude_none=True)
    follow_up = [{"role": "user", "content": "fox"}, message, {"role": "user", "content": "more"}]
    assert client.responses.create(model="tested", input=follow_up, max_output_tokens=3).output_text
