"""Turns as bytes: nothing that a schedule or a token depends on is lost, and nothing that is damaged is believed."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cache.base import CacheKey
from stretto.distributed.messages import Arrival, BadTurn, WireTurn, decode, encode
from stretto.distributed.turns import FollowerTurns
from stretto.request import FinishReason, Request, RequestState, SamplingParams
from stretto.scheduler.turns import AddRequest, EndRequest, LocalTurns, Message, Turn

CARRIED = {"uid", "prompt_ids", "params", "seed", "final_len", "stop_ids", "priority", "cache_key"}
"""Fields of a request that the leader decides."""
BORN = {
    "state",
    "slot",
    "pages",
    "prefix",
    "token_ids",
    "num_output",
    "num_cached",
    "finish_reason",
    "stop_token",
    "logprobs",
    "prompt_logprobs",
    "num_preemptions",
}
"""Fields that begin alike on every rank, and that each rank finds out by itself."""

many_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 10**30),
    min_p=st.floats(0, 1),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    stop=st.one_of(st.none(), st.lists(st.text(min_size=1), max_size=2)),
    stop_token_ids=st.one_of(st.none(), st.lists(st.integers(0, 2**31 - 1), max_size=4)),
    ignore_eos=st.booleans(),
    max_tokens=st.one_of(st.none(), st.integers(100, 10**6)),
    min_tokens=st.integers(0, 100),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 5),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=5)),
)
requests = st.builds(
    lambda prompt, **others: Request(prompt_ids=np.array(prompt, np.int32), **others),
    uid=st.integers(0, 2**63 - 1),
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    params=many_params,
    seed=st.integers(-(2**63), 2**63 - 1),
    final_len=st.integers(0, 10**9),
    stop_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    priority=st.integers(-(2**63), 2**63 - 1),
    cache_key=st.builds(CacheKey, st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text())),
)


def _request(uid: int = 0) -> Request:
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.5, 1: -2.0}, logprobs=2, min_tokens=2)
    return Request(uid, np.array([5, 6, 7], np.int32), params, -(2**63), 12, (0, 3), -4, CacheKey(None, "salt"))


def test_every_field_of_a_request_is_carried_or_begins_alike() -> None:
    """Who adds a field says here which it is."""
    assert {f.name for f in fields(Request)} == CARRIED | BORN


@given(request=requests)
@settings(max_examples=150, deadline=None)
def test_a_request_arrives_as_it_was(request: Request) -> None:
    data = encode(WireTurn.of(3, Turn([AddRequest(request, deadline=5.0)], 2)))
    turn = decode(data).turn(lambda uid: None)
    assert (turn.num_ready, turn.stop) == (2, False)
    (message,) = turn.messages
    assert isinstance(message, AddRequest)
    assert message.deadline is None  # the leader's business
    other = message.request
    assert other.prompt_ids.dtype == np.int32
    assert other.prompt_ids.tolist() == request.prompt_ids.tolist()
    top_k = min(request.params.top_k, 2**63 - 1)
    assert other.params == replace(request.params, top_k=top_k)
    assert list(other.params.logit_bias or ()) == list(request.params.logit_bias or ())  # in the same order
    for name in CARRIED - {"prompt_ids", "params"}:
        assert getattr(other, name) == getattr(request, name)
    for name in BORN - {"token_ids", "prompt_logprobs", "logprobs"}:
        assert getattr(other, name) == getattr(request, name)
    assert (other.logprobs is None) == (request.params.logprobs is None)


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("num_output", [None, 0, 7])
def test_an_end_arrives_as_it_was(reason: FinishReason, num_output: int | None) -> None:
    request = _request(9)
    data = encode(WireTurn.of(0, Turn([EndRequest(request, reason, num_output)])))
    assert decode(data).turn({9: request}.get).messages == [EndRequest(request, reason, num_output)]
    assert decode(data).turn(lambda uid: None).messages == []  # it has ended here


def test_messages_keep_their_order_and_turns_their_size() -> None:
    old, new = _request(0), _request(1)
    messages: list[Message] = [
        EndRequest(old, FinishReason.ABORT),
        AddRequest(new),
        EndRequest(new, FinishReason.STOP, 0),
    ]
    turn = decode(encode(WireTurn.of(7, Turn(messages, stop=True)))).turn({0: old}.get)
    assert turn.stop
    kinds = [(type(message), message.request.uid) for message in turn.messages]
    assert kinds == [(EndRequest, 0), (AddRequest, 1), (EndRequest, 1)]
    assert turn.messages[1].request is turn.messages[2].request
    assert len(encode(WireTurn.of(1_000_000, Turn((), 1)))) <= 16


def test_damaged_bytes_are_refused() -> None:
    data = encode(WireTurn.of(3, Turn([AddRequest(_request()), EndRequest(_request(), FinishReason.TIMEOUT)], 1)))
    assert decode(data).index == 3
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(BadTurn):
                decode(bytes(flipped))
        with pytest.raises(BadTurn):
            decode(data[:at])
    with pytest.raises(BadTurn):
        decode(data + b"\0")


def _as_turn(body: object) -> bytes:
    """Well sealed, whatever it is."""
    import zlib

    data = msgspec.msgpack.encode(body)
    return zlib.crc32(data).to_bytes(4, "little") + data


GOOD = [0, 5, b"\1\0\0\0", {}, 0, 12, [0], 0, None, None]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 2, "another form"),
        (1, -1, "another form"),
        (1, "5", "another form"),
        (2, b"", "0 bytes of int32"),
        (2, b"\1\0\0", "3 bytes of int32"),
        (3, {"temperature": -1.0}, "temperature is -1.0"),
        (3, {"temperature": "hot"}, "bad sampling parameters"),
        (3, {"tempo": 1.0}, r"unknown sampling parameters \['tempo'\]"),
        (4, 2**64, "another form"),
        (5, None, "another form"),
        (6, [-1], "another form"),
        (8, 7, "another form"),
    ],
)
def test_a_request_that_cannot_be_is_refused(at: int, value: object, message: str) -> None:
    def arriving(arrival: list[object]) -> Turn:
        try:
            return decode(_as_turn([0, 0, False, [arrival]])).turn(lambda uid: None)
        except OverflowError as error:
            raise BadTurn("another form") from error

    assert len(arriving(GOOD).messages) == 1
    with pytest.raises(BadTurn, match=message):
        arriving([*GOOD[:at], value, *GOOD[at + 1 :]])
    with pytest.raises(BadTurn, match="another form"):
        arriving([*GOOD, 1])


def _follower(*turns: bytes) -> FollowerTurns:
    waiting = deque(turns)
    return FollowerTurns(lambda timeout_s: waiting.popleft())


def test_turns_out_of_order_are_refused() -> None:
    first, second = (encode(WireTurn.of(index, Turn())) for index in (0, 1))
    with pytest.raises(BadTurn, match="turn 1 has arrived where turn 0 was due"):
        _follower(second).next([], True)
    turns = _follower(first, first)
    turns.next([], True)
    with pytest.raises(BadTurn, match="turn 0 has arrived where turn 1 was due"):
        turns.next([], True)


def test_what_cannot_follow_from_the_turns_before_is_refused() -> None:
    request = _request(4)
    add = encode(WireTurn.of(0, Turn([AddRequest(request)])))
    with pytest.raises(BadTurn, match="1 steps to process, but only 0 are in flight"):
        _follower(encode(WireTurn.of(0, Turn((), 1)))).next([], True)
    with pytest.raises(BadTurn, match="request 4 is to end, but it has never arrived"):
        _follower(encode(WireTurn.of(0, Turn([EndRequest(request, FinishReason.ABORT)])))).next([], True)
    turns = _follower(add, encode(WireTurn.of(1, Turn([AddRequest(request)]))))
    turns.next([], True)
    with pytest.raises(BadTurn, match="request 4 arrives after request 4"):
        turns.next([], True)


def test_a_follower_looks_around_while_nothing_comes() -> None:
    answers: deque[bytes | None] = deque([None, None, encode(WireTurn.of(0, Turn()))])
    waits: list[float | None] = []
    looks: list[int] = []

    def receive(timeout_s: float | None) -> bytes | None:
        waits.append(timeout_s)
        return answers.popleft()

    FollowerTurns(receive, look_every_s=0.5, look=lambda: looks.append(1)).next([], False)
    assert (waits, len(looks)) == ([0.5] * 3, 2)


class Step:
    def __init__(self, done: bool) -> None:
        self.done = done

    def is_done(self) -> bool:
        return self.done


class Arrivals:
    def __init__(self, *batches: list[Message]) -> None:
        self.batches = deque(batches)
        self.blocked: list[bool] = []

    def receive(self, block: bool) -> list[Message]:
        self.blocked.append(block)
        return self.batches.popleft() if self.batches else []


@pytest.mark.parametrize(
    ("done", "num_ready"), [([], 0), ([True], 1), ([False, True], 0), ([True, True, False, True], 2)]
)
def test_only_the_oldest_steps_in_a_row_are_ready(done: list[bool], num_ready: int) -> None:
    assert LocalTurns(Arrivals(), lambda: 0.0).next([Step(d) for d in done], False) == Turn([], num_ready)


def test_expired_requests_end_once_in_the_order_of_their_deadlines() -> None:
    now = 0.0
    late, early, ended = (_request(uid) for uid in range(3))
    ended.state = RequestState.FINISHED
    inbox = Arrivals([AddRequest(late, 3.0), AddRequest(early, 2.0), AddRequest(ended, 1.0)])
    turns = LocalTurns(inbox, lambda: now)
    assert len(turns.next([], True).messages) == 3
    now = 3.0
    expected = [EndRequest(request, FinishReason.TIMEOUT) for request in (early, late)]
    assert turns.next([], False).messages == expected
    assert turns.next([], True).messages == []
    assert inbox.blocked == [True, False, True]


def test_the_last_turn_waits_for_no_message_and_processes_all_steps() -> None:
    inbox = Arrivals()
    turns = LocalTurns(inbox, lambda: 0.0)
    turns.stop()
    assert turns.next([Step(False), Step(False)], True) == Turn([], 2, stop=True)
    assert inbox.blocked == [False]


def test_a_request_is_short_on_the_wire() -> None:
    request = _request(1)
    request.params = SamplingParams(temperature=0)
    request.prompt_ids = np.arange(1000, dtype=np.int32)
    assert len(msgspec.msgpack.encode(Arrival.of(request))) < 4000 + 60
