"""The timeline: what it says of steps whose times are known by construction, and of real ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import SamplingParams
from stretto.device.base import Device
from stretto.device.checking import CheckingDevice
from stretto.observe.step_times import TimelineTotals
from stretto.observe.timeline import LAUNCH, OTHER, PROCESS, RECEIVE, SCHEDULE, WAIT, Timeline
from stretto.runtime import Runtime
from stretto.simulate.engine import Clock, Moment
from tests.helpers.llm_fixture import dummy_llm
from tests.helpers.simulation import Simulation, small_config


class Told:
    """A timeline that is told a story in virtual seconds."""

    def __init__(self, size: int = 8) -> None:
        self.clock = Clock()
        self.timeline = Timeline(cast(Device, self.clock), size)

    def launch(self, index: int, receive: float, schedule: float, begin: float, end: float) -> None:
        self.at(receive).begin_turn()
        self.at(schedule).enter(SCHEDULE)
        self.at(begin).enter(LAUNCH)
        self.at(end).launched(SimpleNamespace(index=index))

    def process(
        self, wait: float, there: float, done: float, device: tuple[float, float], *, runnable: bool = True
    ) -> None:
        step = SimpleNamespace(begin=Moment(device[0]), copy_done=Moment(device[1]))
        self.at(wait).enter(WAIT)
        self.at(there).enter(PROCESS)
        self.at(done).step_done(step, runnable=runnable)
        self.timeline.end_turn()

    def at(self, time: float) -> Timeline:
        self.clock.time = time
        return self.timeline


@dataclass
class Stamps:
    """What a story says of one step."""

    index: int
    receive_begin: float
    schedule_begin: float
    launch_begin: float
    launch_end: float
    device: tuple[float, float]
    next_launch_begin: float | None = None
    wait_begin: float = 0.0
    wait_end: float = 0.0
    process_end: float = 0.0
    runnable: bool = False


class Story(Told):
    """Turns made up by hypothesis, told and written down: up to three steps in flight, pauses, waits broken off."""

    def __init__(self, draw: st.DrawFn) -> None:
        super().__init__(size=6)
        self.draw = draw
        self.time, self.device_time = 5.0, draw(st.floats(-1e3, 1e3))
        self.phases: list[tuple[int, float]] = [(OTHER, 0.0)]
        self.steps: list[Stamps] = []
        self.num_done = 0

    def stamp(self, phase: int) -> float:
        """Some time later, a phase begins."""
        self.time += self.draw(st.sampled_from([0.0, 0.001, 0.25, 2.0]))
        self.phases.append((phase, self.time))
        self.clock.time = self.time
        return self.time

    def turn(self) -> None:
        receive_begin = self.stamp(RECEIVE)
        self.timeline.begin_turn()
        schedule_begin = self.stamp(SCHEDULE)
        self.timeline.enter(SCHEDULE)
        if len(self.steps) - self.num_done < 3 and self.draw(st.booleans()):
            launch_begin = self.stamp(LAUNCH)
            self.timeline.enter(LAUNCH)
            launch_end = self.stamp(OTHER)
            self.timeline.launched(SimpleNamespace(index=len(self.steps)))
            begin = self.device_time + self.draw(st.sampled_from([-0.001, 0.0, 0.1, 3.0]))  # clocks may step back
            self.device_time = begin + self.draw(st.sampled_from([0.01, 1.0, 4.0]))
            if self.num_done < len(self.steps):
                self.steps[-1].next_launch_begin = launch_begin
            stamps = (receive_begin, schedule_begin, launch_begin, launch_end)
            self.steps.append(Stamps(len(self.steps), *stamps, (begin, self.device_time)))
        while self.num_done < len(self.steps) and self.draw(st.booleans()):
            self.processed(self.steps[self.num_done])
        self.stamp(OTHER)
        self.timeline.end_turn()

    def processed(self, step: Stamps) -> None:
        step.wait_begin = self.stamp(WAIT)
        self.timeline.enter(WAIT)
        while self.draw(st.integers(0, 4)) == 0:  # broken off: the turn begins anew
            self.stamp(RECEIVE)
            self.timeline.begin_turn()
            step.wait_begin = self.stamp(WAIT)
            self.timeline.enter(WAIT)
        step.wait_end = self.stamp(PROCESS)
        self.timeline.enter(PROCESS)
        self.num_done += 1
        step.runnable = self.num_done < len(self.steps) or self.draw(st.booleans())
        step.process_end = self.stamp(OTHER)
        begin, end = step.device
        events = SimpleNamespace(begin=Moment(begin), copy_done=Moment(end))
        self.timeline.step_done(events, runnable=step.runnable)


def figures(steps: list[Stamps]) -> tuple[list[list[float]], float]:
    """Rows of the table, and the wall time while anything was runnable: from the stamps, word by word."""
    table, runnable_s = [], 0.0
    for number, step in enumerate(steps):
        before = steps[number - 1] if number and steps[number - 1].runnable else None
        busy = step.device[1] - step.device[0]
        bubble = max(0.0, step.device[0] - before.device[1]) if before else 0.0
        earliest = max(step.launch_begin, table[-1][9] + bubble) if before else step.launch_begin
        end = min(earliest + busy, step.wait_end)
        window_end = step.wait_begin if step.next_launch_begin is None else step.next_launch_begin
        window = max(0.0, min(window_end, end) - step.launch_end)
        lead = max(0.0, end - busy - step.launch_end)
        runnable_s += end - (table[-1][9] if before else step.receive_begin)
        host = [step.receive_begin, step.schedule_begin, step.launch_begin, step.launch_end]
        waited = [step.wait_begin, step.wait_end, step.process_end]
        table.append([step.index, *host, *waited, end - busy, end, bubble, window, lead])
    return table, runnable_s


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_figures_are_those_that_the_stamps_give(data: st.DataObject) -> None:
    story = Story(data.draw)
    for _ in range(data.draw(st.integers(1, 12))):
        story.turn()
    done = story.steps[: story.num_done]
    table, runnable_s = figures(done)
    totals, recent = story.timeline.totals(), story.timeline.recent()
    assert recent.table.tolist() == [pytest.approx(row) for row in table[-6:]]
    assert totals.steps == story.timeline.steps == len(done)
    assert totals.runnable_s == pytest.approx(runnable_s)
    sums = np.array(table).reshape(-1, 13).sum(0)
    assert totals.busy_s == pytest.approx(sums[9] - sums[8])
    assert (totals.bubble_s, totals.window_s, totals.lead_s) == tuple(map(pytest.approx, sums[10:]))
    host_s = [0.0] * 6
    for (phase, begin), (_, end) in pairwise(story.phases):
        host_s[phase] += end - begin
    told = (totals.receive_s, totals.schedule_s, totals.launch_s, totals.blocked_s, totals.process_s)
    assert told == tuple(map(pytest.approx, host_s[RECEIVE:]))


def test_the_phase_is_told_with_its_time_so_far() -> None:
    told = Told()
    seen = []
    for phase in (SCHEDULE, LAUNCH, WAIT, PROCESS, OTHER):
        told.at(3.0 * phase).enter(phase)
        told.clock.time += 0.5
        seen.append(told.timeline.phase())
    assert seen == [(phase, 0.5) for phase in (SCHEDULE, LAUNCH, WAIT, PROCESS, OTHER)]


def overlapped() -> Told:
    """Two steps at depth 1: the second is launched while the first runs, and no bubble is between them."""
    told = Told()
    told.launch(0, receive=1.0, schedule=1.1, begin=1.3, end=1.5)
    told.timeline.end_turn()
    told.launch(1, receive=2.0, schedule=2.1, begin=2.3, end=2.5)
    told.process(wait=2.5, there=11.3, done=11.4, device=(1.3, 11.3))
    told.process(wait=11.5, there=21.3, done=21.4, device=(11.3, 21.3), runnable=False)
    return told


def test_an_overlapped_pair_of_steps_has_no_bubble() -> None:
    totals = overlapped().timeline.totals()
    assert totals.steps == 2
    assert totals.busy_s == pytest.approx(20.0)
    assert totals.bubble_s == 0
    assert totals.runnable_s == pytest.approx(20.3)  # from the turn that took the request in
    assert totals.occupancy == pytest.approx(20.0 / 20.3)


def test_the_overlap_window_ends_at_the_next_launch_or_at_a_wait_with_nothing_queued_behind() -> None:
    steps = overlapped().timeline.recent()
    # Step 0: to the launch of step 1; the wait for step 0 with step 1 queued ends nothing. Step 1: to its own wait.
    assert steps.column("window_s").tolist() == pytest.approx([2.3 - 1.5, 11.5 - 2.5])


def test_the_lead_is_the_time_that_a_launched_step_lay_queued() -> None:
    assert overlapped().timeline.recent().column("lead_s").tolist() == pytest.approx([0.0, 11.3 - 2.5])


def test_host_time_is_counted_by_phase() -> None:
    totals = overlapped().timeline.totals()
    assert totals.receive_s == pytest.approx(0.2)
    assert totals.schedule_s == pytest.approx(0.4)
    assert totals.launch_s == pytest.approx(0.4)
    assert totals.blocked_s == pytest.approx(8.8 + 9.8)
    assert totals.process_s == pytest.approx(0.2)
    assert totals.host_s == pytest.approx(1.2)


def test_a_late_launch_is_a_bubble_while_something_is_runnable() -> None:
    told = Told()
    told.launch(0, 0.0, 0.0, 0.0, 0.1)
    told.process(0.1, 5.0, 5.5, device=(0.0, 5.0))
    told.launch(1, 6.0, 6.0, 7.0, 7.1)
    told.process(7.1, 12.0, 12.1, device=(7.0, 12.0))
    totals = told.timeline.totals()
    assert totals.bubble_s == pytest.approx(2.0)
    assert totals.bubble_share == pytest.approx(2 / 12)
    assert told.timeline.recent().bubble_share == pytest.approx(2 / 12)


def test_a_pause_without_requests_is_neither_bubble_nor_wall_time() -> None:
    told = Told()
    told.launch(0, 0.0, 0.0, 0.0, 0.1)
    told.process(0.1, 5.0, 5.1, device=(0.0, 5.0), runnable=False)
    told.launch(1, 100.0, 100.1, 100.2, 100.3)
    told.process(100.3, 105.2, 105.3, device=(100.2, 105.2), runnable=False)
    totals = told.timeline.totals()
    assert totals.bubble_s == 0
    assert totals.runnable_s == pytest.approx(5.0 + 5.2)
    assert totals.receive_s + totals.schedule_s == pytest.approx(0.2)


def test_a_step_that_ends_before_its_launch_does_has_no_window() -> None:
    """As after a hidden sync in the launch."""
    told = Told()
    told.launch(0, 0.0, 0.0, 0.0, 6.0)
    told.process(6.1, 6.1, 6.2, device=(0.0, 5.0))
    assert told.timeline.recent().column("window_s").tolist() == [0.0]
    assert told.timeline.totals().overlap_window_s == 0.0


def test_device_times_lie_between_launch_and_results_on_a_clock_of_their_own() -> None:
    told = Told()
    told.launch(0, 0.0, 0.0, 1.0, 1.1)
    told.process(1.2, 4.0, 4.1, device=(777.0, 779.5))
    told.launch(1, 4.2, 4.2, 4.3, 4.4)
    told.process(4.5, 7.0, 7.1, device=(780.0, 782.0))
    steps = told.timeline.recent()
    assert steps.column("device_begin").tolist() == pytest.approx([1.0, 4.3])
    assert steps.column("device_end").tolist() == pytest.approx([3.5, 6.3])
    assert steps.column("bubble_s").tolist() == pytest.approx([0.0, 0.5])


def test_the_ring_keeps_the_last_steps() -> None:
    told = Told(size=8)
    for index in range(20):
        told.launch(index, index, index, index, index + 0.1)
        told.process(index + 0.1, index + 0.9, index + 0.95, device=(index, index + 0.9))
    assert told.timeline.recent().column("index").tolist() == list(range(12, 20))
    assert told.timeline.recent(3).column("index").tolist() == [17, 18, 19]
    assert len(told.timeline.recent(0)) == 0
    assert told.timeline.totals().steps == 20


def test_before_the_first_step_there_is_nothing_and_no_division_by_zero() -> None:
    timeline = Told().timeline
    assert timeline.totals() == TimelineTotals(0, 0.0, 0.0)
    assert (timeline.totals().bubble_share, timeline.totals().occupancy, timeline.totals().overlap_window_s) == (
        0,
        0,
        0,
    )
    assert len(timeline.recent()) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_recorded_times_of_a_virtual_run_are_in_order(depth: int) -> None:
    simulation = Simulation(small_config(overlap_depth=depth), CheckingDevice(5), partial(Runtime))
    for number in range(5):
        simulation.add([1 + number, 2, 3], SamplingParams(temperature=0, max_tokens=8))
    simulation.run()
    steps = simulation.runtime.timeline.recent()
    assert steps.column("index").tolist() == list(range(len(steps)))
    order = ["receive_begin", "schedule_begin", "launch_begin", "launch_end", "block_begin", "block_end", "process_end"]
    for earlier, later in pairwise(order):
        assert (steps.column(earlier) <= steps.column(later)).all()
    assert (np.diff(steps.column("device_end")) > 0).all()
    assert (steps.column("launch_begin") <= steps.column("device_begin") + 1e-9).all()
    assert (steps.column("device_end") <= steps.column("block_end") + 1e-9).all()


def test_an_llm_tells_its_figures(tmp_path: Any) -> None:
    with dummy_llm(tmp_path, overlap_depth=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate({"prompt_token_ids": [3, 4, 5]}, params, use_tqdm=False)
        stats = llm.stats()
        assert stats.hidden_syncs is None  # nobody watches
        assert 0 < stats.occupancy <= 1
        assert stats.runnable_s >= stats.busy_s * (1 - 1e-9)
        assert stats.overlap_window_s > 0
        assert min(stats.receive_s, stats.schedule_s, stats.launch_s, stats.blocked_s, stats.process_s) > 0
        steps = llm.recent_steps(5)
        assert len(steps) == 5
        assert (steps.column("device_end") > steps.column("device_begin")).all()
