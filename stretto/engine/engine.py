"""Engine: launches steps. Stages a plan, runs forward and sampling on the engine stream, brings the results back.

Owns the streams, the ring and the device tables. Decides nothing: what runs is the plan's. Legend: T tokens, B rows,
S sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from stretto.attention.base import AttentionBackend
from stretto.config import SchedulerConfig
from stretto.device.base import Access, Device, Event, Region
from stretto.engine.runner import Attend, EagerRunner, MakeRunner, RunnerParts, StepModel
from stretto.engine.sampler import SampledOut
from stretto.engine.scoring import ScoredOut
from stretto.engine.staging import PlanLayout, ResultBuffers, RingEntry, StagingRing, pack
from stretto.engine.tables import DeviceTables
from stretto.scheduler.batch import IntArray, StepPlan, StepResults

__all__ = ["Attend", "Engine", "InFlightStep", "StepModel"]


_SAMPLED: Region = ("results.device", 0)
_SCORED: Region = ("scored.device", 0)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step whose results are not processed yet."""

    plan: StepPlan
    entry: RingEntry
    begin: Event
    copy_done: Event
    """Recorded after the step's results are copied into pinned memory."""

    def is_done(self) -> bool:
        """Whether its results are in pinned memory. Never blocks."""
        return self.copy_done.query()

    def wait(self) -> None:
        """Block the host until its results are in pinned memory: the one planned wait (I1)."""
        self.copy_done.synchronize()


class Engine:
    """Runs steps on two streams of a device.

    The scheduler stream carries the packed plans to the device, the engine stream everything else. In the normal loop
    (overlap depth 0) both are one stream.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        model: StepModel,
        attention: AttentionBackend,
        *,
        checked: bool = False,
        make_runner: MakeRunner = EagerRunner,
    ) -> None:
        """`checked`: results carry the device's lengths, and released pages and rows are poisoned.

        `make_runner` chooses how steps run.
        """
        self.config = config
        self._checked = checked
        self.device = device
        self.model = model
        self.attention = attention
        self.stream = device.stream("engine")
        self.scheduler_stream = device.stream("scheduler", priority=-1) if config.overlap_depth else self.stream
        self.tables = DeviceTables(config, device.torch_device)
        self.ring = StagingRing(device, config, config.overlap_depth + 1)
        self.sampled = SampledOut.allocate(config.max_rows, config.max_logprobs, device.torch_device)
        self.scored = ScoredOut.allocate(config.max_num_batched_tokens, config.max_logprobs, device.torch_device)
        self._events = [(device.event(timing=True), device.event(timing=True)) for _ in range(config.overlap_depth + 3)]
        """(begin, copy-done) of the steps in turn; two more than can be in flight, for who looks at the last ones."""
        self._penalised: set[int] = set()
        """Slots whose sampling reads their tokens: for a checking device."""
        self._lengths_B = torch.zeros(config.max_rows, dtype=torch.int64, device=device.torch_device)
        self.runner = make_runner(
            RunnerParts(
                config,
                model,
                attention,
                self.tables,
                self.sampled,
                self.scored,
                self.feed_back,
                self._lengths_B if checked else None,
            )
        )

    def prepare(self) -> None:
        """Let the runner prepare itself (compile, capture). Blocks the host; call it once, before the first step."""
        self.stream.run(self.runner.prepare)
        self.stream.synchronize()

    def close(self) -> None:
        """Give back what `prepare` made; the device is closed, and nothing is launched any more."""
        self.runner.close()

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Enqueue a step; returns at once, before anything of it is done. hot path"""
        entry = self.ring.next()
        layout = PlanLayout.of(plan, self.config.max_stop_ids)
        begin, copy_done = self._events[plan.index % len(self._events)]
        if not self.runner.knows(plan):
            self.device.host_access(writes=(entry.host_region,))
            pack(plan, layout, cast(npt.NDArray[np.int32], entry.host.array))
            self._stage(entry, layout)
            self._await_plan()
        self.stream.record(begin)
        self.stream.run(self._step, plan, layout, entry.device, access=lambda: self._step_access(plan, entry))
        self.stream.record(entry.consumed)
        self._return_results(plan, entry)
        self.stream.record(copy_done)
        return InFlightStep(plan, entry, begin, copy_done)

    def results(self, step: InFlightStep) -> StepResults:
        """The step's results on the host, once it is done: views that the ring reuses after its processing."""
        num_scored = step.plan.num_scored
        regions = (step.entry.results_region, step.entry.scored_region)
        self.device.host_access(reads=regions if num_scored else regions[:1])
        results, count = step.entry.results, len(step.plan.sampled_S)
        views, tops = results.views, step.plan.mix.num_logprobs
        lengths_B = cast(IntArray, results.lengths_B.array)[: len(step.plan.slots_B)] if self._checked else None
        scored = results.scored.view(num_scored) if num_scored else None
        if tops < 0:
            return StepResults(views.tokens_S[:count], lengths_B=lengths_B, scored=scored)
        return StepResults(
            views.tokens_S[:count],
            views.logprob_S[:count],
            views.rank_S[:count],
            views.top_ids_SL[:count, :tops],
            views.top_logprobs_SL[:count, :tops],
            lengths_B,
            scored,
        )

    def _stage(self, entry: RingEntry, layout: PlanLayout) -> None:
        """Copy the packed plan to the device on the scheduler stream, once the device side is consumed."""
        stream = self.scheduler_stream
        stream.wait(entry.consumed)
        stream.run(
            _copy_words,
            entry.device,
            entry.host.tensor,
            layout.num_words,
            access=lambda: Access(reads=(entry.host_region,), writes=(entry.device_region,)),
        )
        stream.record(entry.staged)

    def _await_plan(self) -> None:
        """The engine stream goes on only when the plan has landed (RAW 1)."""
        self.stream.wait_stream(self.scheduler_stream)

    def _return_results(self, plan: StepPlan, entry: RingEntry) -> None:
        """Copy the results into pinned memory."""
        self.stream.run(
            self._copy_results,
            plan,
            entry.results,
            access=lambda: _return_access(plan, entry),
        )

    # -- work on the engine stream ----------------------------------------------------------------------------------

    def _step(self, plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
        """Unpack, derive the inputs, forward, sample, feed the tokens back, advance the lengths."""
        self.runner.run(plan, layout, staged)

    def feed_back(self, slot_S: torch.Tensor, position_S: torch.Tensor, tokens_S: torch.Tensor) -> None:
        """Write sampled tokens into the token table; a failed row (-1) gets id 0, its request has ended anyway."""
        self.tables.token_ids_RL[slot_S, position_S] = tokens_S.clamp(min=0)

    def _copy_results(self, plan: StepPlan, host: ResultBuffers) -> None:
        device, rows = self.sampled, len(plan.slots_B)
        words = device.layout.words_of(len(plan.sampled_S), plan.mix.num_logprobs)
        host.words.tensor[:words].copy_(device.words[:words], non_blocking=True)
        if plan.scored:
            host.scored.fill(self.scored, plan.num_scored)
        if self._checked:
            host.lengths_B.tensor[:rows].copy_(self._lengths_B[:rows], non_blocking=True)

    def _step_access(self, plan: StepPlan, entry: RingEntry) -> Access:
        """The shared regions that `_step` touches, for a checking device."""
        size, width = self.config.page_size, self.config.max_model_len + 1
        fresh = {request.slot for request in plan.admitted}
        reads: list[Region] = [
            entry.device_region,
            *(("row", slot) for slot in plan.slots_B.tolist() if slot not in fresh),
        ]
        writes: list[Region] = [_SAMPLED, *(("row", slot) for slot in plan.slots_B.tolist())]
        if plan.scored:
            writes.append(_SCORED)
        fresh_tokens: set[int] = set()  # put into the table by this step itself, before it samples
        begun: set[Region] = set()  # pages first written here: a row that shares them reads what this step writes
        for row, slot in enumerate(plan.slots_B.tolist()):
            start, new = int(plan.start_B[row]), int(plan.num_new_B[row])
            if row < plan.num_decode:
                reads.append(("token", slot * width + start))
            else:
                writes.extend(("token", slot * width + start + i) for i in range(new))
                fresh_tokens.update(range(slot * width + start, slot * width + start + new))
            pages = self.pages_of(plan, row)
            begun.update(("page", page) for page in pages[-(-start // size) :])
            reads.extend(("page", page) for page in pages[: -(-start // size)])
            writes.extend(("page", page) for page in pages[start // size :])
        for adjustment in plan.adjusted:
            self._penalised.discard(adjustment.slot)
            if adjustment.penalised:
                self._penalised.add(adjustment.slot)
            cached = range(adjustment.slot * width, adjustment.slot * width + len(adjustment.cached_tokens))
            writes.extend(("token", token) for token in cached)
            fresh_tokens.update(cached)
        for row, position in zip(plan.sampled_S.tolist(), plan.position_S.tolist(), strict=True):
            slot = int(plan.slots_B[row])
            if slot in self._penalised:
                context = range(slot * width, slot * width + position)
                reads.extend(("token", token) for token in context if token not in fresh_tokens)
        writes.extend(self.fed_back(plan))
        return Access(tuple(region for region in reads if region not in begun), tuple(writes))

    def fed_back(self, plan: StepPlan) -> list[Region]:
        """Where `feed_back` writes."""
        width = self.config.max_model_len + 1
        positions = zip(plan.slots_B[plan.sampled_S].tolist(), plan.position_S.tolist(), strict=True)
        return [("token", slot * width + position) for slot, position in positions]

    def poison(self, slot: int, pages: list[int]) -> None:
        """Fill what was released with garbage, after all launched steps (only when everything is checked).

        `slot` 0: pages alone. Its row is nobody's, and the padding of captured steps reads it.
        """
        self.stream.run(self._poison, slot, pages)

    def _poison(self, slot: int, pages: list[int]) -> None:
        if slot:
            self.tables.poison_row(slot)
        for page in pages:
            self.attention.poison_page(page)

    def pages_of(self, plan: StepPlan, row: int) -> list[int]:
        """Pages that row `row` uses in this step (host copy; a checking device makes the scheduler carry it)."""
        if plan.page_table_BM is None:
            raise RuntimeError("a checking device needs plans with the host's page table")
        used = -(-int(plan.start_B[row] + plan.num_new_B[row]) // self.config.page_size)
        return [int(page) for page in plan.page_table_BM[row, :used]]


def _return_access(plan: StepPlan, entry: RingEntry) -> Access:
    """The shared regions of a step's results."""
    if plan.scored:
        return Access(reads=(_SAMPLED, _SCORED), writes=(entry.results_region, entry.scored_region))
    return Access(reads=(_SAMPLED,), writes=(entry.results_region,))


def _copy_words(device: torch.Tensor, host: torch.Tensor, count: int) -> None:
    device[:count].copy_(host[:count], non_blocking=True)
