"""LLM.generate and LLM.chat: what they take, what they give, and how they leave the engine when they fail."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto import LLM, InvalidRequest, NotSupported, SamplingParams, StrettoError
from stretto.runtime import Runtime
from tests.helpers.dummy_model import EOS_ID, VOCAB_SIZE
from tests.helpers.llm_fixture import assert_idle, dummy_llm, llm, shared_llm

__all__ = ["llm", "shared_llm"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
QUIET = {"use_tqdm": False}


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM) -> None:
    text = "the quick brown fox"
    ids = llm.tokenizer.encode(text)
    forms: list[Any] = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids, np.array(ids), tuple(ids)]
    one_by_one = [llm.generate(form, GREEDY, **QUIET) for form in forms]
    together = llm.generate(forms, GREEDY, **QUIET)
    assert all(len(outputs) == 1 for outputs in one_by_one)
    assert len({tuple(*tokens(outputs)) for outputs in one_by_one}) == 1
    assert tokens(together) == [tokens(outputs)[0] for outputs in one_by_one]
    assert [output.prompt for output in together] == [text, text, None, None, None, None]
    assert all(output.prompt_token_ids == ids for output in together)


def test_outputs_are_in_input_order_whichever_ends_first(llm: LLM) -> None:
    lengths = [40, 1, 20, 3, 11, 2, 30, 5, 4, 6, 17, 9]  # more than run at once
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([[3, 4, i] for i in range(len(lengths))], params, **QUIET)
    assert [len(ids) for ids in tokens(outputs)] == lengths
    assert [output.prompt_token_ids[2] for output in outputs] == list(range(len(lengths)))
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert len({output.request_id for output in outputs}) == len(lengths)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], **QUIET) == []


def test_without_parameters_vllms_defaults_are_used(llm: LLM) -> None:
    assert len(llm.generate("the", **QUIET)[0].outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([3, -1], "token id -1 .*0 to 399"),
        ([[3], [VOCAB_SIZE]], "prompt 1: token id 400 .*0 to 399"),
        ([[3], []], "prompt 1: the prompt is empty"),
        ("", "the prompt is empty"),
        ([2**40], "token id 1099511627776"),
        ([[3], [3, 1.5]], "prompt 1: .*whole numbers"),
        ([[3], None], "prompt 1 is a NoneType"),
        ([[3], b"abc"], "prompt 1 is a bytes"),
        (7, "prompts is a int"),
        ({"prompt": 7}, "'prompt' is a int"),
        ({}, "the prompt has neither 'prompt' nor 'prompt_token_ids'; allowed: a text, "),
        ([3] * 512, "has 512 tokens; at most 511 fit into the context length of 512"),
    ],
)
def test_a_bad_prompt_is_refused_by_name_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    steps = llm.stats().steps
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, **QUIET)
    assert llm.stats().steps == steps


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "2 prompts but 1 sampling_params"),
        ([GREEDY, None], "sampling_params 1 is a NoneType"),
        ({"temperature": 0}, "sampling_params is a dict; allowed: SamplingParams, one or a list of them"),
        ("greedy", "sampling_params is a str; allowed: SamplingParams"),
        (SamplingParams(logprobs=21), "logprobs is 21; allowed: up to 20"),
        ([GREEDY, SamplingParams(stop_token_ids=[VOCAB_SIZE])], "prompt 1: stop_token_ids has 400"),
    ],
)
def test_bad_parameters_are_refused_before_anything_runs(llm: LLM, params: Any, message: str) -> None:
    steps = llm.stats().steps
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(["the", "fox"], params, **QUIET)
    assert llm.stats().steps == steps


def test_parameters_are_checked_again_when_used(llm: LLM) -> None:
    params = SamplingParams()
    params.max_tokens = 0
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        llm.generate("the", params, **QUIET)


def test_what_is_not_built_says_so(llm: LLM) -> None:
    with pytest.raises(NotSupported, match="lora_request"):
        llm.generate("the", lora_request=object(), **QUIET)
    with pytest.raises(NotSupported, match="multi_modal_data"):
        llm.generate({"prompt": "the", "multi_modal_data": {}}, **QUIET)
    with pytest.raises(InvalidRequest, match="2 prompts but 1 priorities"):
        llm.generate(["the", "fox"], priority=[1], **QUIET)


@pytest.mark.parametrize("priority", [["x"], [float("nan")], [1.5], [True], [None], [2**63], 3, "high"])
def test_a_priority_without_a_place_in_the_queue_is_refused_and_harms_nobody(llm: LLM, priority: object) -> None:
    """Taken in, it would break the order of the queue, and with it every later call."""
    before = llm.generate("the", GREEDY, **QUIET)[0].outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="priorit"):
        llm.generate("the", GREEDY, priority=priority, **QUIET)  # type: ignore[arg-type]
    assert llm.stats().num_waiting == 0
    assert llm.generate("the", GREEDY, **QUIET)[0].outputs[0].token_ids == before


def test_any_sequence_of_64_bit_numbers_is_a_priority(llm: LLM) -> None:
    outputs = llm.generate(["the", "fox"], GREEDY, priority=(2**63 - 1, -(2**63)), **QUIET)
    assert [output.prompt for output in outputs] == ["the", "fox"]


def test_the_context_length_ends_an_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    output = llm.generate([3] * 500, params, **QUIET)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (12, "length")


def test_more_samples_than_anybody_can_run_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="n is 1000000000; allowed: 1 to 16384"):
        SamplingParams(n=10**9)


def test_samples_differ_and_the_first_is_the_one_alone(llm: LLM) -> None:
    one = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    four = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    alone = llm.generate("the fox", one, **QUIET)[0]
    samples = llm.generate(["a fugue", "the fox"], four, **QUIET)[1].outputs
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    assert samples[0].token_ids == alone.outputs[0].token_ids
    assert samples == llm.generate("the fox", four, **QUIET)[0].outputs


def test_without_a_seed_every_sample_is_fresh(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=20, ignore_eos=True)
    samples = [s.token_ids for output in llm.generate(["the fox"] * 2, params, **QUIET) for s in output.outputs]
    assert len({tuple(ids) for ids in samples}) == 6


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True)
    for output in llm.generate(["the", "fox", "日本"], params, **QUIET):
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_a_prompt_seen_before_is_reported_as_cached_and_answered_alike(llm: LLM) -> None:
    prompt = list(range(3, 203))
    first, again = (llm.generate(prompt, GREEDY, **QUIET)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert 0 < again.num_cached_tokens < len(prompt)
    assert again.outputs == first.outputs


def test_without_detokenize_there_is_no_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False, logprobs=1)
    output = llm.generate("the", params, **QUIET)[0].outputs[0]
    assert (output.text, len(output.token_ids)) == ("", 5)
    assert output.logprobs is not None
    assert {entry.decoded_token for step in output.logprobs for entry in step.values()} == {None}


def test_a_stop_token_stays_in_the_ids_and_out_of_the_text(llm: LLM) -> None:
    full = llm.generate("the fox", GREEDY, **QUIET)[0].outputs[0].token_ids
    stop_id = full[5]
    end = full.index(stop_id) + 1
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id])
    output = llm.generate("the fox", params, **QUIET)[0].outputs[0]
    assert output.token_ids == full[:end]
    assert output.text == llm.tokenizer.decode(full[: end - 1])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_id)
    params.include_stop_str_in_output = True
    assert llm.generate("the fox", params, **QUIET)[0].outputs[0].text == llm.tokenizer.decode(full[:end])


def test_end_of_sequence_gives_no_stop_reason(llm: LLM) -> None:
    params = SamplingParams(n=8, temperature=1.0, seed=0, max_tokens=500)
    ended = [s for s in llm.generate([3], params, **QUIET)[0].outputs if s.finish_reason == "stop"]
    assert ended  # one of 400 tokens ends it
    for sample in ended:
        assert (sample.token_ids.index(EOS_ID), sample.stop_reason) == (len(sample.token_ids) - 1, None)


def test_logprobs_hold_the_chosen_and_the_likeliest_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=10, ignore_eos=True, logprobs=3)
    output = llm.generate("the", params, **QUIET)[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, step in zip(output.token_ids, output.logprobs, strict=True):
        top = [entry for entry in step.values() if entry.rank is not None and entry.rank <= 3]
        assert [entry.rank for entry in sorted(top, key=lambda entry: -entry.logprob)] == [1, 2, 3]
        assert len(step) == 3 + (step[token_id].rank not in (1, 2, 3))
        assert sum(math.exp(entry.logprob) for entry in step.values()) < 1.0
        assert all(
            entry.decoded_token == llm.tokenizer.decode([i], skip_special_tokens=False) for i, entry in step.items()
        )
    chosen = [step[token_id].logprob for token_id, step in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    params.logprobs = None
    without = llm.generate("the", params, **QUIET)[0].outputs[0]
    assert (without.token_ids, without.logprobs, without.cumulative_logprob) == (output.token_ids, None, None)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fox?"}]
    text = "<|system|>be brief\n<|user|>fox?\n<|assistant|>"
    expected = llm.generate({"prompt_token_ids": llm.tokenizer.encode(text)}, GREEDY, **QUIET)
    one = llm.chat(conversation, GREEDY, **QUIET)
    many = llm.chat([conversation, conversation[1:]], GREEDY, **QUIET)
    assert one[0].prompt == text
    assert tokens(one) == tokens(expected) == tokens(many)[:1]
    assert many[1].prompt == "<|user|>fox?\n<|assistant|>"
    own = llm.chat(conversation, GREEDY, chat_template="{{ messages[1].content }}", **QUIET)
    assert own[0].prompt == "fox?"


def test_chat_refuses_what_is_no_conversation(llm: LLM) -> None:
    for bad in ("hello", [["hello"]], [{"content": "no role"}]):
        with pytest.raises(InvalidRequest):
            llm.chat(bad, GREEDY, **QUIET)


class Bar:
    """A progress bar that does something when the first answer is there, while the others run."""

    def __init__(self, action: Any) -> None:
        self.action = action
        self.done = 0
        self.closed = False

    def __call__(self, **options: Any) -> Bar:
        self.total = options["total"]
        return self

    def update(self, n: int) -> None:
        self.done += n
        if self.done == 1:
            self.action()

    def set_postfix_str(self, *args: Any, **options: Any) -> None:
        pass

    def close(self) -> None:
        self.closed = True


UNEQUAL = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 300, 300)]


def boom() -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("action", "error"),
    [(boom, RuntimeError), (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt)],
    ids=["an exception", "Ctrl-C"],
)
def test_whatever_ends_a_call_ends_its_requests_and_leaves_the_llm_usable(
    llm: LLM, action: Any, error: type[BaseException]
) -> None:
    expected = llm.generate("the fox", GREEDY, **QUIET)
    before = llm.stats().output_tokens
    handler = signal.getsignal(signal.SIGINT)
    bar = Bar(action)
    with pytest.raises(error):
        llm.generate([[3], [4], [5]], UNEQUAL, use_tqdm=bar)
    assert llm.stats().output_tokens - before < 50  # and not 602
    assert bar.closed
    assert signal.getsignal(signal.SIGINT) is handler
    assert_idle(llm)
    assert tokens(llm.generate("the fox", GREEDY, **QUIET)) == tokens(expected)


def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Runtime.step
    completed = []

    def interrupted(runtime: Runtime) -> Any:
        if len(completed) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        result = step(runtime)
        completed.append(True)
        return result

    monkeypatch.setattr(Runtime, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([3], UNEQUAL[1], **QUIET)
    assert len(completed) > 3
    assert_idle(llm)


def test_the_progress_bar_counts_samples(llm: LLM) -> None:
    bar = Bar(lambda: None)
    llm.generate(["the", "fox"], SamplingParams(n=2, max_tokens=3), use_tqdm=bar)
    assert (bar.total, bar.done, bar.closed) == (4, 4, True)


def test_use_from_another_thread_or_from_within_is_refused(llm: LLM) -> None:
    errors = []

    def use() -> None:
        try:
            llm.generate("the", GREEDY, **QUIET)
        except StrettoError as error:
            errors.append(str(error))

    def from_both() -> None:
        use()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    llm.generate([[3], [4], [5]], UNEQUAL, use_tqdm=Bar(from_both))
    assert len(errors) == 2
    assert all("in use by another thread" in error for error in errors)


def test_another_thread_may_use_it_afterwards(llm: LLM) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(llm.generate("the fox", GREEDY, **QUIET)))
    thread.start()
    thread.join()
    assert tokens(results[0]) == tokens(llm.generate("the fox", GREEDY, **QUIET))


def test_a_closed_llm_says_so(tmp_path: Path) -> None:
    with dummy_llm(tmp_path) as llm:
        llm.generate("the", GREEDY, **QUIET)
        stream = llm.stream("the", UNEQUAL[1])
        next(stream)
    llm.close()
    with pytest.raises(StrettoError, match="closed"):
        llm.generate("the", GREEDY, **QUIET)
    with pytest.raises(StrettoError, match="closed"):
        next(stream)


def test_the_real_model_answers(smollm2_path: Path) -> None:
    with LLM(str(smollm2_path), max_model_len=256) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32)
        outputs = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params, **QUIET)
        assert outputs[0].outputs[0].text == "The capital of France is Paris."
        assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason) == ("stop", None)
        assert_idle(llm)
