"""The loop: receive, schedule, launch, process. The room that everybody visits first.

`normal_loop` finishes a step before it schedules the next. `overlap_loop` launches step N+1 while the device computes
step N, and processes the oldest step in flight meanwhile. Both share every function but themselves.

The host blocks in two places only (I1): in `receive` when nothing can run and nothing is in flight, and in
`InFlightStep.wait` on the copy-done event of the very step that it processes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stretto.engine.engine import Engine, InFlightStep
from stretto.errors import EngineBroken
from stretto.observe.timeline import Timeline
from stretto.request import FinishReason, Request
from stretto.scheduler.batch import StepOutput
from stretto.scheduler.integrity import report
from stretto.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A validated request arrives."""

    request: Request
    deadline: float | None = None
    """Device clock in seconds after which it is ended, wherever it is."""


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A client aborts, or its stop string is complete with the first `num_output` tokens."""

    request: Request
    reason: FinishReason
    num_output: int | None = None


Message = AddRequest | EndRequest


class Inbox(Protocol):
    """Where messages come from."""

    def receive(self, block: bool) -> Iterable[Message]:
        """Messages since the last call; with `block`, may wait for one."""


class Loop:
    """Drives a scheduler and an engine, one turn at a time."""

    def __init__(self, scheduler: Scheduler, engine: Engine, inbox: Inbox, timeline: Timeline) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.inbox = inbox
        self.timeline = timeline
        self.depth = scheduler.config.overlap_depth
        self.in_flight: deque[InFlightStep] = deque()
        self._whole = True
        """No turn was left in the middle of a change."""
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ready: InFlightStep | None = None
        """Under a monitor: the oldest step, if its results were there when the turn began."""

    @property
    def has_work(self) -> bool:
        """Whether a turn could do anything without a new message."""
        return bool(self.in_flight) or self.scheduler.runnable or self.scheduler.has_ended

    def turn(self) -> list[StepOutput]:
        """One turn of the loop that the overlap depth selects. hot path

        An exception from outside (a signal handler) is harmless while the host waits; after one in the middle of a
        change nothing can be trusted, and every later turn raises EngineBroken.
        """
        if not self._whole:
            raise EngineBroken("an exception broke off a step in the middle of a change; make a new engine")
        if self.scheduler.monitor is not None:
            self._ready = self.in_flight[0] if self.in_flight and self.in_flight[0].is_done() else None
        outputs = self.overlap_loop() if self.depth else self.normal_loop()
        self.timeline.turn_done()
        if not outputs and not self.in_flight and self.scheduler.runnable:
            raise EngineBroken(f"requests wait, but nothing can ever run:\n{report(self.scheduler)}")
        return outputs

    def normal_loop(self) -> list[StepOutput]:
        """Receive, schedule, launch, and wait for the results: nothing overlaps."""
        outputs = self._receive()
        if not self.in_flight:  # else the turn before was broken off while it waited
            self._schedule_and_launch()
        while self.in_flight:
            outputs.append(self._process_oldest())
        return outputs

    def overlap_loop(self) -> list[StepOutput]:
        """Launch the next step first, then process the oldest one while the device computes."""
        outputs = self._receive()
        while self.in_flight and self.in_flight[0].is_done():
            outputs.append(self._process_oldest())  # its results are here: a first token must not wait for a launch
        launched = self._schedule_and_launch()
        if self.in_flight and (not launched or len(self.in_flight) > self.depth):
            outputs.append(self._process_oldest())
        return outputs

    def _receive(self) -> list[StepOutput]:
        """Take in messages; blocks only when there is nothing else to do."""
        self.timeline.receive()
        for message in self.inbox.receive(block=not self.has_work):
            if isinstance(message, AddRequest):
                self.scheduler.add(message.request)
                if message.deadline is not None:
                    heapq.heappush(self._deadlines, (message.deadline, message.request.uid, message.request))
            else:
                self.scheduler.end(message.request, message.reason, message.num_output)
        self._end_expired()
        return [self.scheduler.ended()] if self.scheduler.has_ended else []

    def _end_expired(self) -> None:
        """End requests whose time is over: judged here and nowhere else, and carried out like an abort."""
        while self._deadlines and self._deadlines[0][0] <= self.engine.device.now():
            request = heapq.heappop(self._deadlines)[2]
            self.scheduler.end(request, FinishReason.TIMEOUT)

    def _schedule_and_launch(self) -> bool:
        if self.scheduler.monitor is not None and self._ready in self.in_flight:
            self.scheduler.monitor.oldest_result_ready_before_schedule()
        self.timeline.schedule()
        self._whole = False
        plan = self.scheduler.schedule()
        if plan is not None:
            self.timeline.launch(plan)
            self.in_flight.append(self.engine.launch(plan))
            self.timeline.launched()
        self._whole = True
        return plan is not None

    def _process_oldest(self) -> StepOutput:
        step = self.in_flight[0]
        self.timeline.wait(step)
        step.wait()
        self._whole = False
        self.in_flight.popleft()
        self.timeline.process()
        output = self.scheduler.process(step.plan, self.engine.results(step))
        self.timeline.step_done(step, runnable=bool(self.in_flight) or self.scheduler.runnable)
        self._whole = True
        return output
