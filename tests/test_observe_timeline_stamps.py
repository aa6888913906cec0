"""The timeline's figures are those that its stamps give: whole stories against a plain computation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.observe.timeline import LAUNCH, OTHER, PROCESS, RECEIVE, SCHEDULE, WAIT
from stretto.simulate.engine import Moment
from tests.helpers.told_timeline import Told


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
        launching = max(0.0, min(step.launch_end, end) - (end - busy))
        runnable_s += end - (table[-1][9] if before else step.receive_begin)
        host = [step.receive_begin, step.schedule_begin, step.launch_begin, step.launch_end]
        waited = [step.wait_begin, step.wait_end, step.process_end]
        table.append([step.index, *host, *waited, end - busy, end, bubble, window, lead, launching])
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
    sums = np.array(table).reshape(-1, 14).sum(0)
    assert totals.busy_s == pytest.approx(sums[9] - sums[8])
    assert (totals.bubble_s, totals.window_s, totals.lead_s, totals.launching_s) == tuple(map(pytest.approx, sums[10:]))
    host_s = [0.0] * 6
    for (phase, begin), (_, end) in pairwise(story.phases):
        host_s[phase] += end - begin
    told = (totals.receive_s, totals.schedule_s, totals.launch_s, totals.blocked_s, totals.process_s)
    assert told == tuple(map(pytest.approx, host_s[RECEIVE:]))
