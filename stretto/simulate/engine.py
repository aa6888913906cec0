"""SimulatedEngine: stands where the engine stands, computes nothing, and says by a cost model how long it took.

The scheduler and the loop above it are the real ones, so a simulated schedule is the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import numpy as np

from stretto.device.base import Region
from stretto.scheduler.batch import IntArray, StepPlan, StepResults
from stretto.simulate.values import number

Sample = Callable[[StepPlan], IntArray]
"""Tokens of a step's sampled rows (int64 [S]); -1 fails a row."""

MOST_COST_S = 3600.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes, in seconds: device = step + tokens x token + rows x row + context x context_token."""

    step_s: float = 2e-3
    """Every step: weights, launches."""
    prefill_token_s: float = 2e-6
    """Each prompt token."""
    decode_row_s: float = 5e-6
    """Each decoding request."""
    context_token_s: float = 2.5e-8
    """Each token of KV that a decoding request reads."""
    host_turn_s: float = 2e-4
    """Host time of one turn of the loop."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a cost that is negative, not a number, or above an hour."""
        for field in fields(self):
            number(field.name, getattr(self, field.name), 0, MOST_COST_S)

    def device_s(self, plan: StepPlan) -> float:
        """Device seconds of one step."""
        context = float(plan.start_B[: plan.num_decode].sum())
        return (
            self.step_s
            + self.prefill_token_s * len(plan.prefill_tokens)
            + self.decode_row_s * plan.num_decode
            + self.context_token_s * context
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in virtual time, in the place of a device event."""

    at: float

    def query(self) -> bool:
        """Virtual events are read by their time; nobody asks."""
        raise NotImplementedError("a simulated event has a time, not a state")

    def synchronize(self) -> None:
        """See `query`."""
        raise NotImplementedError("a simulated event has a time, not a state")


class Clock:
    """Virtual host time in seconds, and the device interface that the scheduler needs of it."""

    checking = False

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """Virtual host time."""
        return self.time

    def seconds_between(self, begin: Moment, end: Moment) -> float:
        """Virtual seconds."""
        return end.at - begin.at

    def host_access(self, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        """Nothing is checked."""

    def taken(self, regions: Iterable[Region]) -> None:
        """Nothing is checked."""

    def released(self, regions: Iterable[Region]) -> None:
        """Nothing is checked."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that runs from `begin` to `copy_done` in virtual time."""

    plan: StepPlan
    begin: Moment
    copy_done: Moment
    clock: Clock

    def is_done(self) -> bool:
        """Whether the host's time has passed the step's end."""
        return self.copy_done.at <= self.clock.time

    def wait(self) -> None:
        """Move the host's time to the step's end."""
        self.clock.time = max(self.clock.time, self.copy_done.at)


class SimulatedEngine:
    """Launches steps into virtual time, one after the other."""

    def __init__(self, clock: Clock, costs: CostModel, sample: Sample) -> None:
        """`sample` is asked for a step's tokens when its results are taken."""
        self.device = clock
        self._costs = costs
        self._sample = sample
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """Queue a step behind those before it."""
        begin = max(self.device.time, self._free_at)
        self._free_at = begin + self._costs.device_s(plan)
        return SimulatedStep(plan, Moment(begin), Moment(self._free_at), self.device)

    def results(self, step: SimulatedStep) -> StepResults:
        """The made-up tokens."""
        return StepResults(self._sample(step.plan))


def endless(token: int = 1) -> Sample:
    """Every row samples `token`, which stops nothing."""
    return lambda plan: np.full(len(plan.sampled_S), token, np.int64)
