"""ObservedEngine: an engine that is watched for hidden syncs, named in traces, and made faulty on purpose.

Adds no work to a step unless it is asked to. What is watched is what must never wait: the launch on the host, and the
step's own work wherever it runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from stretto.engine.engine import Engine, InFlightStep
from stretto.engine.staging import PlanLayout, ResultBuffers, RingEntry
from stretto.observe.annotations import Span, span, spans_wanted
from stretto.observe.faults import Faults
from stretto.observe.inject import Injector
from stretto.observe.sync_guard import SyncGuard
from stretto.observe.watched_stream import WatchedStream
from stretto.scheduler.batch import StepPlan

_NAMED_EVERY = 16
"""While a tool records, every call of one in so many steps is looked at. On CUDA the others are listened to."""


class ObservedEngine(Engine):
    """Args beside those of `Engine`: `guard` watches, `faults` are committed in every step."""

    def __init__(self, *args: Any, guard: SyncGuard, faults: Faults, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guard = guard
        self._watches = guard.mode != "off"
        self._injector = Injector(faults, self.device) if faults else None
        self._has_worker = self.device.torch_device.type == "cpu"
        # A trace knows the functions of a program, not its lines; a guard does, so one watches while a tool records.
        self._namer = SyncGuard("count", every=_NAMED_EVERY, cpu_as_device=self._has_worker)
        self._recorded_from = -1
        self._staging_stream = self.scheduler_stream
        if self._watches and self._has_worker and not self.device.checking:
            one = self.scheduler_stream is self.stream
            self.stream = WatchedStream(self.stream, guard)
            self.scheduler_stream = self.stream if one else WatchedStream(self.scheduler_stream, guard)

    def stop_listening(self) -> None:
        """Let go of what the guards hold of the process (`warnings`, CUDA's debug mode). Idempotent."""
        self.guard.close()
        self._namer.close()

    def launch(self, plan: StepPlan) -> InFlightStep:
        """See `Engine`. hot path"""
        recorded = spans_wanted()
        if recorded != (self._recorded_from >= 0):
            self._recorded_from = plan.index if recorded else -1
            self._namer.close()
        guard = self._guard()
        if guard is None:
            return self._launch(plan)
        # On the CPU device the host itself calls no torch, so looking at all of its calls costs nothing.
        with guard.watch(inspect=self._inspects(guard, plan) or self._has_worker):
            return self._launch(plan)

    def _guard(self) -> SyncGuard | None:
        """Who watches this step. hot path"""
        if self._watches:
            return self.guard
        return self._namer if self._recorded_from >= 0 else None

    def _inspects(self, guard: SyncGuard, plan: StepPlan) -> bool:
        """Whether every call of a step is looked at: when a tool records, of its first step too. hot path"""
        return guard.inspects(plan.index if guard is self.guard else plan.index - self._recorded_from)

    def _launch(self, plan: StepPlan) -> InFlightStep:
        if self._injector is None:
            return super().launch(plan)
        self._injector.before_launch(self._staging_stream)
        with span("stretto.launch"):  # in a trace, what came before it is the host's lateness
            return super().launch(plan)

    def _return_results(self, plan: StepPlan, entry: RingEntry) -> None:
        if self._injector is not None:
            self._injector.after_step(self.sampled.tokens_S[: len(plan.sampled_S)], self.stream)
        super()._return_results(plan, entry)

    def _step(self, plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
        """See `Engine`. hot path"""
        traced = self._has_worker and spans_wanted()
        guard = self._guard()
        inspected = guard is not None and self._inspects(guard, plan)
        if not (traced or inspected or self._injector is not None):
            super()._step(plan, layout, staged)
            return
        with ExitStack() as scope:
            if traced:
                scope.callback(Span(f"stretto.work {self.stream.name} {plan.index}").end)
            if guard is not None and inspected:
                scope.enter_context(guard.watch())
            super()._step(plan, layout, staged)
            if self._injector is not None:
                self._injector.in_step()

    def _copy_results(self, plan: StepPlan, host: ResultBuffers) -> None:
        """See `Engine`. hot path"""
        guard = self._guard()
        if guard is not None and self._inspects(guard, plan):
            with guard.watch():
                super()._copy_results(plan, host)
        else:
            super()._copy_results(plan, host)
