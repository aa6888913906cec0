"""Timeline: when the host did what and when the device was busy, step by step, always on. Decides nothing.

Owns a ring of the last steps and sums since the start. The loop tells it where each phase begins: one call, one look at
the clock. A step's own figures are all computed at once, when it is processed. What they mean is in `step_times.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from stretto.device.base import Device, Event
from stretto.observe.annotations import HostSpans, spans_wanted
from stretto.observe.step_times import COLUMNS, RecentSteps, TimelineTotals

__all__ = ["RecentSteps", "Timeline", "TimelineTotals"]

OTHER, RECEIVE, SCHEDULE, LAUNCH, WAIT, PROCESS = range(6)
_NAMES = ("", "stretto.receive", "stretto.schedule", "stretto.launch", "stretto.wait", "stretto.process")


class Planned(Protocol):
    """The plan of a step."""

    @property
    def index(self) -> int:
        """The step's number, counted from 0."""


class TimedStep(Protocol):
    """A step whose device events can be read."""

    @property
    def begin(self) -> Event:
        """Recorded on the engine stream before the step's work."""

    @property
    def copy_done(self) -> Event:
        """Recorded on the engine stream after the copy of its results."""


class Timeline:
    """Is told by the loop where each phase of a turn begins. One thread tells; any may read.

    In every step, so it must be cheap (`benchmarks/timeline_cost.py`): nothing is called that need not be, hence `if`
    instead of `max`, and a step's figures are kept as one tuple.

    Args:
        device: whose clock and events count.
        size: steps that the ring keeps.
    """

    def __init__(self, device: Device, size: int = 1024) -> None:
        self._now = device.now
        self._seconds_between = device.seconds_between
        self._phase = OTHER
        self._began = [0.0] * len(_NAMES)
        """When each phase began last; the running one tells since when it runs."""
        self._phase_s = [0.0] * len(_NAMES)
        self._latest = -1
        """The step launched last."""
        self._launched: deque[tuple[int, float, float, float, float]] = deque()
        """Of each step that is not processed: its index; receive, schedule and launch begin; launch end."""
        self._ring: deque[tuple[float, ...]] = deque(maxlen=size)
        """COLUMNS of the steps processed last."""
        self._steps = 0
        self._busy_s = self._bubble_s = self._runnable_s = 0.0
        self._window_s = self._lead_s = self._launching_s = 0.0
        self._previous_done: Event | None = None
        """The copy-done event of the step processed last, if something has been runnable ever since."""
        self._previous_end = 0.0
        self._spans: HostSpans | None = None

    # -- told by the loop -------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """A turn begins: messages are received. hot path"""
        if spans_wanted():
            self._spans = self._spans or HostSpans()
            self._spans.begin_step(self._latest + 1)
        self.enter(RECEIVE)

    def enter(self, phase: int) -> None:
        """A phase begins, and with it the one before has ended.

        OTHER: none. LAUNCH: the step to be launched is chosen. WAIT: the planned wait for the results of the oldest
        step. PROCESS: they are there and are being used. hot path
        """
        now = self._now()
        before, began = self._phase, self._began
        self._phase_s[before] += now - began[before]
        began[phase] = now
        self._phase = phase
        if self._spans is not None:
            self._spans.phase(_NAMES[phase])

    def launched(self, plan: Planned) -> None:
        """The launch of `plan` has ended. hot path"""
        self.enter(OTHER)
        index, began = plan.index, self._began
        self._launched.append((index, began[RECEIVE], began[SCHEDULE], began[LAUNCH], began[OTHER]))
        self._latest = index

    def step_done(self, step: TimedStep, *, runnable: bool) -> None:
        """The oldest launched step is processed. `runnable`: something is still to be computed after it. hot path

        A step's events must stay as recorded until the next step is counted.
        """
        self.enter(OTHER)
        began, launched = self._began, self._launched
        index, receive_begin, schedule_begin, launch_begin, launch_end = launched.popleft()
        wait_begin, wait_end = began[WAIT], began[PROCESS]

        # Device times on the host's clock: not before the launch, and not after the host has seen the results.
        busy_s = self._seconds_between(step.begin, step.copy_done)
        bubble_s, begin, runnable_since = 0.0, launch_begin, receive_begin
        if self._previous_done is not None:
            runnable_since = self._previous_end
            gap_s = self._seconds_between(self._previous_done, step.begin)
            if gap_s > 0.0:
                bubble_s = gap_s
            if runnable_since + bubble_s > begin:
                begin = runnable_since + bubble_s
        end = begin + busy_s
        if end > wait_end:
            end = wait_end
        begin = end - busy_s

        lead_s, launching_s = begin - launch_end, 0.0
        if lead_s < 0.0:
            launching_s = -lead_s if launch_end < end else busy_s
            lead_s = 0.0
        window_end = launched[0][3] if launched else wait_begin  # nothing was queued behind it: the wait ends overlap
        window_s = (window_end if window_end < end else end) - launch_end
        if window_s < 0.0:
            window_s = 0.0

        self._ring.append((
            index, receive_begin, schedule_begin, launch_begin, launch_end, wait_begin, wait_end, began[OTHER],
            begin, end, bubble_s, window_s, lead_s, launching_s,
        ))  # fmt: skip
        self._steps += 1
        self._busy_s += busy_s
        self._bubble_s += bubble_s
        self._window_s += window_s
        self._lead_s += lead_s
        self._launching_s += launching_s
        self._runnable_s += end - runnable_since
        self._previous_done, self._previous_end = (step.copy_done if runnable else None), end

    def end_turn(self) -> None:
        """The turn has ended. hot path"""
        if self._phase != OTHER:
            self.enter(OTHER)
        if self._spans is not None:
            self._spans.end_step()
            self._spans = None

    # -- told to others ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps processed."""
        return self._steps

    def phase(self) -> tuple[int, float]:
        """The phase that the loop is in (OTHER: none), and for how many seconds."""
        phase = self._phase
        return phase, self._now() - self._began[phase]

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
            launching_s=self._launching_s,
            receive_s=phases[RECEIVE],
            schedule_s=phases[SCHEDULE],
            launch_s=phases[LAUNCH],
            blocked_s=phases[WAIT],
            process_s=phases[PROCESS],
        )

    def recent(self, count: int | None = None) -> RecentSteps:
        """The last `count` processed steps (at most as many as the ring keeps), oldest first; copies."""
        kept = list(self._ring)
        wanted = kept if count is None else kept[max(0, len(kept) - count) :]
        return RecentSteps(np.array(wanted, dtype=np.float64).reshape(len(wanted), len(COLUMNS)))
