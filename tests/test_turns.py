"""Several ranks, one schedule: whatever happens at whatever pace, followers do exactly what the leader does."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from stretto.cache.base import CacheKey
from stretto.device.checking import CheckingDevice
from stretto.device.delayed import DelayedCpuDevice
from stretto.distributed.digest import RanksDiffer
from stretto.distributed.turns import FollowerTurns
from stretto.engine.engine import Engine, InFlightStep
from stretto.errors import EngineBroken
from stretto.request import FinishReason, SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import IntArray, StepResults
from stretto.scheduler.decode import DecodeManager
from stretto.scheduler.turns import AddRequest, EndRequest, Launched, Turn
from tests.helpers.ranks import Follower, Ranks
from tests.helpers.simulation import Stream, expected_output, small_config
from tests.test_scheduler_properties import DELAYS, params, prompts, sampled_params

EXAMPLES = int(os.environ.get("STRETTO_EXAMPLES", "2000")) // 40
"""Runs of the state machine; a long soak sets more (`make soak`)."""

Delays = tuple[tuple[float, float], tuple[float, float]]


def device(seed: int, delays: Delays) -> CheckingDevice:
    return CheckingDevice(seed, device_delay=delays[0], host_delay=delays[1])


class RanksMachine(RuleBasedStateMachine):
    """Requests arrive, end in every way, the leader turns, and followers do, each at its own pace."""

    @initialize(
        num_ranks=st.sampled_from([2, 2, 3]),
        depth=st.integers(0, 3),
        chunk=st.integers(4, 24),
        page_size=st.sampled_from([1, 4, 16]),
        spare_pages=st.integers(0, 20),
        caching=st.booleans(),
        policy=st.sampled_from(["mixed", "prefill-first"]),
        eager=st.booleans(),
        delays=st.lists(st.sampled_from(DELAYS), min_size=3, max_size=3),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        num_ranks: int,
        depth: int,
        chunk: int,
        page_size: int,
        spare_pages: int,
        caching: bool,
        policy: str,
        eager: bool,
        delays: list[Delays],
        seed: int,
    ) -> None:
        config = small_config(
            overlap_depth=depth,
            max_num_batched_tokens=chunk,
            page_size=page_size,
            num_pages=1 + -(-24 // page_size) + spare_pages,
            enable_prefix_caching=caching,
            batch_policy=policy,
        )
        devices = [device(seed + rank, delays[rank]) for rank in range(num_ranks)]
        self.ranks = Ranks(config, devices, eager=eager)

    @precondition(lambda self: not self.stopped)
    @rule(
        prompt=prompts,
        params=st.one_of(params, sampled_params),
        priority=st.integers(-1, 1),
        timeout_s=st.sampled_from([None, None, 1e-4, 3e-3, 3e-2]),
        salt=st.sampled_from([None, "a", "b"]),
        seed=st.integers(-(2**63), 2**63 - 1),
    )
    def arrive(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        timeout_s: float | None,
        salt: str | None,
        seed: int,
    ) -> None:
        runtime, leader = self.ranks.leader.runtime, self.ranks.leader
        request = runtime.add(
            prompt, params, priority=priority, timeout_s=timeout_s, cache_key=CacheKey(salt=salt), seed=seed
        )
        leader.streams[request.uid] = Stream(request, prompt)

    @precondition(lambda self: self.ranks.leader.streams and not self.stopped)
    @rule(data=st.data(), num_output=st.one_of(st.none(), st.integers(0, 6)))
    def end(self, data: st.DataObject, num_output: int | None) -> None:
        stream: Stream = data.draw(st.sampled_from(list(self.ranks.leader.streams.values())))
        reason = FinishReason.ABORT if num_output is None else FinishReason.STOP
        self.ranks.leader.runtime.end(stream.request, reason, num_output)

    @precondition(lambda self: not self.stopped)
    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.ranks.turn()

    @rule(turns=st.integers(1, 4), data=st.data())
    def follow(self, turns: int, data: st.DataObject) -> None:
        follower: Follower = data.draw(st.sampled_from(self.ranks.followers))
        for _ in range(turns):
            follower.turn()

    @precondition(lambda self: len(self.ranks.leader.streams) > 4 and not self.stopped)
    @rule()
    def stop(self) -> None:
        self.ranks.stop()

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        if not self.stopped:
            self.ranks.run()
        for stream in self.ranks.leader.streams.values():
            assert_serial(stream, self.ranks.leader.config.max_model_len)

    @property
    def stopped(self) -> bool:
        return self.ranks.leader.runtime.loop.stopped


def assert_serial(stream: Stream, max_model_len: int) -> None:
    """A greedy stream is the serial loop's, or a beginning of it where it was ended from outside or never."""
    if stream.request.params.temperature or stream.request.params.min_tokens:
        return
    tokens, reason = expected_output(stream.prompt, stream.request.params, max_model_len)
    told = stream.terminal[0] if stream.terminal else FinishReason.ABORT
    by_itself = (stream.tokens, told) == (tokens, reason)
    outside = told in (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.STOP)
    assert by_itself or (outside and stream.tokens == tokens[: len(stream.tokens)])


def test_any_interleaving_is_the_same_on_all_ranks() -> None:
    run_state_machine_as_test(
        RanksMachine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


STAGGER = 0.03
"""By how many seconds each request of a load may take longer than the one before."""


def _load(ranks: Ranks, count: int = 6, timeout_s: float | None = None) -> None:
    for i in range(count):
        length = SamplingParams(temperature=0, max_tokens=6 + i, ignore_eos=True)
        limit = None if timeout_s is None else timeout_s + i * STAGGER
        request = ranks.leader.runtime.add([1, 2, 3, 4, i + 1], length, timeout_s=limit)
        ranks.leader.streams[request.uid] = Stream(request, [1, 2, 3, 4, i + 1])


def _two(depth: int = 1, seed: int = 0, **options: object) -> Ranks:
    config = small_config(overlap_depth=depth)
    return Ranks(config, [device(seed, DELAYS[0]), device(seed + 1, DELAYS[2])], **options)  # type: ignore[arg-type]


# -- what must be caught --------------------------------------------------------------------------------------------


class ReversedDecode(DecodeManager):
    """Iterates in another order than the leader."""

    @property
    def slots(self) -> IntArray:
        return super().slots[::-1]


def _reversed(*args: object, **options: object) -> Runtime:
    runtime = Runtime(*args, **options)  # type: ignore[arg-type]
    runtime.scheduler.lifecycle.decode = ReversedDecode()
    return runtime


class OtherToken(Engine):
    """Gets another token than the leader in one step."""

    def results(self, step: InFlightStep) -> StepResults:
        results = super().results(step)
        if step.plan.index == 5:
            results.tokens_S[0] = results.tokens_S[0] % 9 + 1
        return results


class OwnClock(FollowerTurns):
    """Judges by its own clock when time is over, not by the leader's."""

    def __init__(self, follower: Follower, timeout_s: float) -> None:
        super().__init__(follower.receive, look_every_s=0.0, look=follower.look)
        self.now = follower.device.now
        self.timeout_s = timeout_s
        self.deadlines: dict[float, AddRequest] = {}

    def next(self, in_flight: Sequence[Launched], block: bool) -> Turn:
        turn = super().next(in_flight, block)
        mine = [m for m in turn.messages if not isinstance(m, EndRequest)]
        for message in mine:
            self.deadlines[self.now() + self.timeout_s + message.request.uid * STAGGER] = message
        over = [self.deadlines.pop(at).request for at in sorted(self.deadlines) if at <= self.now()]
        return Turn([*mine, *(EndRequest(r, FinishReason.TIMEOUT) for r in over)], turn.num_ready, turn.stop)


MUTATIONS: dict[str, tuple[Callable[[int], Ranks], float | None]] = {
    "another order": (lambda depth: _two(depth, make_runtime=_reversed), None),
    "another token": (lambda depth: _two(depth, make_runtime=partial(Runtime, engine_type=OtherToken)), None),
    "its own clock": (lambda depth: _two(depth, make_turns=partial(OwnClock, timeout_s=0.2)), 0.2),
}


def _until_they_differ(ranks: Ranks) -> None:
    """Run both, the follower close behind the leader, until the leader learns it."""
    while ranks.leader.runtime.has_work:
        ranks.turn()
        while ranks.check.difference is None and ranks.followers[0].turn():
            pass


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rank_that_does_otherwise_is_caught_in_that_step(name: str, depth: int) -> None:
    make, timeout_s = MUTATIONS[name]
    ranks = make(depth)
    _load(ranks, timeout_s=timeout_s)
    with pytest.raises(RanksDiffer) as caught:
        _until_they_differ(ranks)
    text = str(caught.value)
    assert text.startswith(f"ranks 0 and 1 differ in step {ranks.first_difference()}, for the first time:")
    assert "\n> rank 0  " in text
    assert "\n> rank 1  " in text
    assert ranks.check.difference == text


def test_the_difference_is_shown_side_by_side() -> None:
    ranks = _two(make_runtime=partial(Runtime, engine_type=OtherToken))
    _load(ranks)
    with pytest.raises(RanksDiffer) as caught:
        _until_they_differ(ranks)
    lines = str(caught.value).splitlines()
    ours, theirs = (next(line for line in lines if line.startswith(f"> rank {r}  sampled tokens: ")) for r in (0, 1))
    assert ours.split(": ")[1].split(", ")[1:] == theirs.split(": ")[1].split(", ")[1:]  # all but the first token
    assert any(line.startswith("  both    rows (slot: length + new tokens): ") for line in lines)


# -- the check itself -----------------------------------------------------------------------------------------------


def test_digests_may_come_early_or_late_but_in_order() -> None:
    for eager in (False, True):
        ranks = _two(eager=eager)
        _load(ranks)
        ranks.run()
        assert ranks.check.num_compared == len(ranks.recorders[0].steps) > 5
        assert len(ranks.check.recent) == min(64, ranks.check.num_compared)
        assert not ranks.check._own  # what everybody has answered is dropped


def test_a_digest_that_is_none_or_out_of_order_is_a_difference() -> None:
    ranks = _two()
    _load(ranks)
    ranks.run()
    assert "sent a digest that is none" in (ranks.check.take(1, b"?") or "")
    for wrong_rank, wrong in ((7, "which is no follower"), (1, "where step")):
        ranks = _two()
        sent: list[bytes] = []
        report = ranks.followers[0].runtime.loop.witness.witness  # type: ignore[union-attr]
        report._send = sent.append
        _load(ranks)
        ranks.leader.run()
        ranks.catch_up()
        assert ranks.check.take(1, sent[0]) is None
        assert wrong in (ranks.check.take(wrong_rank, sent[2]) or "")


def test_a_follower_that_sends_no_digests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.distributed.digest.MOST_BEHIND", 8)
    ranks = _two()
    _load(ranks)
    with pytest.raises(RanksDiffer, match="rank 1 has sent no digest since step -1"):
        ranks.leader.run()


# -- turns ----------------------------------------------------------------------------------------------------------


def test_an_idle_leader_publishes_nothing() -> None:
    ranks = _two()
    for _ in range(3):
        ranks.turn()
    assert ranks.num_messages == 0
    _load(ranks, 1)
    ranks.run()
    published = ranks.num_messages
    assert published > 3
    ranks.turn()
    assert ranks.num_messages == published
    assert not ranks.followers[0].turn()


def test_a_turn_is_published_before_anything_of_it_is_carried_out() -> None:
    ranks = _two(depth=2)
    _load(ranks)
    leader = ranks.leader.runtime
    seen: list[tuple[int, int]] = []
    leader.loop.turns._publish = lambda data: seen.append(  # type: ignore[attr-defined]
        (leader.scheduler.num_waiting, leader.scheduler._num_steps)
    )
    for _ in range(3):
        leader.step()
    assert seen == [(0, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stopping_under_load_ends_all_ranks_at_the_same_step(depth: int) -> None:
    ranks = _two(depth)
    _load(ranks)
    for _ in range(5):
        ranks.turn()
    for stream in ranks.leader.streams.values():
        ranks.leader.runtime.end(stream.request)
    ranks.stop()
    ranks.leader.assert_at_rest()
    for runtime in (ranks.leader.runtime, ranks.followers[0].runtime):
        with pytest.raises(EngineBroken, match="has been stopped"):
            runtime.step()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_ranks_in_threads_of_their_own_at_their_own_pace(depth: int) -> None:
    """Real threads and devices: the follower waits in `receive`, the leader for nobody."""
    devices = [
        DelayedCpuDevice(rank, device_delay=delay, host_delay=(0.0, 1e-4), num_threads=1)
        for rank, delay in enumerate([(0.0, 1e-4), (0.0, 2e-3)])
    ]
    published: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def turns(follower: Follower) -> FollowerTurns:
        return FollowerTurns(lambda timeout_s: published.get(timeout=20))

    ranks = Ranks(small_config(overlap_depth=depth), devices, make_turns=turns)
    ranks.publish = published.put  # type: ignore[method-assign]
    follower = ranks.followers[0]

    def follow() -> None:
        while not follower.runtime.loop.stopped:
            follower.turn()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        _load(ranks)
        ranks.leader.run()
    finally:
        ranks.leader.runtime.loop.turns.stop()  # type: ignore[attr-defined]
        ranks.turn()
        thread.join(30)
        for each in devices:
            each.close()
    assert not thread.is_alive()
    ranks.assert_alike()
    for stream in ranks.leader.streams.values():
        ranks.leader.assert_as_expected(stream)
    assert [each.hazards for each in devices] == [[], []]


class Interruption(Exception):
    """What a signal handler might raise."""


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_turn_that_is_broken_off_while_a_rank_waits_goes_on_where_it_was(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third wait of any rank is broken off: nothing is lost, neither outputs nor agreement."""
    waits = 0
    original = InFlightStep.wait

    def wait(step: InFlightStep) -> None:
        nonlocal waits
        waits += 1
        if waits % 3 == 0:
            raise Interruption
        original(step)

    monkeypatch.setattr(InFlightStep, "wait", wait)
    ranks = _two(depth)
    _load(ranks)
    interrupted = 0
    for act in [ranks.run, *[follower.catch_up for follower in ranks.followers]]:
        while True:
            try:
                act()
                break
            except Interruption:
                interrupted += 1
    assert interrupted > 5
    ranks.assert_alike()
    for stream in ranks.leader.streams.values():
        ranks.leader.assert_as_expected(stream)


def test_a_turn_whose_publishing_is_broken_off_breaks_the_engine() -> None:
    ranks = _two()
    _load(ranks)
    leader = ranks.leader.runtime

    def publish(data: bytes) -> None:
        raise Interruption

    leader.loop.turns._publish = publish  # type: ignore[attr-defined]
    with pytest.raises(Interruption):
        leader.step()
    for _ in range(2):
        with pytest.raises(EngineBroken, match="publishing a turn was broken off"):
            leader.step()
    assert leader.scheduler._num_steps == 0


def test_followers_forget_requests_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.distributed.turns._LEAST_SWEPT", 4)
    ranks = _two()
    for _ in range(5):
        _load(ranks, 4)
        ranks.run()
    assert ranks.followers[0].turns.num_known <= 4 + 4  # twice those of the sweep before, and the arrivals since


@given(load=st.lists(st.tuples(prompts, sampled_params), min_size=1, max_size=4), seed=st.integers(0, 2**16))
@settings(max_examples=10, deadline=None)
def test_requests_without_a_seed_draw_the_same_on_all_ranks(
    load: list[tuple[list[int], SamplingParams]], seed: int
) -> None:
    ranks = _two(seed=seed)
    for prompt, wanted in load:
        request = ranks.leader.runtime.add(prompt, wanted)
        ranks.leader.streams[request.uid] = Stream(request, prompt)
    ranks.run()


def test_the_schedule_does_not_depend_on_the_process() -> None:
    """Hashes of strings differ between processes: salts and adapters are strings."""
    script = Path(__file__).parent / "helpers" / "print_schedule.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1]
    assert printed[0].count("\n") > 50
