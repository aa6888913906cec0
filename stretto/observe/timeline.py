"""Timeline: device time of every step, and the bubbles between steps. Is told things; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stretto.device.base import Device, Event


class TimedStep(Protocol):
    """A step whose device events can be read."""

    @property
    def begin(self) -> Event:
        """Recorded on the engine stream before the step's work."""

    @property
    def copy_done(self) -> Event:
        """Recorded on the engine stream after the copy of its results."""


@dataclass(frozen=True, slots=True)
class TimelineTotals:
    """Sums since the start, in seconds of device time."""

    steps: int
    busy_s: float
    bubble_s: float
    """Between two steps, while a request was runnable: the device had nothing to do and should have had."""

    @property
    def bubble_share(self) -> float:
        """Share of bubbles in the device time while something was runnable; 0 before the first step."""
        total = self.busy_s + self.bubble_s
        return self.bubble_s / total if total else 0.0


class Timeline:
    """Adds up device time, step by step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps = 0
        self._busy_s = 0.0
        self._bubble_s = 0.0
        self._previous: TimedStep | None = None

    def step_done(self, step: TimedStep, *, runnable: bool) -> None:
        """Count a processed step. `runnable`: something is still to be computed after it. hot path

        A step's events must stay as recorded until the next step is counted.
        """
        self._steps += 1
        self._busy_s += self._device.seconds_between(step.begin, step.copy_done)
        if self._previous is not None:
            self._bubble_s += max(0.0, self._device.seconds_between(self._previous.copy_done, step.begin))
        self._previous = step if runnable else None

    def totals(self) -> TimelineTotals:
        """The sums so far."""
        return TimelineTotals(self._steps, self._busy_s, self._bubble_s)
