"""Messages keep what they say, and what is no message is refused."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import InvalidRequest
from stretto.ipc import messages as m
from stretto.ipc.control import ControlLine, Drain, EngineInfo, Progress
from stretto.ipc.sockets import identity, make_private_directory, worker_of
from stretto.prompt_logprobs import ScoredTokens
from stretto.request import SamplingParams

TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


@given(st.lists(TOKEN_IDS, max_size=4), st.integers(0, 2**62), st.integers(1, 8))
def test_a_submission_arrives_as_it_was_sent(prompts: list[list[int]], first_id: int, n: int) -> None:
    params = SamplingParams(temperature=0.5, stop_token_ids=[3], seed=-5, logprobs=2, n=n)
    sent = m.Submit(first_id, [m.pack_tokens(prompt) for prompt in prompts], n, m.Sampling.of(params), -3)
    received = m.decode_to_engine(m.encode(sent))
    assert received == sent
    assert [m.unpack_tokens(prompt).tolist() for prompt in received.prompts] == prompts


def test_sampling_keeps_what_the_engine_needs() -> None:
    params = SamplingParams(
        temperature=0.3, top_p=0.9, top_k=7, min_p=0.1, seed=2**63 - 1, max_tokens=None, min_tokens=3,
        ignore_eos=True, prompt_logprobs=2,
    )  # fmt: skip
    kept = m.Sampling.of(params).params()
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "ignore_eos",
        "prompt_logprobs",
    ):
        assert getattr(kept, name) == getattr(params, name)
    assert kept.detokenize is False


@pytest.mark.parametrize("num_tops", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_log_probabilities_of_a_prompt_arrive_as_they_were_sent(count: int, num_tops: int) -> None:
    numbers = np.random.default_rng(count).standard_normal((count, num_tops + 1)).astype(np.float32)
    ids = (numbers * 1000).astype(np.int32)
    scored = ScoredTokens(numbers[:, 0].copy(), ids[:, 0].copy(), ids[:, 1:].copy(), numbers[:, 1:].copy())
    step = m.decode_from_engine(m.encode(m.Step(b"", b"", [], [], [m.Begun(5, 16, m.Scored.of(scored))])))
    assert isinstance(step, m.Step)
    (begun,) = step.begun
    assert (begun.id, begun.num_cached) == (5, 16)
    assert begun.scored is not None
    arrived = begun.scored.tokens(num_tops)
    for name in ScoredTokens.__slots__:
        assert np.array_equal(getattr(arrived, name), getattr(scored, name))


def test_sampling_that_is_none_is_refused_on_arrival() -> None:
    wrong = msgspec.structs.replace(m.Sampling.of(SamplingParams()), top_p=4.0)
    with pytest.raises(InvalidRequest, match="top_p"):
        wrong.params()


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**31 - 1)), max_size=300))
def test_a_step_carries_all_tokens_in_order(tokens: list[tuple[int, int]]) -> None:
    ids = np.array([i for i, _ in tokens], np.int64)
    values = np.array([t for _, t in tokens], np.int32)
    ends = [m.Ended(5, "stop", 2)]
    rows = [m.Logprobs(5, [-0.5], [1], [[1, 2]], [[-0.5, -3.0]])]
    step = m.decode_from_engine(m.encode(m.Step(ids.tobytes(), values.tobytes(), ends, rows, [m.Begun(5, 16, None)])))
    assert isinstance(step, m.Step)
    assert np.frombuffer(step.ids, np.int64).tolist() == ids.tolist()
    assert np.frombuffer(step.tokens, np.int32).tolist() == values.tolist()
    assert step.ended == ends
    assert step.logprobs[0].rows()[0].top_ids == [1, 2]


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    for decode in (m.decode_to_engine, m.decode_from_engine):
        try:
            decode(data)
        except msgspec.DecodeError:
            continue
        assert isinstance(decode(data), (m.Submit, m.End, m.Ping, m.Accepted, m.Refused, m.Step, m.Pong))


def test_a_pickle_is_no_message() -> None:
    for decode in (m.decode_to_engine, m.decode_from_engine):
        with pytest.raises(msgspec.DecodeError):
            decode(pickle.dumps({"a": 1}))


def test_token_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        m.pack_tokens([2**31])
    with pytest.raises(ValueError):
        m.unpack_tokens(b"12345")


def test_control_messages_arrive_whole_and_the_end_is_seen() -> None:
    import socket

    left, right = socket.socketpair()
    ours, theirs = ControlLine(left), ControlLine(right)
    info = EngineInfo("m", "cpu", "float32", None, "", 1, 2, 3, 4, 5, 6, 7, 1)
    for message in (Progress("x" * 100_000, 0.5), info, Drain(3.0)):
        ours.send(message)
    ours.close()
    assert list(theirs.messages()) == [Progress("x" * 100_000, 0.5), info, Drain(3.0)]
    assert theirs.closed
    theirs.send(Drain(1.0))  # harmless
    theirs.close()


def test_the_socket_directory_is_private_and_names_tell_workers() -> None:
    directory = make_private_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()
    assert worker_of(identity(17)) == 17
    assert [worker_of(name) for name in (b"worker-", b"worker-x", b"other-1", b"\xff")] == [None] * 4
