"""The official openai client, unmodified, finds what it expects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from stretto import LLM, SamplingParams
from tests.helpers.server_fixture import CONTEXT
from tests.helpers.server_process import ServerProcess

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def offline(dummy_model: Path) -> Iterator[LLM]:
    """The same model in this process: what the server must answer."""
    with LLM(str(dummy_model), load_format="dummy", dtype="float32", max_model_len=CONTEXT) as llm:
        yield llm


def test_a_chat_answer_is_the_offline_answer(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    (expected,) = offline.chat(MESSAGES, params, use_tqdm=False)
    answer = client.chat.completions.create(
        model="tested", messages=MESSAGES, temperature=0.8, seed=5, max_completion_tokens=40
    )
    (choice,) = answer.choices
    assert choice.message.content == expected.outputs[0].text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 40
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.model == "tested"


def test_a_stream_gives_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    for seed in range(8):
        options = {"model": "tested", "messages": MESSAGES, "seed": seed, "max_tokens": 60, "stop": ["a", "fox"]}
        whole = client.chat.completions.create(**options).choices[0]
        chunks = list(client.chat.completions.create(**options, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tested", messages=MESSAGES, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 7


def test_penalties_and_biases_are_those_of_the_engine(client: openai.OpenAI, offline: LLM) -> None:
    """Each is sent as clients send it and gives what the Python API gives; all of them change the answer."""
    options: list[dict[str, Any]] = [
        {},
        {"presence_penalty": -2.0, "frequency_penalty": -1.0},
        {"logit_bias": {"5": 100, "6": 99.5}, "frequency_penalty": 0.3},
        {"repetition_penalty": 3.0},
    ]
    texts = set()
    for fields in options:
        params = SamplingParams(temperature=0, max_tokens=24, **fields)
        (expected,) = offline.generate(["the lazy dog"], params, use_tqdm=False)
        sent = {"extra_body": fields} if "repetition_penalty" in fields else fields
        answer = client.completions.create(model="tested", prompt="the lazy dog", temperature=0, max_tokens=24, **sent)
        assert answer.choices[0].text == expected.outputs[0].text
        texts.add(answer.choices[0].text)
    assert len(texts) == len(options)


def test_n_samples_are_independent_and_ordered_as_offline(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate(["the lazy dog"], SamplingParams(n=3, seed=9, max_tokens=20), use_tqdm=False)
    answer = client.completions.create(model="tested", prompt="the lazy dog", n=3, seed=9, max_tokens=20)
    assert [choice.text for choice in answer.choices] == [sample.text for sample in expected.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens == 60


def test_streamed_samples_are_told_apart_by_their_index(client: openai.OpenAI) -> None:
    options = {"model": "tested", "prompt": ["a fugue", [5, 6, 7]], "n": 2, "seed": 1, "max_tokens": 12}
    whole = client.completions.create(**options)
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_prompts_may_be_texts_ids_or_lists_of_either(client: openai.OpenAI, offline: LLM) -> None:
    ids = offline.tokenizer.encode("over the dog")
    answers = [
        client.completions.create(model="tested", prompt=prompt, temperature=0, max_tokens=9)
        for prompt in ("over the dog", ids, ["over the dog"], [ids], [ids, "over the dog"])
    ]
    texts = {choice.text for answer in answers for choice in answer.choices}
    assert len(texts) == 1
    assert len(answers[-1].choices) == 2


def test_chat_logprobs_are_those_of_the_engine(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.chat(MESSAGES, SamplingParams(temperature=0, logprobs=3, max_tokens=10), use_tqdm=False)
    answer = client.chat.completions.create(
        model="tested", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3, max_tokens=10
    )
    content = answer.choices[0].logprobs.content
    rows = expected.outputs[0].logprobs
    assert rows is not None
    for token_id, row, entry in zip(expected.outputs[0].token_ids, rows, content, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].logprob)
        assert bytes(entry.bytes) == offline.tokenizer.token_bytes(token_id)
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(max(other.logprob for other in row.values()))


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    options = {
        "model": "tested",
        "messages": MESSAGES,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 15,
    }
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole


def test_completion_logprobs_have_a_place_in_the_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tested", prompt="fox", logprobs=2, seed=4, max_tokens=12).choices[0]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 12
    for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert token in top
        assert len(top) <= 3
    assert choice.logprobs.text_offset[0] == 0
    assert max(choice.logprobs.text_offset) <= len(choice.text)


def test_echo_puts_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    options = {"model": "tested", "prompt": "jumps over", "temperature": 0, "max_tokens": 5}
    plain = client.completions.create(**options).choices[0].text
    assert client.completions.create(**options, echo=True).choices[0].text == "jumps over" + plain
    chunks = client.completions.create(**options, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "jumps over" + plain


def test_a_stop_string_ends_the_answer_and_is_named(client: openai.OpenAI) -> None:
    free = client.completions.create(model="tested", prompt="fox", seed=2, max_tokens=200).choices[0].text
    stop = next(free[i : i + 2] for i in range(10, len(free)) if free[i : i + 2].isascii())
    options = {"model": "tested", "prompt": "fox", "seed": 2, "max_tokens": 200, "stop": stop}
    choice = client.completions.create(**options).choices[0]
    assert choice.text == free[: free.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == stop
    kept = client.completions.create(**options, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == free[: free.index(stop)] + stop


def test_the_extensions_reach_the_sampler(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(seed=8, top_k=3, min_p=0.01, max_tokens=25, min_tokens=4, stop_token_ids=[40, 41, 42])
    (expected,) = offline.generate(["fox"], params, use_tqdm=False)
    answer = client.completions.create(
        model="tested",
        prompt="fox",
        seed=8,
        max_tokens=25,
        extra_body={"top_k": 3, "min_p": 0.01, "min_tokens": 4, "stop_token_ids": [40, 41, 42], "priority": 3},
    )
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason


def test_template_variables_and_continuation_reach_the_chat_template(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the quick"}]
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": {"x": 1}}
    _, going_on = server.post("/v1/chat/completions", {**body, "continue_final_message": True})
    _, answering = server.post("/v1/chat/completions", body)
    assert going_on["usage"]["prompt_tokens"] < answering["usage"]["prompt_tokens"]


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tested"]
    assert client.models.retrieve("tested").id == "tested"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_errors_are_the_clients_exception_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="top_p") as wrong:
        client.chat.completions.create(model="tested", messages=MESSAGES, top_p=7)
    assert wrong.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model="tested", prompt="fox " * 3000)


def test_responses_are_answered_whole_and_as_events(client: openai.OpenAI) -> None:
    options = {
        "model": "tested",
        "instructions": "be brief",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "max_output_tokens": 20,
        "temperature": 0,
        "metadata": {"a": "b"},
    }
    whole = client.responses.create(**options)
    assert whole.output_text
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 20
    assert whole.metadata == {"a": "b"}
    events = list(client.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


def test_responses_stream_helper_collects_a_complete_answer(client: openai.OpenAI) -> None:
    stops = {"stop": list("aeioutnsrhldcumfpgwybvkxjqz")}
    with client.responses.stream(model="tested", input="hello", max_output_tokens=500, extra_body=stops) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas)


def test_tokens_go_back_to_their_text(server: ServerProcess) -> None:
    status, answer = server.post("/tokenize", {"prompt": "où ça? 日本"})
    assert status == 200
    assert answer["count"] == len(answer["tokens"])
    assert server.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "où ça? 日本"})
    status, chat = server.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    assert "".join(chat["token_strs"]) == "<|user|>the quick brown fox\n<|assistant|>"
