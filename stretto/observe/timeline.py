"""Timeline: when the host did what and when the device was busy, step by step, always on. Decides nothing.

Owns a ring of the last steps and sums since the start. The loop calls one method wherever a phase begins; each reads
the clock once and allocates nothing that stays. What the figures mean is in `step_times.py`.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import numpy as np

from stretto.device.base import Device, Event
from stretto.observe.annotations import HostSpans, spans_wanted
from stretto.observe.step_times import COLUMNS, RecentSteps, TimelineTotals

__all__ = ["RecentSteps", "Timeline", "TimelineTotals"]

OTHER, RECEIVE, SCHEDULE, LAUNCH, WAIT, PROCESS = range(6)
_NAMES = ("", "stretto.receive", "stretto.schedule", "stretto.launch", "stretto.wait", "stretto.process")
_WIDTH = len(COLUMNS)
_COLUMN = {name: place for place, name in enumerate(COLUMNS)}
_RECEIVE_BEGIN, _SCHEDULE_BEGIN = _COLUMN["receive_begin"], _COLUMN["schedule_begin"]
_LAUNCH_BEGIN, _LAUNCH_END = _COLUMN["launch_begin"], _COLUMN["launch_end"]
_BLOCK_BEGIN, _BLOCK_END, _PROCESS_END = _COLUMN["block_begin"], _COLUMN["block_end"], _COLUMN["process_end"]
_DEVICE_BEGIN, _DEVICE_END = _COLUMN["device_begin"], _COLUMN["device_end"]
_BUBBLE, _WINDOW, _LEAD = _COLUMN["bubble_s"], _COLUMN["window_s"], _COLUMN["lead_s"]


class Planned(Protocol):
    """The plan of a step."""

    @property
    def index(self) -> int:
        """The step's number, counted from 0."""


class TimedStep(Protocol):
    """A step whose device events can be read."""

    @property
    def plan(self) -> Planned:
        """What was launched."""

    @property
    def begin(self) -> Event:
        """Recorded on the engine stream before the step's work."""

    @property
    def copy_done(self) -> Event:
        """Recorded on the engine stream after the copy of its results."""


class Timeline:
    """Is told by the loop where each phase of a turn begins. One thread tells; any may read.

    Args:
        device: whose clock and events count.
        size: steps that the ring keeps.
    """

    def __init__(self, device: Device, size: int = 1024) -> None:
        self._device = device
        self._now = device.now
        self._size = size
        self._ring = array("d", [float("nan")]) * (size * _WIDTH)  # its elements are cheaper to set than numpy's
        self._phase = OTHER
        self._since = 0.0
        self._phase_s = [0.0] * len(_NAMES)
        self._receive_begin = self._schedule_begin = self._launch_begin = 0.0
        self._wait_begin = self._wait_end = 0.0
        self._runnable_since = 0.0
        self._latest = -1
        """The step launched last."""
        self._latest_end = 0.0
        """When its launch had ended."""
        self._window_end = [0.0] * size
        self._done = -1
        """The step processed last."""
        self._steps = 0
        self._busy_s = self._bubble_s = self._runnable_s = self._window_s = self._lead_s = 0.0
        self._previous: TimedStep | None = None
        self._previous_end = 0.0
        self._spans: HostSpans | None = None

    # -- told by the loop -------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """A turn begins: messages are taken. hot path"""
        if spans_wanted():
            self._spans = self._spans or HostSpans()
            self._spans.begin_step(self._latest + 1)
        self._receive_begin = self._enter(RECEIVE)

    def schedule(self) -> None:
        """The next step is chosen. hot path"""
        self._schedule_begin = self._enter(SCHEDULE)

    def launch(self, plan: Planned) -> None:
        """`plan` is chosen and its launch begins. hot path"""
        now = self._launch_begin = self._enter(LAUNCH)
        if self._latest >= 0:
            place = self._latest % self._size
            if not self._window_end[place]:
                self._window_end[place] = now
        self._latest = plan.index
        self._window_end[plan.index % self._size] = 0.0
        if self._previous is None and self._done == plan.index - 1:
            self._runnable_since = self._receive_begin

    def launched(self) -> None:
        """The launch has ended. hot path"""
        now = self._enter(OTHER)
        ring, at = self._ring, self._latest % self._size * _WIDTH
        ring[at] = self._latest
        ring[at + _RECEIVE_BEGIN] = self._receive_begin
        ring[at + _SCHEDULE_BEGIN] = self._schedule_begin
        ring[at + _LAUNCH_BEGIN] = self._launch_begin
        ring[at + _LAUNCH_END] = now

    def wait(self, step: TimedStep) -> None:
        """The planned wait for a step's results begins. hot path"""
        now = self._wait_begin = self._enter(WAIT)
        if step.plan.index == self._latest:  # nothing is queued behind it: here the overlap ends
            self._window_end[self._latest % self._size] = now

    def process(self) -> None:
        """The results are there and are being used. hot path"""
        self._wait_end = self._enter(PROCESS)

    def step_done(self, step: TimedStep, *, runnable: bool) -> None:
        """A step is processed. `runnable`: something is still to be computed after it. hot path

        A step's events must stay as recorded until the next step is counted.
        """
        now = self._enter(OTHER)
        device, index, previous = self._device, step.plan.index, self._previous
        ring, at = self._ring, index % self._size * _WIDTH
        launch_begin, launch_end = ring[at + _LAUNCH_BEGIN], ring[at + _LAUNCH_END]
        busy_s = device.seconds_between(step.begin, step.copy_done)
        bubble_s = 0.0
        if previous is None:
            begin = launch_begin
        else:
            bubble_s = max(0.0, device.seconds_between(previous.copy_done, step.begin))
            begin = max(launch_begin, self._previous_end + bubble_s)
        # Device times on the host's clock: not before the launch, and not after the host has seen the results.
        end = min(begin + busy_s, self._wait_end)
        begin = end - busy_s
        lead_s = max(0.0, begin - launch_end)
        window_s = max(0.0, min(self._window_end[index % self._size], end) - launch_end)
        ring[at + _BLOCK_BEGIN] = self._wait_begin
        ring[at + _BLOCK_END] = self._wait_end
        ring[at + _PROCESS_END] = now
        ring[at + _DEVICE_BEGIN] = begin
        ring[at + _DEVICE_END] = end
        ring[at + _BUBBLE] = bubble_s
        ring[at + _WINDOW] = window_s
        ring[at + _LEAD] = lead_s
        self._runnable_s += end - (self._runnable_since if previous is None else self._previous_end)
        self._steps += 1
        self._busy_s += busy_s
        self._bubble_s += bubble_s
        self._window_s += window_s
        self._lead_s += lead_s
        self._done = index
        self._previous, self._previous_end = (step, end) if runnable else (None, end)

    def turn_done(self) -> None:
        """The turn has ended. hot path"""
        self._enter(OTHER)
        if self._spans is not None:
            self._spans.end_step()
            self._spans = None

    def _enter(self, phase: int) -> float:
        now = self._now()
        self._phase_s[self._phase] += now - self._since
        self._phase, self._since = phase, now
        if self._spans is not None:
            self._spans.phase(_NAMES[phase])
        return now

    # -- told to others ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps processed."""
        return self._steps

    def phase(self) -> tuple[int, float]:
        """The phase that the loop is in (OTHER: none), and for how many seconds."""
        phase, since = self._phase, self._since
        return phase, self._now() - since

    def totals(self) -> TimelineTotals:
        """The sums so far."""
        phases = self._phase_s
        return TimelineTotals(
            steps=self._steps,
            busy_s=self._busy_s,
            bubble_s=self._bubble_s,
            runnable_s=self._runnable_s,
            window_s=self._window_s,
            lead_s=self._lead_s,
            receive_s=phases[RECEIVE],
            schedule_s=phases[SCHEDULE],
            launch_s=phases[LAUNCH],
            blocked_s=phases[WAIT],
            process_s=phases[PROCESS],
        )

    def recent(self, count: int | None = None) -> RecentSteps:
        """The last `count` processed steps (at most as many as the ring keeps), oldest first; copies."""
        kept = min(self._done + 1, self._size - (self._latest - self._done))
        wanted = max(0, kept if count is None else min(count, kept))
        places = np.arange(self._done + 1 - wanted, self._done + 1) % self._size
        return RecentSteps(np.frombuffer(self._ring).reshape(self._size, _WIDTH)[places])
