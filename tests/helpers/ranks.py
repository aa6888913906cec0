"""Several ranks in one process: each with its own device, model, scheduler and loop, joined by queues in memory.

The leader is a `Simulation`; followers carry its turns out whenever the test lets them, one turn at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

from stretto.config import SchedulerConfig
from stretto.device.base import Device
from stretto.device.checking import CheckingDevice
from stretto.distributed.digest import DigestCheck, DigestReport
from stretto.distributed.turns import FollowerTurns, LeaderTurns
from stretto.request import FinishReason
from stretto.runtime import MakeTurns, Runtime
from stretto.scheduler.batch import StepOutput, StepPlan, StepResults
from stretto.scheduler.loop import Witness
from stretto.scheduler.scheduler import Scheduler
from tests.helpers.exact_model import ExactAttention, ExactModel
from tests.helpers.simulation import VOCAB, Simulation

MakeRuntime = Callable[..., Runtime]
Step = tuple[object, ...]
"""What a rank did in a step, for comparison without digests."""


class NothingYet(Exception):
    """The leader has published nothing more."""


class Recorder:
    """A witness that keeps what each step did, and passes it on."""

    def __init__(self, witness: Witness) -> None:
        self.steps: list[Step] = []
        self.witness = witness

    def __call__(self, plan: StepPlan, results: StepResults, output: StepOutput) -> None:
        arrays = (plan.slots_B, plan.start_B, plan.num_new_B, plan.page_id_U, plan.sampled_S, results.tokens_S)
        ends = [(request.uid, request.finish_reason) for request in output.finished]
        self.steps.append((*(array.tolist() for array in arrays), ends))
        self.witness(plan, results, output)


class Follower:
    """A rank above 0."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        make_witness: Callable[[Scheduler], Witness],
        make_turns: Callable[[Follower], FollowerTurns] | None = None,
        make_runtime: MakeRuntime = Runtime,
    ) -> None:
        self.config = config
        self.device = device
        self.inbox: deque[bytes] = deque()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.terminal: dict[int, FinishReason | None] = {}
        self.turns = FollowerTurns(self.receive, look_every_s=0.0, look=self.look)
        if make_turns is not None:
            self.turns = make_turns(self)
        attention = ExactAttention(config.num_pages, config.page_size)
        if isinstance(device, CheckingDevice):
            device.on_release("page", attention.poison_page)
        self.runtime = make_runtime(
            config,
            device,
            ExactModel(config.vocab_size),
            attention,
            make_turns=lambda inbox, now: self.turns,
            make_witness=make_witness,
        )
        if isinstance(device, CheckingDevice):
            tables = self.runtime.engine.tables
            device.on_release("row", lambda slot: tables.token_ids_RL[slot].fill_(VOCAB - 1))

    def receive(self, timeout_s: float | None) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def look(self) -> None:
        raise NothingYet

    def turn(self) -> bool:
        """Carry out one turn, if the leader has published one more."""
        if self.runtime.loop.stopped:
            return False
        try:
            outputs = self.runtime.step()
        except NothingYet:
            return False
        for output in outputs:
            for uid, token in zip(output.uids.tolist(), output.tokens.tolist(), strict=True):
                self.tokens[uid].append(token)
            for request in output.finished:
                assert request.uid not in self.terminal
                self.terminal[request.uid] = request.finish_reason
        self.runtime.scheduler.check()
        return True

    def catch_up(self) -> None:
        """Carry out all that was published."""
        while self.turn():
            pass


class Ranks:
    """A leader and its followers. `eager` followers carry a turn out before the leader itself does."""

    def __init__(
        self,
        config: SchedulerConfig,
        devices: Sequence[Device],
        *,
        eager: bool = False,
        make_turns: Callable[[Follower], FollowerTurns] | None = None,
        make_runtime: MakeRuntime = Runtime,
    ) -> None:
        """`make_turns` and `make_runtime` replace parts of the followers."""
        self.eager = eager
        self.recorders: list[Recorder] = []
        self.num_messages = 0
        self.leader = Simulation(config, devices[0], partial(Runtime, make_turns=self._leads, make_witness=self._check))
        self.followers = [
            Follower(config, device, partial(self._report, rank), make_turns, make_runtime)
            for rank, device in enumerate(devices[1:], 1)
        ]
        self.check = DigestCheck(self.leader.runtime.scheduler, range(1, len(devices)))
        self.recorders[0].witness = self.check

    def publish(self, data: bytes) -> None:
        self.num_messages += 1
        for follower in self.followers:
            follower.inbox.append(data)
            if self.eager:
                follower.catch_up()

    def turn(self) -> None:
        """A turn of the leader."""
        self.leader.turn()

    def stop(self) -> None:
        """The last turn: what has not ended by then never does, on any rank."""
        turns = self.leader.runtime.loop.turns
        assert isinstance(turns, LeaderTurns)
        turns.stop()
        self.turn()
        self.catch_up()
        self.assert_alike()
        for runtime in [self.leader.runtime, *(follower.runtime for follower in self.followers)]:
            assert runtime.loop.stopped
            assert not runtime.loop.in_flight

    def run(self, max_turns: int = 5_000) -> None:
        """Turn until nothing is left to do on any rank; then everything must be at rest, and alike."""
        for _ in range(max_turns):
            if not self.leader.runtime.has_work:
                break
            self.turn()
        self.leader.assert_at_rest()
        self.catch_up()
        self.assert_alike()
        for follower in self.followers:
            stats = follower.runtime.stats()
            assert stats.num_free_pages == stats.num_pages
            assert follower.runtime.scheduler.slots.num_free == follower.config.num_slots - 1
            assert not follower.runtime.has_work

    def catch_up(self) -> None:
        """Let every follower carry out all that was published."""
        for follower in self.followers:
            follower.catch_up()

    def assert_alike(self) -> None:
        """Every rank that has caught up has done and told the same."""
        steps = self.recorders[0].steps
        assert self.check.difference is None
        assert self.check.num_compared == len(steps)
        streams = self.leader.streams.values()
        for recorder, follower in zip(self.recorders[1:], self.followers, strict=True):
            assert recorder.steps == steps
            assert follower.terminal == {s.request.uid: s.terminal[0] for s in streams if s.terminal}
            assert follower.tokens == {s.request.uid: s.tokens for s in streams if s.tokens}

    def first_difference(self) -> int:
        """The first step that a rank did in another way than the leader, found without digests."""
        steps = self.recorders[0].steps
        return next(
            index
            for index, step in enumerate(steps)
            if any(len(r.steps) > index and r.steps[index] != step for r in self.recorders)
        )

    @property
    def _leads(self) -> MakeTurns:
        return lambda inbox, now: LeaderTurns(inbox, now, lambda data: self.publish(data))

    def _check(self, scheduler: Scheduler) -> Witness:
        return self._recorded(lambda plan, results, output: None)  # the check needs the scheduler, which needs this

    def _report(self, rank: int, scheduler: Scheduler) -> Witness:
        return self._recorded(DigestReport(scheduler, lambda data: self._take(rank, data)))

    def _recorded(self, witness: Witness) -> Recorder:
        self.recorders.append(Recorder(witness))
        return self.recorders[-1]

    def _take(self, rank: int, data: bytes) -> None:
        self.check.take(rank, data)
