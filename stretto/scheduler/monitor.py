"""ScheduleMonitor: checks the scheduler's logic as it runs, with books of its own (tests and STRETTO_CHECK=1).

The memory hazards are the checking device's to find; this finds those of logic. It never changes what happens, only
raises `HazardError` (or RuntimeError for what the hazard table does not name) at the first thing that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stretto.device.hazards import Hazard, HazardError
from stretto.request import FinishReason, Request, RequestState
from stretto.scheduler.batch import StepOutput, StepPlan, StepResults
from stretto.scheduler.scoring import may_be_cached

if TYPE_CHECKING:
    from stretto.scheduler.scheduler import Scheduler


class ScheduleMonitor:
    """Keeps its own count of what each request was told and what was launched for it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._told: dict[int, int] = {}
        """Output tokens told, by uid."""
        self._reach: dict[int, int] = {}
        """Sequence length that launched steps reach, their sampled token included, by uid."""
        self._ended: set[int] = set()

    def oldest_result_ready_before_schedule(self) -> None:
        """The loop schedules although the oldest step's results had been there when it looked."""
        raise HazardError(Hazard.first_token_kept_waiting, "the oldest step in flight is done, but not processed first")

    def scheduled(self, plan: StepPlan) -> None:
        """A plan was made: no row past its end, no position left out or taken twice."""
        for index, position in zip(plan.sampled_S.tolist(), plan.position_S.tolist(), strict=True):
            request = self._scheduler.slots.holder(int(plan.slots_B[index]))
            if position >= request.final_len:
                raise RuntimeError(
                    f"request {request.uid} samples position {position}, its length is {request.final_len}"
                )
            if position != self._reach.get(request.uid, position):
                raise RuntimeError(f"request {request.uid} samples position {position}, not {self._reach[request.uid]}")
            self._reach[request.uid] = position + 1

    def admission_closed(self, budget_left: int) -> None:
        """Nobody else is admitted to this step: nobody may be kept out without need."""
        scheduler = self._scheduler
        first = scheduler.lifecycle.prefill.first()
        if first is None or budget_left <= 0 or scheduler.slots.num_free == 0:
            return
        productive = [r for r in self._holders() if r.state in (RequestState.DECODE, RequestState.PREFILL)]
        if len(productive) >= scheduler.config.max_num_seqs:
            return
        prefix = scheduler.cache.lock(may_be_cached(first), first.cache_key)
        missing = scheduler.pages.missing(scheduler.lifecycle.prefill.running)
        fits = scheduler.pages.can_admit(first, prefix, missing, len(productive))
        scheduler.cache.unlock(prefix)
        if fits:
            raise HazardError(
                Hazard.retiring_in_admission_counts,
                f"request {first.uid} waits although only {len(productive)} of {scheduler.config.max_num_seqs} may "
                "still produce tokens, and slot and pages are there",
            )

    def processed(self, plan: StepPlan, results: StepResults, output: StepOutput) -> None:
        """Results were taken in: each told token is the next of a live request, each end is judged by its own step."""
        end_B = plan.start_B + plan.num_new_B
        if results.lengths_B is not None and (results.lengths_B != end_B).any():
            raise RuntimeError(f"step {plan.index}: the device's lengths are {results.lengths_B}, the host's {end_B}")
        for uid in output.uids.tolist():
            if uid in self._ended:
                raise HazardError(Hazard.state_one_step_late, f"request {uid} has ended, but gets a token")
            self._told[uid] = self._told.get(uid, 0) + 1
        self.ended(output.finished)
        for request in self._holders():
            if request.state is RequestState.FINISHED and self._scheduler.slots.active[request.slot]:
                raise HazardError(Hazard.state_one_step_late, f"request {request.uid} has ended, but results count")

    def ended(self, finished: Iterable[Request]) -> None:
        """Terminal results were told."""
        for request in finished:
            if request.uid in self._ended:
                self.ended_again(request)
            self._ended.add(request.uid)
            told = self._told.pop(request.uid, 0)
            self._reach.pop(request.uid, None)
            if request.finish_reason is FinishReason.LENGTH and len(request.prompt_ids) + told != request.final_len:
                raise HazardError(
                    Hazard.finish_judged_late,
                    f"request {request.uid} ends by length with {told} tokens told of "
                    f"{request.final_len - len(request.prompt_ids)}",
                )

    def ended_again(self, request: Request) -> None:
        """`request` is to end although it has ended."""
        raise HazardError(Hazard.state_one_step_late, f"request {request.uid} ends a second time")

    def preempting(self, victim: Request, need: int) -> None:
        """`victim` is to give its pages back because `need` pages are missing."""
        scheduler = self._scheduler
        leaving = [
            r
            for r in self._holders()
            if r.state not in (RequestState.DECODE, RequestState.PREFILL) and scheduler.slots.in_flight[r.slot] > 0
        ]
        coming = scheduler.pages.num_coming(leaving)
        if scheduler.pages.num_available + coming >= need:
            raise HazardError(
                Hazard.deferred_release_against_preemption,
                f"request {victim.uid} is preempted for {need} pages, but {coming} are about to be released",
            )

    def evicted(self, pages: Sequence[int]) -> None:
        """The prefix cache gave up `pages`."""
        for request in self._holders():
            used = set(request.pages).intersection(pages)
            if used:
                raise HazardError(Hazard.eviction, f"pages {sorted(used)} of request {request.uid} are evicted")

    def releasing(self, request: Request) -> None:
        """`request` gives up slot and pages: legal only once no launched step holds it (I2)."""
        if request.slot == 0:
            raise RuntimeError(f"request {request.uid} is released, but holds nothing")
        in_flight = int(self._scheduler.slots.in_flight[request.slot])
        if in_flight:
            aborted = request.finish_reason is FinishReason.ABORT
            raise HazardError(
                Hazard.abort_in_flight if aborted else Hazard.war_pages_and_slots,
                f"request {request.uid} ({request.finish_reason}) is released while {in_flight} launched steps hold it",
            )

    def _holders(self) -> list[Request]:
        return [request for request in self._scheduler.slots.requests if request is not None]
