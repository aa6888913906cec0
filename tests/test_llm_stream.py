"""LLM.stream and stop strings: streamed or not, the answer is the same to the byte, and leaving a stream ends it."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from stretto import LLM, InvalidRequest, RequestOutput, SamplingParams
from stretto.detokenizer import IncrementalDetokenizer
from stretto.request import CompletionOutput
from tests.helpers.llm_fixture import assert_idle, llm, shared_llm

__all__ = ["llm", "shared_llm"]

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def sampled(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 120, "ignore_eos": True, **changes})


def whole(deltas: Sequence[RequestOutput], index: int = 0) -> CompletionOutput:
    """One sample put together again from its parts."""
    parts = [sample for delta in deltas for sample in delta.outputs if sample.index == index]
    logprobs = [step for part in parts for step in part.logprobs or ()]
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        cumulative_logprob=parts[-1].cumulative_logprob,
        logprobs=logprobs if parts[-1].logprobs is not None else None,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


def answer(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_adds_up_to_the_answer(llm: LLM, seed: int) -> None:
    params = sampled(seed, n=2, logprobs=2, ignore_eos=seed % 2 == 0)
    expected = llm.generate("the fox", params, use_tqdm=False)[0].outputs
    deltas = list(llm.stream("the fox", params))
    assert [whole(deltas, index) for index in (0, 1)] == expected
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) > 10
    assert len({delta.request_id for delta in deltas}) == 1


def test_text_is_shown_as_soon_as_its_characters_are_complete(llm: LLM) -> None:
    ids: list[int] = []
    shown = ""
    for delta in llm.stream("the", sampled(3)):
        ids += delta.outputs[0].token_ids
        shown += delta.outputs[0].text
        decoded = llm.tokenizer.decode(ids)
        assert decoded.startswith(shown)
        assert len(decoded) - len(shown) <= 1  # one character that is not complete yet


def expected_with_stop(llm: LLM, ids: list[int], stops: Sequence[str], include: bool) -> tuple[str, int, str | None]:
    """Text, number of tokens and the stop string, by looking at the whole text after each token."""
    detokenizer = IncrementalDetokenizer(llm.tokenizer)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push([token_id])
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, _, stop = min(ends)
            return text[: end if include else end - len(stop)], count, stop
    return text + detokenizer.finish(), len(ids), None


@pytest.mark.parametrize("seed", range(8))
def test_stop_strings_end_the_answer_alike_streamed_and_not(llm: LLM, seed: int) -> None:
    full = answer(llm, "the fox", sampled(seed, max_tokens=80))
    text = full.text
    stop_sets = [
        [text[20:23]],
        [text[10:12], text[40:45]],
        [text[5]],
        [text[30:60]],
        [text[20:24], text[21:24]],
        ["\0no"],
    ]
    params = [sampled(seed, max_tokens=80, stop=stops, include_stop_str_in_output=seed % 2 == 1) for stops in stop_sets]
    outputs = llm.generate(["the fox"] * len(params), params, use_tqdm=False)
    for stops, entry, output in zip(stop_sets, params, outputs, strict=True):
        sample = output.outputs[0]
        expected, count, stop = expected_with_stop(llm, full.token_ids, stops, entry.include_stop_str_in_output)
        assert (sample.text, sample.stop_reason) == (expected, stop)
        assert sample.token_ids == full.token_ids[:count]
        assert sample.finish_reason == ("length" if stop is None else "stop")
        assert whole(list(llm.stream("the fox", entry))) == sample


def test_nothing_of_a_stop_string_is_ever_streamed(llm: LLM) -> None:
    text = answer(llm, "the fox", sampled(1)).text
    stop = text[30:45]
    shown = ""
    for delta in llm.stream("the fox", sampled(1, stop=[stop])):
        shown += delta.outputs[0].text
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)]


def test_a_stop_string_on_the_last_token_wins_over_the_length(llm: LLM) -> None:
    full = answer(llm, "the fox", sampled(2, max_tokens=40))
    detokenizer = IncrementalDetokenizer(llm.tokenizer)
    texts = [detokenizer.push([token_id]) for token_id in full.token_ids]
    last = max(i for i, text in enumerate(texts) if text and "".join(texts[:i]).count(text[-1]) == 0)
    params = sampled(2, max_tokens=last + 1, stop=texts[last][-1])
    for sample in (answer(llm, "the fox", params), whole(list(llm.stream("the fox", params)))):
        assert (sample.finish_reason, sample.stop_reason) == ("stop", texts[last][-1])
        assert sample.token_ids == full.token_ids[: last + 1]


def test_a_stop_string_leaves_exactly_its_tokens_logprobs(llm: LLM) -> None:
    text = answer(llm, "the fox", sampled(4)).text
    for sample in (
        answer(llm, "the fox", sampled(4, stop=text[20:23], logprobs=1)),
        whole(list(llm.stream("the fox", sampled(4, stop=text[20:23], logprobs=1)))),
    ):
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)


def test_stop_strings_count_after_min_tokens(llm: LLM) -> None:
    full = answer(llm, "the fox", sampled(5, max_tokens=80))
    stop = full.text[3]
    sample = answer(llm, "the fox", sampled(5, max_tokens=80, min_tokens=30, stop=stop))
    skipped = llm.tokenizer.decode(full.token_ids[:30])
    assert len(sample.token_ids) > 30
    assert sample.text.startswith(skipped.rstrip("�"))
    assert stop not in sample.text[len(skipped) :]


def test_streams_side_by_side_each_give_their_own_answer(llm: LLM) -> None:
    params = [sampled(seed, max_tokens=30 + 10 * seed) for seed in range(4)]
    expected = [answer(llm, [3, seed], entry) for seed, entry in enumerate(params)]
    streams = {seed: llm.stream([3, seed], entry) for seed, entry in enumerate(params)}
    deltas: dict[int, list[RequestOutput]] = {seed: [] for seed in streams}
    in_between = None
    while streams:
        for seed, stream in list(streams.items()):
            deltas[seed].append(next(stream))
            if deltas[seed][-1].finished:
                del streams[seed]
        in_between = in_between or answer(llm, [3, 0], params[0])
    assert [whole(deltas[seed]) for seed in range(4)] == expected
    assert in_between == expected[0]


def test_a_bad_prompt_is_refused_when_the_stream_is_made(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        llm.stream([-1])
    with pytest.raises(InvalidRequest, match="empty"):
        llm.stream("")


def leave_by_close(llm: LLM) -> None:
    stream = llm.stream("the fox", LONG)
    next(stream)
    stream.close()


def leave_by_forgetting(llm: LLM) -> None:
    for _ in llm.stream("the fox", LONG):
        break
    gc.collect()


def leave_by_exception(llm: LLM) -> None:
    stream = llm.stream("the fox", LONG)
    next(stream)
    with pytest.raises(KeyError):
        stream.throw(KeyError())


def leave_unstarted(llm: LLM) -> None:
    llm.stream("the fox", LONG)


def leave_in_another_thread(llm: LLM) -> None:
    stream = llm.stream("the fox", LONG)
    next(stream)
    thread = threading.Thread(target=stream.close)
    thread.start()
    thread.join()


def leave_by_ctrl_c(llm: LLM) -> None:
    def interrupt_in_the_middle() -> None:
        for count, _ in enumerate(llm.stream("the fox", LONG)):
            if count == 5:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_in_the_middle()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_close,
        leave_by_forgetting,
        leave_by_exception,
        leave_unstarted,
        leave_in_another_thread,
        leave_by_ctrl_c,
    ],
)
def test_leaving_a_stream_ends_its_request_at_once(llm: LLM, leave: Any) -> None:
    expected = answer(llm, "the", sampled(9, max_tokens=20))
    before = llm.stats().output_tokens
    leave(llm)
    assert_idle(llm)
    assert llm.stats().output_tokens - before < 100  # of 200
    assert answer(llm, "the", sampled(9, max_tokens=20)) == expected


def test_a_hundred_streams_left_early_leave_nothing_behind(llm: LLM) -> None:
    for count in range(100):
        stream = llm.stream([3, count], LONG)
        for _ in range(count % 4):
            next(stream)
        stream.close()
    assert_idle(llm)


def test_leaving_one_stream_does_not_disturb_the_others(llm: LLM) -> None:
    expected = answer(llm, "the", sampled(7))
    stays, leaves = llm.stream("the", sampled(7)), llm.stream("fox", LONG)
    deltas = [next(stays)]
    next(leaves)
    deltas += [next(stays) for _ in range(5)]
    leaves.close()
    deltas += list(stays)
    assert whole(deltas) == expected


def test_stream_chat_is_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "fox?"}]
    expected = llm.chat(conversation, sampled(1), use_tqdm=False)[0]
    deltas = list(llm.stream_chat(conversation, sampled(1)))
    assert whole(deltas) == expected.outputs[0]
    assert deltas[0].prompt == expected.prompt


def test_the_real_model_streams_what_it_answers(llm: LLM, smollm2_path: Any) -> None:
    with LLM(str(smollm2_path), max_model_len=256) as real:
        params = SamplingParams(temperature=0.0, max_tokens=24, stop=[" and"])
        prompt = "The three primary colours are"
        assert whole(list(real.stream(prompt, params))) == answer(real, prompt, params)
        assert_idle(real)
