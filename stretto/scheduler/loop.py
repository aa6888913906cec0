"""The loop: receive, schedule, launch, process. The room that everybody visits first.

`normal_loop` finishes a step before it schedules the next. `overlap_loop` launches step N+1 while the device computes
step N, and processes the oldest step in flight meanwhile. Both share every function but themselves.

The host blocks in two places only (I1): in `TurnSource.next` when nothing can run and nothing is in flight, and in
`InFlightStep.wait` on the copy-done event of the very step that it processes.

Whatever depends on a clock, a client or a device's speed comes in with the turn: loops that are given the same turns,
in whatever processes, launch and process the same steps in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stretto.engine.engine import Engine, InFlightStep
from stretto.errors import EngineBroken
from stretto.observe.timeline import LAUNCH, PROCESS, SCHEDULE, WAIT, Timeline
from stretto.scheduler.batch import StepOutput, StepPlan, StepResults
from stretto.scheduler.integrity import report
from stretto.scheduler.scheduler import Scheduler
from stretto.scheduler.turns import AddRequest, TurnSource

Witness = Callable[[StepPlan, StepResults, StepOutput], None]
"""Is told each processed step; the results are valid during the call only."""


class Loop:
    """Drives a scheduler and an engine, one turn at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        turns: TurnSource,
        timeline: Timeline,
        witness: Witness | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.turns = turns
        self.timeline = timeline
        self.witness = witness
        self.depth = scheduler.config.overlap_depth
        self.in_flight: deque[InFlightStep] = deque()
        self.stopped = False
        """The last turn has come: nothing is launched any more."""
        self._whole = True
        """Nothing was left in the middle of a change: so between turns, and while the host waits."""
        self._outputs: list[StepOutput] | None = None
        """Those of the turn under way; None between turns."""
        self._num_ready = 0
        """Oldest steps in flight that the turn under way has still to process before it schedules."""
        self._launched: bool | None = None
        """Whether the turn under way has launched a step; None: it has not scheduled yet."""

    @property
    def has_work(self) -> bool:
        """Whether a turn could do anything without a new message."""
        return bool(self.in_flight) or self.scheduler.runnable or self.scheduler.has_ended

    def turn(self) -> list[StepOutput]:
        """One turn of the loop that the overlap depth selects. hot path

        An exception from outside (a signal handler) is harmless while the host waits: the next call goes on where it
        came, so a turn that other ranks carry out as well is never left half done. After one anywhere else nothing can
        be trusted, and every later turn raises EngineBroken. So do turns after the last one.
        """
        if not self._whole:
            raise EngineBroken("an exception broke off a step in the middle of a change; make a new engine")
        if self.stopped and self._outputs is None:
            raise EngineBroken("the engine has been stopped; make a new one")
        outputs = self.overlap_loop() if self.depth else self.normal_loop()
        self.timeline.end_turn()
        self._outputs = self._launched = None
        self._whole = True
        if not (outputs or self.in_flight or self.stopped) and self.scheduler.runnable:
            raise EngineBroken(f"requests wait, but nothing can ever run:\n{report(self.scheduler)}")
        return outputs

    def normal_loop(self) -> list[StepOutput]:
        """Receive, schedule, launch, and wait for the results: nothing overlaps."""
        outputs = self._receive()
        self._schedule_and_launch()
        while self.in_flight:
            outputs.append(self._process_oldest())
        return outputs

    def overlap_loop(self) -> list[StepOutput]:
        """Launch the next step first, then process the oldest one while the device computes."""
        outputs = self._receive()
        while self._num_ready:  # their results are here: a first token must not wait for a launch
            outputs.append(self._process_oldest())
            self._num_ready -= 1
        launched = self._schedule_and_launch()
        if self.in_flight and (not launched or len(self.in_flight) > self.depth):
            outputs.append(self._process_oldest())
        return outputs

    def _receive(self) -> list[StepOutput]:
        """Take in the next turn, or go on with one that was broken off; returns its outputs so far.

        Blocks only when there is nothing else to do.
        """
        self.timeline.begin_turn()
        if self._outputs is not None:
            self._whole = False
            return self._outputs
        turn = self.turns.next(self.in_flight, block=not self.has_work)
        self._whole = False
        for message in turn.messages:
            if isinstance(message, AddRequest):
                self.scheduler.add(message.request)
            else:
                self.scheduler.end(message.request, message.reason, message.num_output)
        self._num_ready, self.stopped = turn.num_ready, turn.stop
        self._outputs = [self.scheduler.ended()] if self.scheduler.has_ended else []
        return self._outputs

    def _schedule_and_launch(self) -> bool:
        """Once in a turn; returns whether the turn has launched a step."""
        if self._launched is None:
            if self.scheduler.monitor is not None and self._num_ready:
                self.scheduler.monitor.oldest_result_ready_before_schedule()
            self.timeline.enter(SCHEDULE)
            plan = None if self.stopped else self.scheduler.schedule()
            if plan is not None:
                self.timeline.enter(LAUNCH)
                self.in_flight.append(self.engine.launch(plan))
                self.timeline.launched(plan)
            self._launched = plan is not None
        return self._launched

    def _process_oldest(self) -> StepOutput:
        step = self.in_flight[0]
        self.timeline.enter(WAIT)
        self._whole = True
        step.wait()
        self._whole = False
        self.in_flight.popleft()
        self.timeline.enter(PROCESS)
        results = self.engine.results(step)
        output = self.scheduler.process(step.plan, results)
        if self.witness is not None:
            self.witness(step.plan, results, output)
        self.timeline.step_done(step, runnable=bool(self.in_flight) or self.scheduler.runnable)
        return output
