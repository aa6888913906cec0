"""A small pipeline with every guard of the engine: each guard can be left out, and the checker says which one.

One request after another decodes in slot 0, up to DEPTH steps ahead of the host: the host writes a plan into a staging
ring, the scheduler stream copies it to the device, the engine stream runs a step that reads the plan, the last token
and the request's page, and copies the results back. A request is known to have finished only when the results of its
last step are processed; by then further steps that hold its page have been launched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.device.base import Access, Event, Region
from stretto.device.checking import CheckingDevice
from stretto.device.delayed import DelayedCpuDevice
from stretto.device.hazards import Hazard, HazardError
from stretto.device.poison import poison

DEPTH = 2
STEPS = 14
REQUEST_STEPS = 4  # a request finishes with its fourth token
MODULUS = 9973

HAZARD_WITHOUT = {
    "the engine waits for the copy of the plan": Hazard.raw_plan,
    "the host waits for the results": Hazard.raw_results,
    "the host waits before it refills a staging buffer": Hazard.war_staging,
    "the copy waits until the step has read the older plan": Hazard.war_staging,
    "release waits for the steps in flight": Hazard.war_pages_and_slots,
    "the step stores its token on the device": Hazard.token_feedback,
}


@dataclass
class Step:
    """One launched step, as the host has to remember it."""

    request: int
    page: int
    position: int
    copy_done: Event
    results_entry: int


@dataclass
class Pipeline:
    """The pipeline on one device; `missing` names the guard that is left out."""

    device: CheckingDevice | DelayedCpuDevice
    ring: int
    missing: str = ""
    outputs: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.device
        self.scheduler, self.engine = device.stream("scheduler"), device.stream("engine")
        self.plan_host = [device.pinned((3,), torch.int64) for _ in range(self.ring)]
        self.plan_device = [np.full(3, -1, np.int64) for _ in range(self.ring)]
        self.copied = [device.event() for _ in range(self.ring)]
        self.unpacked = [device.event() for _ in range(self.ring)]
        # A ring of results as deep as the steps that can be in flight.
        self.results_host = [device.pinned((2,), torch.int64) for _ in range(DEPTH + 1)]
        self.tokens = np.full(STEPS + 1, -1, np.int64)
        self.pages = np.zeros(2, np.int64)  # as few as will do, so that a released one is taken again at once
        self.sampled = np.zeros(2, np.int64)
        self.free_pages = list(range(len(self.pages)))
        self.in_flight: deque[Step] = deque()
        device.on_release("page", lambda page: poison(self.pages[page : page + 1]))

    def guard(self, name: str) -> bool:
        assert name in HAZARD_WITHOUT
        return name != self.missing

    # Work on the device.

    def copy_plan(self, entry: int) -> None:
        self.plan_device[entry][:] = self.plan_host[entry].array

    def forward(self, entry: int) -> None:
        position, page, first = (int(number) for number in self.plan_device[entry])
        if not 0 <= position < STEPS or not 0 <= page < len(self.pages):
            self.sampled[:] = -1  # a garbage plan; the kernel of a GPU would read somewhere
            return
        # The page plays the KV cache: what a step computes depends on all that its request has put there.
        context = int(self.tokens[position]) + (0 if first else int(self.pages[page]))
        self.pages[page] = context % MODULUS
        self.sampled[:] = (context * 7 + position) % MODULUS, self.pages[page]
        if self.guard("the step stores its token on the device"):
            self.tokens[position + 1] = self.sampled[0]

    def copy_results(self, entry: int) -> None:
        self.results_host[entry].array[:] = self.sampled

    # The host.

    def start(self) -> None:
        self.device.host_access(writes=[("token", 0)])
        self.tokens[0] = 1
        request, request_step = 0, 0
        page = self.take_page()
        for position in range(STEPS):
            self.launch(request, page, position, first=request_step == 0)
            request_step += 1
            while len(self.in_flight) > DEPTH:
                finished = self.process_oldest(REQUEST_STEPS)
                # The token that finishes a request is seen DEPTH steps late; those steps were launched with its page.
                if finished == request:
                    request, request_step, page = request + 1, 0, self.take_page()
        while self.in_flight:
            self.process_oldest(REQUEST_STEPS)

    def take_page(self) -> int:
        page = self.free_pages.pop()
        self.device.taken([("page", page)])
        return page

    def launch(self, request: int, page: int, position: int, *, first: bool) -> None:
        entry, results_entry = position % self.ring, position % (DEPTH + 1)
        staging, plan = ("staging.host", entry), ("staging.device", entry)
        if self.guard("the host waits before it refills a staging buffer"):
            self.copied[entry].synchronize()
        self.device.host_access(writes=[staging])
        self.plan_host[entry].array[:] = position, page, first
        if self.guard("the copy waits until the step has read the older plan"):
            self.scheduler.wait(self.unpacked[entry])
        self.scheduler.run(self.copy_plan, entry, access=lambda: Access(reads=(staging,), writes=(plan,)))
        self.scheduler.record(self.copied[entry])
        if self.guard("the engine waits for the copy of the plan"):
            self.engine.wait_stream(self.scheduler)
        self.engine.run(self.forward, entry, access=lambda: self.forward_access(plan, page, position, first))
        self.engine.record(self.unpacked[entry])
        results = ("results.host", results_entry)
        self.engine.run(self.copy_results, results_entry, access=lambda: Access(writes=(results,)))
        copy_done = self.device.event()
        self.engine.record(copy_done)
        self.in_flight.append(Step(request, page, position, copy_done, results_entry))

    def forward_access(self, plan: Region, page: int, position: int, first: bool) -> Access:
        cache, token, sampled = ("page", page), ("token", position), ("token", position + 1)
        stored = (sampled,) if self.guard("the step stores its token on the device") else ()
        return Access(reads=(plan, token) if first else (plan, token, cache), writes=(cache, *stored))

    def process_oldest(self, finish_after: int) -> int | None:
        """Take one step's results; the request, if it is known to have finished and its page was released."""
        step = self.in_flight.popleft()
        if self.guard("the host waits for the results"):
            step.copy_done.synchronize()
        results = self.results_host[step.results_entry].array
        self.device.host_access(reads=[("results.host", step.results_entry)])
        self.outputs.append((step.request, int(results[0]), int(results[1])))
        processed = sum(request == step.request for request, _, _ in self.outputs)
        held = sum(other.request == step.request for other in self.in_flight)
        if self.guard("release waits for the steps in flight"):
            release = processed >= finish_after and held == 0
        else:
            release = processed == finish_after
        if release:
            self.device.released([("page", step.page)])
            self.free_pages.append(step.page)
        return step.request if processed == finish_after else None


def serial_reference() -> list[tuple[int, int, int]]:
    """The outputs, computed without any device: each step on its own, in order."""
    outputs, token, cache = [], 1, 0
    request, request_steps = 0, 0
    for position in range(STEPS):
        context = token + (0 if request_steps == 0 else cache)
        cache = context % MODULUS
        token = (context * 7 + position) % MODULUS
        outputs.append((request, token, cache))
        request_steps += 1
        # The host learns of the last token DEPTH launches later.
        if request_steps == REQUEST_STEPS + DEPTH:
            request, request_steps = request + 1, 0
    return outputs


RINGS = [1, 2, 3, 4]


def checking(seed: int, *, raising: bool = True) -> CheckingDevice:
    return CheckingDevice(seed, device_delay=(0.0, 1e-3), host_delay=(0.0, 2e-4), raising=raising)


@pytest.mark.parametrize("ring", RINGS)
def test_with_all_guards_nothing_is_reported_and_the_outputs_are_the_serial_ones(ring: int) -> None:
    expected = serial_reference()
    for seed in range(1000):
        pipeline = Pipeline(checking(seed), ring)
        pipeline.start()
        assert pipeline.outputs == expected, f"seed {seed}"


@given(
    seed=st.integers(0, 2**40),
    ring=st.sampled_from(RINGS),
    slowest_work=st.sampled_from([0.0, 1e-5, 1e-3, 1.0]),
    slowest_host=st.sampled_from([0.0, 1e-5, 1e-3, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_with_all_guards_nothing_is_reported_however_slow_host_and_device_are(
    seed: int, ring: int, slowest_work: float, slowest_host: float
) -> None:
    device = CheckingDevice(seed, device_delay=(0.0, slowest_work), host_delay=(0.0, slowest_host))
    pipeline = Pipeline(device, ring)
    pipeline.start()
    assert pipeline.outputs == serial_reference()


@pytest.mark.parametrize("missing", HAZARD_WITHOUT)
# No deeper ring than DEPTH: from there on, waiting for the results of a step covers its staging buffers too.
@pytest.mark.parametrize("ring", [1, 2])
def test_without_a_guard_exactly_its_hazard_is_reported_for_every_seed(missing: str, ring: int) -> None:
    for seed in range(100):
        pipeline = Pipeline(checking(seed), ring, missing)
        with pytest.raises(HazardError) as info:
            pipeline.start()
        assert info.value.hazard is HAZARD_WITHOUT[missing], f"seed {seed}: {info.value}"


@pytest.mark.parametrize("missing", HAZARD_WITHOUT)
def test_without_a_guard_outputs_are_corrupted_for_some_seed_and_only_its_hazard_is_collected(missing: str) -> None:
    expected, corrupted = serial_reference(), 0
    allowed = {HAZARD_WITHOUT[missing]}
    if missing == "the host waits for the results":
        allowed.add(Hazard.war_pages_and_slots)  # without that wait, the host knows of no step that it is done
    for seed in range(100):
        pipeline = Pipeline(checking(seed, raising=False), 1, missing)
        pipeline.start()
        assert HAZARD_WITHOUT[missing] in {error.hazard for error in pipeline.device.hazards} <= allowed, f"seed {seed}"
        corrupted += pipeline.outputs != expected
    assert corrupted > 0


@pytest.mark.parametrize("ring", RINGS)
def test_real_threads_with_all_guards(ring: int) -> None:
    for seed in range(3):
        device = DelayedCpuDevice(seed, device_delay=(0.0, 5e-4), host_delay=(0.0, 2e-4))
        pipeline = Pipeline(device, ring)
        pipeline.start()
        device.close()
        assert pipeline.outputs == serial_reference(), f"seed {seed}"


@pytest.mark.parametrize("missing", HAZARD_WITHOUT)
def test_real_threads_without_a_guard(missing: str) -> None:
    device = DelayedCpuDevice(0, device_delay=(0.0, 5e-4), host_delay=(0.0, 2e-4))
    pipeline = Pipeline(device, ring=2, missing=missing)
    with pytest.raises(HazardError) as info:
        pipeline.start()
    device.close()
    assert info.value.hazard is HAZARD_WITHOUT[missing]
