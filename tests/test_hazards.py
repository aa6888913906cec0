"""Every hazard of the design's table: with its guard removed the checker reports exactly it; with it, nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from stretto.cache.base import NO_KEY, CacheKey, Prefix
from stretto.cache.page_pool import PagePool
from stretto.config import SchedulerConfig
from stretto.device.base import Device, Region
from stretto.device.checking import CheckingDevice
from stretto.device.hazards import Hazard, HazardError
from stretto.engine.engine import Engine, InFlightStep
from stretto.engine.runner import MakeRunner
from stretto.engine.staging import RingEntry, StagingRing
from stretto.request import FinishReason, Request, SamplingParams, TokenArray
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepOutput, StepPlan, StepResults
from stretto.scheduler.lifecycle import Lifecycle
from stretto.scheduler.loop import Loop
from stretto.scheduler.scheduler import Scheduler
from tests.helpers.exact_model import ExactAttention, ExactModel
from tests.helpers.simulation import Simulation, small_config


class EngineThatDoesNotAwaitThePlan(Engine):
    def _await_plan(self) -> None:
        pass


class LoopThatDoesNotWaitForResults(Loop):
    def _process_oldest(self) -> StepOutput:
        step = self.in_flight.popleft()
        return self.scheduler.process(step.plan, self.engine.results(step))


class RingOfOneWithoutEvents(StagingRing):
    def __init__(self, device: Device, config: SchedulerConfig) -> None:
        super().__init__(device, config, size=1)

    def next(self) -> RingEntry:
        return self._entries[0]


class EngineWithOneStagingBuffer(Engine):
    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        model: ExactModel,
        attention: ExactAttention,
        *,
        checked: bool,
        make_runner: MakeRunner,
    ) -> None:
        super().__init__(config, device, model, attention, checked=checked, make_runner=make_runner)
        self.ring = RingOfOneWithoutEvents(device, config)


class EngineThatFeedsNothingBack(Engine):
    def feed_back(self, slot_S: torch.Tensor, position_S: torch.Tensor, tokens_S: torch.Tensor) -> None:
        pass

    def fed_back(self, plan: StepPlan) -> list[Region]:
        return []


class EngineWithAHostProcessor(Engine):
    """Looks at each row's newest tokens on the host before it launches, as a penalty written on the host would."""

    scheduler: Scheduler

    def launch(self, plan: StepPlan) -> InFlightStep:
        rows = plan.slots_B[plan.sampled_S]
        needed = plan.position_S - 1
        self.device.host_access(reads=self.scheduler.reports.history(rows, needed))
        return super().launch(plan)


class LifecycleThatReleasesAtOnce(Lifecycle):
    def _leave_when_processed(self, request: Request) -> None:
        self.release(request)


class LifecycleThatReleasesAbortedAtOnce(Lifecycle):
    def _leave_when_processed(self, request: Request) -> None:
        if request.finish_reason is FinishReason.ABORT:
            self.release(request)
        else:
            super()._leave_when_processed(request)


class LifecycleThatMiscountsSteps(Lifecycle):
    """Takes every finished request for one that no launched step holds: only the device can know better."""

    def _leave_when_processed(self, request: Request) -> None:
        self.slots.in_flight[request.slot] = 0
        self.release(request)


class LifecycleThatKeepsDeadRows(Lifecycle):
    def finish(self, request: Request, reason: FinishReason) -> None:
        slot = request.slot
        super().finish(request, reason)
        self.slots.active[slot] = True


class SchedulerThatJudgesByLiveCounters(Scheduler):
    def process(self, plan: StepPlan, results: StepResults) -> StepOutput:
        rows = plan.slots_B[plan.sampled_S]
        live = self.slots.length[rows] + 1 >= self.slots.final_len[rows]
        return super().process(replace(plan, is_last_S=live), results)


class SchedulerThatNeverWaitsForReleases(Scheduler):
    def _awaits_release(self, need: int) -> bool:
        return False


class LifecycleThatCountsRetiringRequests(Lifecycle):
    @property
    def num_running(self) -> int:
        return sum(request is not None for request in self.slots.requests)


class LoopThatSchedulesFirst(Loop):
    def overlap_loop(self) -> list[StepOutput]:
        outputs = self._receive()
        launched = self._schedule_and_launch()
        if self.in_flight and (not launched or len(self.in_flight) > self.depth):
            outputs.append(self._process_oldest())
        return outputs


class CacheThatEvictsPagesInUse:
    """Keeps what it is offered and, when asked to evict, gives pages away whoever holds them."""

    def __init__(self) -> None:
        self.pool: PagePool | None = None
        self.pages: list[int] = []

    @property
    def num_evictable(self) -> int:
        return len(self.pages)

    def lock(self, token_ids: TokenArray, key: CacheKey = NO_KEY) -> Prefix:
        return Prefix((), 0)

    def unlock(self, prefix: Prefix) -> None:
        pass

    def check(self) -> None:
        pass

    def store(self, token_ids: TokenArray, pages: Sequence[int], prefix: Prefix) -> Prefix:
        assert self.pool is not None
        new = [page for page in pages if page not in self.pages]
        self.pool.share(new)
        self.pages.extend(new)
        return prefix

    def evict(self, num_pages: int) -> list[int]:
        assert self.pool is not None
        freed: list[int] = []
        while self.pages and len(freed) < num_pages:
            page = self.pages.pop(0)
            while self.pool.references(page):
                freed += self.pool.give_back([page])
        return freed

    def held(self) -> list[int]:
        return self.pages

    @property
    def num_held(self) -> int:
        return len(self.pages)


Make = Callable[[SchedulerConfig, Device, ExactModel, ExactAttention], Runtime]


def _make(**types: object) -> Make:
    def make(config: SchedulerConfig, device: Device, model: ExactModel, attention: ExactAttention) -> Runtime:
        return Runtime(config, device, model, attention, **types)  # type: ignore[arg-type]

    return make


def _make_with_host_processor(
    config: SchedulerConfig, device: Device, model: ExactModel, attention: ExactAttention
) -> Runtime:
    runtime = Runtime(config, device, model, attention, engine_type=EngineWithAHostProcessor)
    assert isinstance(runtime.engine, EngineWithAHostProcessor)
    runtime.engine.scheduler = runtime.scheduler
    return runtime


def _make_with_evicting_cache(
    config: SchedulerConfig, device: Device, model: ExactModel, attention: ExactAttention
) -> Runtime:
    cache = CacheThatEvictsPagesInUse()
    runtime = Runtime(config, device, model, attention, cache=cache)
    cache.pool = runtime.scheduler.pages.pool
    return runtime


def _make_unmonitored(config: SchedulerConfig, device: Device, model: ExactModel, attention: ExactAttention) -> Runtime:
    runtime = Runtime(
        config, device, model, attention, scheduler_type=partial(Scheduler, lifecycle_type=LifecycleThatMiscountsSteps)
    )
    runtime.scheduler.monitor = None
    return runtime


@dataclass(frozen=True)
class Removal:
    """A guard taken away, and the load under which that shows."""

    hazard: Hazard
    make: Make
    aborts: bool = False
    pages: int = 25


REMOVALS = {
    "plan not awaited": Removal(Hazard.raw_plan, _make(engine_type=EngineThatDoesNotAwaitThePlan)),
    "results not awaited": Removal(Hazard.raw_results, _make(loop_type=LoopThatDoesNotWaitForResults)),
    "one staging buffer": Removal(Hazard.war_staging, _make(engine_type=EngineWithOneStagingBuffer)),
    "released at once": Removal(
        Hazard.war_pages_and_slots, _make(scheduler_type=partial(Scheduler, lifecycle_type=LifecycleThatReleasesAtOnce))
    ),
    "steps miscounted": Removal(Hazard.war_pages_and_slots, _make_unmonitored),
    "dead rows kept": Removal(
        Hazard.state_one_step_late, _make(scheduler_type=partial(Scheduler, lifecycle_type=LifecycleThatKeepsDeadRows))
    ),
    "aborted and released": Removal(
        Hazard.abort_in_flight,
        _make(scheduler_type=partial(Scheduler, lifecycle_type=LifecycleThatReleasesAbortedAtOnce)),
        aborts=True,
    ),
    "no token feedback": Removal(Hazard.token_feedback, _make(engine_type=EngineThatFeedsNothingBack)),
    "eviction in use": Removal(Hazard.eviction, _make_with_evicting_cache, pages=9),
    "live counters": Removal(Hazard.finish_judged_late, _make(scheduler_type=SchedulerThatJudgesByLiveCounters)),
    "host history": Removal(Hazard.history_one_step_late, _make_with_host_processor),
    "no wait for releases": Removal(
        Hazard.deferred_release_against_preemption, _make(scheduler_type=SchedulerThatNeverWaitsForReleases), pages=9
    ),
    "retiring counted": Removal(
        Hazard.retiring_in_admission_counts,
        _make(scheduler_type=partial(Scheduler, lifecycle_type=LifecycleThatCountsRetiringRequests)),
    ),
    "scheduled first": Removal(Hazard.first_token_kept_waiting, _make(loop_type=LoopThatSchedulesFirst)),
}


def _run(make: Make, *, seed: int, depth: int, aborts: bool, pages: int) -> None:
    """A load in which requests end by end-of-sequence and by length, wait for slots and, if few, for pages."""
    config = small_config(overlap_depth=depth, num_pages=pages, max_num_seqs=3)
    slow, fast = (0.0, 5e-3), (0.0, 1e-4)
    device_delay, host_delay = (slow, fast) if seed % 2 else (fast, slow)
    simulation = Simulation(config, CheckingDevice(seed, device_delay=device_delay, host_delay=host_delay), make)
    random = np.random.default_rng(seed)
    streams = []
    for _ in range(8):
        prompt = random.integers(1, 11, random.integers(1, 10)).tolist()
        params = SamplingParams(
            temperature=0, max_tokens=int(random.integers(1, 12)), ignore_eos=bool(random.integers(2))
        )
        streams.append(simulation.add(prompt, params))
    for _ in range(5):
        simulation.turn()
    if aborts:
        for stream in streams:
            simulation.runtime.end(stream.request)
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream, aborted=aborts)


@pytest.mark.parametrize("name", REMOVALS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_removed_guard_is_reported_as_its_hazard(name: str, depth: int) -> None:
    removal = REMOVALS[name]
    reported = set()
    for seed in range(12):
        try:
            _run(removal.make, seed=seed, depth=depth, aborts=removal.aborts, pages=removal.pages)
        except HazardError as error:
            reported.add(error.hazard)
    assert reported == {removal.hazard}


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("pages", [7, 9, 25])
@pytest.mark.parametrize("aborts", [False, True])
def test_with_all_guards_nothing_is_reported(depth: int, pages: int, aborts: bool) -> None:
    for seed in range(12):
        _run(Runtime, seed=seed, depth=depth, aborts=aborts, pages=pages)


def test_a_host_processor_is_safe_without_overlap() -> None:
    for seed in range(12):
        _run(_make_with_host_processor, seed=seed, depth=0, aborts=False, pages=25)


def test_every_hazard_of_the_table_has_a_removal() -> None:
    assert {removal.hazard for removal in REMOVALS.values()} == set(Hazard)
