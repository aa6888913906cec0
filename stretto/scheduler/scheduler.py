"""Scheduler: decides what each step computes. Host only: it never touches a device tensor.

What a step costs here depends on what changed, not on what runs. Who a request is and when it may let go of what it
holds is lifecycle.py's; how results are taken in is results.py's; what a checking device is told is reports.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stretto.cache.base import PrefixCache
from stretto.cache.page_pool import PagePool
from stretto.config import SchedulerConfig
from stretto.device.base import Device
from stretto.request import FinishReason, Request, RequestState, TokenArray
from stretto.scheduler.batch import Adjustment, IntArray, StepOutput, StepPlan, StepResults
from stretto.scheduler.integrity import check_integrity
from stretto.scheduler.lifecycle import Hooks, Lifecycle
from stretto.scheduler.monitor import ScheduleMonitor
from stretto.scheduler.pages import PageBook
from stretto.scheduler.prefill import Chunk
from stretto.scheduler.reports import DeviceReports
from stretto.scheduler.results import take_in
from stretto.scheduler.scoring import may_be_cached, scored_chunks
from stretto.scheduler.slots import SlotTable

_NO_TOKENS = np.empty(0, np.int32)


class Scheduler:
    """Prefill and decode of all requests over one page pool."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        pool: PagePool,
        cache: PrefixCache,
        *,
        wants_host_pages: bool = False,
        checked: bool = False,
        on_released: Callable[[int, list[int]], None] | None = None,
        lifecycle_type: type[Lifecycle] = Lifecycle,
    ) -> None:
        """`wants_host_pages`: steps carry a host copy of the rows' page tables (`AttentionBackend` says so).

        `checked`: check every decision as it is made and walk everything after each step (slow). `on_released` is told
        each slot and the pages that change hands (slot 0: pages of the cache alone).
        `lifecycle_type` can be replaced to study what a guard is worth.
        """
        self.config = config
        self.slots = SlotTable(config)
        self.reports = DeviceReports(device, self.slots, on_released)
        self.cache = cache
        self.pages = PageBook(
            config, self.slots, pool, cache, on_taken=self.reports.pages_taken, on_evicted=self._pages_evicted
        )
        self.monitor = ScheduleMonitor(self) if checked else None
        hooks = Hooks(acquired=self.reports.slot_taken, released=self.reports.released)
        self.lifecycle = lifecycle_type(self.slots, self.pages, cache, hooks, self.monitor)
        self.num_prefill_tokens = 0
        self._wants_host_pages = wants_host_pages
        self._num_steps = 0
        self._admitted: list[Request] = []
        self._adjusted: list[Adjustment] = []

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, already validated against the config."""
        self.lifecycle.arrive(request)

    def end(self, request: Request, reason: FinishReason, num_output: int | None = None) -> None:
        """End a request from outside; see `Lifecycle.end`."""
        self.lifecycle.end(request, reason, num_output)

    @property
    def num_running(self) -> int:
        """Requests that may still produce tokens by further steps."""
        return self.lifecycle.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return self.lifecycle.prefill.num_waiting

    @property
    def runnable(self) -> bool:
        """Whether a step could be scheduled, now or once launched ones are processed."""
        return self.num_running > 0 or self.num_waiting > 0

    @property
    def has_ended(self) -> bool:
        """Whether terminal results wait to be told."""
        return self.lifecycle.has_ended

    # -- scheduling -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now. Its rows count as launched from here on. hot path"""
        budget = self.config.max_num_batched_tokens
        decode = self.lifecycle.decode.slots
        if self.config.batch_policy == "mixed":
            decode, chunks = self._reserve(decode, self._continue_prefill(budget - len(decode)))
            chunks += self._admit(budget - len(decode) - sum(chunk.num_tokens for chunk in chunks))
        else:
            _, chunks = self._reserve(decode[:0], self._continue_prefill(budget))
            chunks += self._admit(budget - sum(chunk.num_tokens for chunk in chunks))
            decode = decode[:0] if chunks else self._reserve(self.lifecycle.decode.slots, [])[0]
        if not len(decode) and not chunks:
            return None
        plan = self._launchable(decode, chunks)
        if self.monitor is not None:
            self.monitor.scheduled(plan)
        return plan

    def _continue_prefill(self, budget: int) -> list[Chunk]:
        """Next chunks of the prompts being computed, oldest first, within `budget` tokens."""
        chunks: list[Chunk] = []
        for request in self.lifecycle.prefill.running:
            if budget <= 0:
                break
            remaining = int(self.slots.target[request.slot] - self.slots.length[request.slot])
            chunks.append(Chunk(request, min(remaining, budget)))
            budget -= chunks[-1].num_tokens
        return chunks

    def _reserve(self, decode: IntArray, chunks: list[Chunk]) -> tuple[IntArray, list[Chunk]]:
        """Give pages to the rows; returns those that got what they need."""
        if not self.pages.reserve(decode, chunks):
            decode, chunks = self._reserve_under_pressure(decode, chunks)
        for chunk in chunks:
            self.lifecycle.chunk_scheduled(chunk)
        return decode, chunks

    def _reserve_under_pressure(self, decode: IntArray, chunks: list[Chunk]) -> tuple[IntArray, list[Chunk]]:
        """Not enough pages for all: oldest first, each row takes what is free, else waits, else preempts the latest.

        Strict order makes it live: the oldest request can always take from every other one, so it always finishes.
        Once a row has to wait, no later row may take pages before it.
        """
        rows = [Chunk(self.slots.holder(slot), 1) for slot in decode.tolist()] + chunks
        rows.sort(key=lambda row: row.request.order)
        served: set[int] = set()
        must_wait = False
        for row in rows:
            if row.request.state not in (RequestState.DECODE, RequestState.PREFILL):
                continue  # preempted for an older row of this very step
            need = self.pages.needed(row)
            if need and (must_wait or not self._make_room(row.request, need)):
                must_wait = True
                continue
            self.pages.give(row.request, need)
            served.add(row.request.slot)
        still = np.fromiter((slot in served for slot in decode.tolist()), np.bool_, len(decode))
        return decode[still], [chunk for chunk in chunks if chunk.request.slot in served]

    def _make_room(self, request: Request, need: int) -> bool:
        """Free `need` pages for `request` if that can be done now; False: it has to wait (or was preempted itself)."""
        while not self.pages.has_room(need):
            if self._awaits_release(need):
                return False
            decoding = [self.slots.holder(slot) for slot in self.lifecycle.decode.slots.tolist()]
            victim = max([*decoding, *self.lifecycle.prefill.running], key=lambda r: r.order)
            self.lifecycle.preempt(victim, need)
            if victim is request:
                return False
        return True

    def _awaits_release(self, need: int) -> bool:
        """Whether pages about to be released cover the need: then waiting for that step is better than preempting."""
        return self.pages.num_available + self.pages.num_coming(self.lifecycle.leaving) >= need

    def _admit(self, budget: int) -> list[Chunk]:
        """Give slots to waiting requests, first come first served, by what they need now (not by `max_tokens`)."""
        chunks: list[Chunk] = []
        lifecycle = self.lifecycle
        cached_room = self.config.max_model_len  # tokens of cached prefixes that a plan has room for; one always fits
        missing = self.pages.missing(lifecycle.prefill.running)
        while budget > 0 and self.num_running < self.config.max_num_seqs and self.slots.num_free:
            request = lifecycle.prefill.first()
            if request is None:
                break
            prefix = self.cache.lock(may_be_cached(request), request.cache_key)
            if not self.pages.can_admit(request, prefix, missing, self.num_running):
                self.cache.unlock(prefix)
                break
            if request.params.has_penalties and prefix.num_tokens > cached_room:
                self.cache.unlock(prefix)
                budget = 0
                break
            lifecycle.admit(request, prefix)
            adjustment = self.slots.adjustment(request, prefix.num_tokens)
            if adjustment is not None:
                self._adjusted.append(adjustment)
                cached_room -= len(adjustment.cached_tokens)
            chunk = Chunk(request, min(len(request.token_ids) - prefix.num_tokens, budget))
            self.pages.give(request, self.pages.needed(chunk))
            missing += self.pages.missing([request])
            lifecycle.chunk_scheduled(chunk)
            self._admitted.append(request)
            chunks.append(chunk)
            budget -= chunk.num_tokens
        if self.monitor is not None:
            self.monitor.admission_closed(budget)
        return chunks

    def _launchable(self, decode: IntArray, chunks: list[Chunk]) -> StepPlan:
        """Make the plan of these rows and advance the host's lengths by it. hot path"""
        slots = self.slots
        num_decode = len(decode)
        chunk_slots = [chunk.request.slot for chunk in chunks]
        slots_B = np.concatenate([decode, np.array(chunk_slots, np.int64)]) if chunks else decode
        num_new_B = np.ones(len(slots_B), np.int64)
        num_new_B[num_decode:] = [chunk.num_tokens for chunk in chunks]
        start_B = slots.length[slots_B]
        end_B = start_B + num_new_B
        sampled_S = np.arange(len(slots_B))
        if chunks:
            sampled_S = sampled_S[(sampled_S < num_decode) | (end_B == slots.target[slots_B])]
        sampled_slots = slots_B[sampled_S]
        position_S = end_B[sampled_S]
        is_last_S = position_S + 1 == slots.final_len[sampled_slots]
        max_pages = int(slots.num_pages[slots_B].max())
        page_slot_U, page_index_U, page_id_U = self.pages.drain()
        plan = StepPlan(
            index=self._num_steps,
            slots_B=slots_B,
            num_new_B=num_new_B,
            start_B=start_B,
            num_decode=num_decode,
            prefill_tokens=self._chunk_tokens(chunks),
            sampled_S=sampled_S,
            position_S=position_S,
            is_last_S=is_last_S,
            admitted=tuple(self._admitted),
            page_slot_U=page_slot_U,
            page_index_U=page_index_U,
            page_id_U=page_id_U,
            max_pages=max_pages,
            page_table_BM=slots.page_table[slots_B, :max_pages] if self._wants_host_pages else None,
            mix=slots.mix(sampled_slots, position_S),
            adjusted=tuple(self._adjusted),
            scored=scored_chunks(chunks, slots, num_decode) if chunks else (),
        )
        self._num_steps += 1
        self.num_prefill_tokens += len(plan.prefill_tokens)
        self._admitted.clear()
        self._adjusted.clear()
        slots.length[slots_B] = end_B
        slots.in_flight[slots_B] += 1
        for chunk in chunks:
            self.lifecycle.chunk_launched(chunk.request)
        for slot in sampled_slots[is_last_S].tolist():
            self.lifecycle.last_step_launched(slots.holder(slot))
        return plan

    def _chunk_tokens(self, chunks: list[Chunk]) -> TokenArray:
        if not chunks:
            return _NO_TOKENS
        parts = []
        for chunk in chunks:
            slot = chunk.request.slot
            start = self.slots.length[slot]
            parts.append(self.slots.tokens[slot, start : start + chunk.num_tokens])
        return np.concatenate(parts)

    # -- results ----------------------------------------------------------------------------------------------------

    def process(self, plan: StepPlan, results: StepResults) -> StepOutput:
        """Take in the results of the oldest launched step. hot path"""
        uids, tokens = take_in(plan, results, self.slots, self.lifecycle)
        output = StepOutput(plan.index, uids, tokens, self.lifecycle.take_ended())
        self.reports.results_taken_in(plan)
        if self.monitor is not None:
            self.monitor.processed(plan, results, output)
            self.check()
        return output

    def ended(self) -> StepOutput:
        """Terminal results of requests that ended without a step (aborts)."""
        finished = self.lifecycle.take_ended()
        if self.monitor is not None:
            self.monitor.ended(finished)
        return StepOutput(-1, np.empty(0, np.int64), _NO_TOKENS, finished)

    def check(self) -> None:
        """Walk everything; raises IntegrityError with a readable report at the first thing that does not add up."""
        check_integrity(self)

    def _pages_evicted(self, pages: list[int]) -> None:
        """The prefix cache gave up pages that nobody else holds."""
        if self.monitor is not None:
            self.monitor.evicted(pages)
        self.reports.released(0, pages)
