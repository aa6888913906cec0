"""Scheduler: decides what each step computes and owns every request from arrival to release.

Host only: it never touches a device tensor. What a step costs here depends on what changed, not on what runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.cache.base import PrefixCache
from stretto.cache.page_pool import PagePool
from stretto.config import SchedulerConfig
from stretto.device.base import Device, Region
from stretto.request import FinishReason, Request, RequestState, TokenArray, TokenLogprobs
from stretto.scheduler.batch import BoolArray, IntArray, StepOutput, StepPlan, StepResults
from stretto.scheduler.decode import DecodeManager
from stretto.scheduler.monitor import ScheduleMonitor
from stretto.scheduler.pages import PageBook
from stretto.scheduler.prefill import Chunk, PrefillManager
from stretto.scheduler.slots import SlotTable

_NO_TOKENS = np.empty(0, np.int32)


class Scheduler:
    """Prefill and decode of all requests over one page pool.

    A request's slot and pages are released by `release` alone, once it needs them no more *and* no launched step that
    holds it is unprocessed (I2).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        pool: PagePool,
        cache: PrefixCache,
        *,
        wants_host_pages: bool = False,
        monitored: bool = False,
    ) -> None:
        """`wants_host_pages`: steps carry a host copy of the rows' page tables (`AttentionBackend` says so).

        `monitored`: check every decision as it is made (slow).
        """
        self.config = config
        self.device = device
        self.slots = SlotTable(config)
        self.cache = cache
        self.prefill = PrefillManager()
        self.decode = DecodeManager()
        self.pages = PageBook(
            config, self.slots, pool, cache, on_taken=self._pages_taken, on_evicted=self._pages_evicted
        )
        self.num_preemptions = 0
        self.num_prefill_tokens = 0
        self.monitor = ScheduleMonitor(self) if monitored else None
        self._wants_host_pages = wants_host_pages
        self._leaving: dict[int, Request] = {}
        """Requests that will be released once their launched steps are processed, by uid."""
        self._ended: list[Request] = []
        """Ended since the last output: their terminal results are still to be told."""
        self._num_steps = 0
        self._admitted: list[Request] = []

    # -- arrivals and ends ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, already validated against the config."""
        request.token_ids = request.prompt_ids
        self.prefill.wait(request)

    def end(self, request: Request, reason: FinishReason, num_output: int | None = None) -> None:
        """End a request from outside: an abort, or a stop string that its first `num_output` tokens complete.

        Idempotent: a request that has ended stays as it ended. Only marks; the release follows I2.
        """
        if request.state is RequestState.FINISHED:
            return
        if num_output is not None:
            self._cut_output(request, num_output)
        self._finish(request, reason)

    def _cut_output(self, request: Request, num_output: int) -> None:
        """Drop output tokens after the first `num_output`."""
        if request.slot:
            self.slots.num_output[request.slot] = min(int(self.slots.num_output[request.slot]), num_output)
        else:
            request.num_output = min(request.num_output, num_output)
            request.token_ids = request.token_ids[: len(request.prompt_ids) + request.num_output]
        if request.logprobs is not None:
            del request.logprobs[num_output:]

    @property
    def num_running(self) -> int:
        """Requests that may still produce tokens by further steps: what admission counts."""
        return len(self.prefill.running) + len(self.decode)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return self.prefill.num_waiting

    @property
    def runnable(self) -> bool:
        """Whether a step could be scheduled, now or once launched ones are processed."""
        return self.num_running > 0 or self.num_waiting > 0

    @property
    def has_ended(self) -> bool:
        """Whether terminal results wait to be told."""
        return bool(self._ended)

    # -- scheduling -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now. Its rows count as launched from here on. hot path"""
        budget = self.config.max_num_batched_tokens
        decode = self.decode.slots
        if self.config.batch_policy == "mixed":
            decode, chunks = self._reserve(decode, self._continue_prefill(budget - len(decode)))
            chunks += self._admit(budget - len(decode) - sum(chunk.num_tokens for chunk in chunks))
        else:
            _, chunks = self._reserve(decode[:0], self._continue_prefill(budget))
            chunks += self._admit(budget - sum(chunk.num_tokens for chunk in chunks))
            decode = decode[:0] if chunks else self._reserve(decode, [])[0]
        if not len(decode) and not chunks:
            return None
        plan = self._launchable(decode, chunks)
        if self.monitor is not None:
            self.monitor.scheduled(plan)
        return plan

    def _continue_prefill(self, budget: int) -> list[Chunk]:
        """Next chunks of the prompts being computed, oldest first, within `budget` tokens."""
        chunks: list[Chunk] = []
        for request in self.prefill.running:
            if budget <= 0:
                break
            remaining = int(self.slots.target[request.slot] - self.slots.length[request.slot])
            chunks.append(Chunk(request, min(remaining, budget)))
            budget -= chunks[-1].num_tokens
        return chunks

    def _reserve(self, decode: IntArray, chunks: list[Chunk]) -> tuple[IntArray, list[Chunk]]:
        """Give pages to the rows; returns those that got what they need."""
        if self.pages.reserve(decode, chunks):
            return decode, chunks
        return self._reserve_under_pressure(decode, chunks)

    def _reserve_under_pressure(self, decode: IntArray, chunks: list[Chunk]) -> tuple[IntArray, list[Chunk]]:
        """Not enough pages for all: oldest first, each row takes what is free, else waits, else preempts the latest.

        Strict order makes it live: the oldest request can always take from every other one, so it always finishes.
        Once a row has to wait, no later row may take pages before it.
        """
        rows = [Chunk(request, 1) for request in map(self.slots.requests.__getitem__, decode) if request] + chunks
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
            if need:
                self.pages.give(row.request, need)
            served.add(row.request.slot)
        still = np.fromiter((slot in served for slot in decode.tolist()), np.bool_, len(decode))
        return decode[still], [chunk for chunk in chunks if chunk.request.slot in served]

    def _make_room(self, request: Request, need: int) -> bool:
        """Free `need` pages for `request` if that can be done now; False: it has to wait (or was preempted itself)."""
        while not self.pages.has_room(need):
            if self._awaits_release(need):
                return False
            victim = max([*self._decoding(), *self.prefill.running], key=lambda r: r.order)
            self._preempt(victim, need)
            if victim is request:
                return False
        return True

    def _decoding(self) -> list[Request]:
        return [request for request in map(self.slots.requests.__getitem__, self.decode.slots) if request]

    def _awaits_release(self, need: int) -> bool:
        """Whether pages about to be released cover the need: then waiting for that step is better than preempting."""
        return self.pages.num_available + self.pages.num_coming(self._leaving.values()) >= need

    def _preempt(self, request: Request, need: int) -> None:
        """Make `request` give its pages back and compute again later; results of its launched steps still count."""
        if self.monitor is not None:
            self.monitor.preempting(request, need)
        self._leave_batch(request)
        request.state = RequestState.PREEMPTING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._leave_when_processed(request)

    def _admit(self, budget: int) -> list[Chunk]:
        """Give slots to waiting requests, first come first served, by what they need now (not by `max_tokens`)."""
        chunks: list[Chunk] = []
        while budget > 0 and self.num_running < self.config.max_num_seqs and self.slots.num_free:
            request = self.prefill.first()
            if request is None:
                break
            prefix = self.cache.lock(request.token_ids)
            if not self.pages.can_admit(request, prefix, self.prefill.running, self.num_running):
                self.cache.unlock(prefix)
                break
            request.slot = self.slots.acquire(request)
            self._slot_taken(request)
            self.prefill.admit(request)
            self.pages.adopt(request, prefix)
            if request.num_preemptions == 0:
                request.num_cached = prefix.num_tokens
            chunk = Chunk(request, min(len(request.token_ids) - prefix.num_tokens, budget))
            self.pages.give(request, self.pages.needed(chunk))
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
            mix=slots.mix(sampled_slots),
        )
        self._num_steps += 1
        self.num_prefill_tokens += len(plan.prefill_tokens)
        self._admitted.clear()
        slots.length[slots_B] = end_B
        slots.in_flight[slots_B] += 1
        self._advance_states(chunks, sampled_slots[is_last_S])
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

    def _advance_states(self, chunks: list[Chunk], last_slots: IntArray) -> None:
        """Prompts wholly launched go on to decode; requests whose last step is launched leave the batch."""
        for chunk in chunks:
            request = chunk.request
            length = int(self.slots.length[request.slot])
            if length == self.slots.target[request.slot]:
                self.prefill.leave(request)
                request.state = RequestState.DECODE
                self.decode.join(request)
                self.cache.store(request.token_ids, request.pages)
        for slot in last_slots.tolist():
            request = self._holder(slot)
            self.decode.leave(request)
            request.state = RequestState.RETIRING
            self._leaving[request.uid] = request

    def _holder(self, slot: int) -> Request:
        request = self.slots.requests[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} is in a launched step, but no request holds it")
        return request

    # -- results ----------------------------------------------------------------------------------------------------

    def process(self, plan: StepPlan, results: StepResults) -> StepOutput:
        """Take in the results of the oldest launched step: tokens, ends, releases. hot path

        Results for requests that have ended already (end-of-sequence found late, abort) are dropped here, before
        anything is reported or counted.
        """
        slots = self.slots
        slots.in_flight[plan.slots_B] -= 1
        slots_S = plan.slots_B[plan.sampled_S]
        alive_S = slots.active[slots_S]
        tokens_S, position_S, is_last_S = results.tokens_S, plan.position_S, plan.is_last_S
        if not alive_S.all():
            slots_S, tokens_S = slots_S[alive_S], tokens_S[alive_S]
            position_S, is_last_S = position_S[alive_S], is_last_S[alive_S]
        failed_S = tokens_S < 0
        slots.tokens[slots_S, position_S] = tokens_S
        if self.device.checking:
            self.device.host_access(writes=self._history_regions(slots_S, position_S))
        stop_S = (slots.stop_ids[slots_S] == tokens_S[:, None]).any(axis=1) & ~failed_S
        uids = slots.uid[slots_S]
        slots.num_output[slots_S] = position_S + 1 - slots.prompt_len[slots_S] - failed_S
        if plan.mix.num_logprobs >= 0:
            self._keep_logprobs(slots_S, results, alive_S, failed_S)
        for row in np.flatnonzero(stop_S | is_last_S | failed_S).tolist():
            request = self._holder(int(slots_S[row]))
            if failed_S[row]:
                self._finish(request, FinishReason.ERROR)
            elif stop_S[row]:
                request.stop_token = int(tokens_S[row])
                self._finish(request, FinishReason.STOP)
            else:
                self._finish(request, FinishReason.LENGTH)
        if failed_S.any():
            uids, tokens_S = uids[~failed_S], tokens_S[~failed_S]
        self._release_processed()
        output = StepOutput(plan.index, uids, tokens_S.astype(np.int32), self._take_ended())
        if self.monitor is not None:
            self.monitor.processed(plan, output)
        return output

    def ended(self) -> StepOutput:
        """Terminal results of requests that ended without a step (aborts)."""
        finished = self._take_ended()
        if self.monitor is not None:
            self.monitor.ended(finished)
        return StepOutput(-1, np.empty(0, np.int64), _NO_TOKENS, finished)

    def _take_ended(self) -> tuple[Request, ...]:
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def _keep_logprobs(self, slots_S: IntArray, results: StepResults, alive_S: BoolArray, failed_S: BoolArray) -> None:
        """Keep the log-probabilities of the rows that asked, each with as many tops as it asked for."""
        if results.logprob_S is None or results.rank_S is None:
            raise RuntimeError("log-probabilities were asked for, but the step carries none")
        rows = np.flatnonzero(alive_S)
        for i in np.flatnonzero(self.slots.wants_logprobs[slots_S] & ~failed_S).tolist():
            request, row = self._holder(int(slots_S[i])), int(rows[i])
            wanted = request.params.logprobs or 0
            kept = TokenLogprobs(
                float(results.logprob_S[row]),
                int(results.rank_S[row]),
                results.top_ids_SL[row, :wanted].tolist() if results.top_ids_SL is not None else [],
                results.top_logprobs_SL[row, :wanted].tolist() if results.top_logprobs_SL is not None else [],
            )
            if request.logprobs is None:
                raise RuntimeError(f"request {request.uid} has no place for its log-probabilities")
            request.logprobs.append(kept)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Give `request` its one finish reason. Later results for it are dropped."""
        was = request.state
        if was is RequestState.FINISHED:
            if self.monitor is not None:
                self.monitor.ended_again(request)
            raise RuntimeError(f"request {request.uid} ended twice")
        self._leave_batch(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._ended.append(request)
        if was is RequestState.WAITING:
            self.prefill.forget(request)
        else:
            self.slots.active[request.slot] = False
            self._save_tokens(request)
            self._leave_when_processed(request)

    def _save_tokens(self, request: Request) -> None:
        """Keep prompt and output with the request, beyond its slot."""
        request.token_ids = self.slots.known_tokens(request)
        request.num_output = int(self.slots.num_output[request.slot])

    def _leave_batch(self, request: Request) -> None:
        if request.state is RequestState.DECODE:
            self.decode.leave(request)
        elif request.state is RequestState.PREFILL:
            self.prefill.leave(request)

    # -- release (I2) -----------------------------------------------------------------------------------------------

    def _leave_when_processed(self, request: Request) -> None:
        """Release `request` now if no launched step holds it, else once the last such step is processed."""
        if self.slots.in_flight[request.slot] == 0:
            self.release(request)
        else:
            self._leaving[request.uid] = request

    def _release_processed(self) -> None:
        for request in [r for r in self._leaving.values() if self.slots.in_flight[r.slot] == 0]:
            self.release(request)

    def release(self, request: Request) -> None:
        """Return the request's slot and pages. The only place that does.

        Legal once: the request is finished or preempted and no launched step that holds it is unprocessed (I2).
        """
        slot = request.slot
        if self.monitor is not None:
            self.monitor.releasing(request)
        if request.state not in (RequestState.FINISHED, RequestState.PREEMPTING) or self.slots.in_flight[slot]:
            raise RuntimeError(
                f"request {request.uid} is released in state {request.state} with {self.slots.in_flight[slot]} "
                "launched steps that hold it"
            )
        self._leaving.pop(request.uid, None)
        if request.state is RequestState.PREEMPTING:
            self._save_tokens(request)
        self._offer_to_cache(request)
        freed = self.pages.take_back(request)
        self.slots.free(slot)
        request.slot = 0
        self.device.released([*self._slot_regions(slot), *(("page", page) for page in freed)])
        if request.state is RequestState.PREEMPTING:
            request.state = RequestState.WAITING
            self.prefill.wait(request)

    def _pages_taken(self, pages: list[int]) -> None:
        self.device.taken([("page", page) for page in pages])

    def _pages_evicted(self, pages: list[int]) -> None:
        """The prefix cache gave up pages that nobody else holds."""
        if self.monitor is not None:
            self.monitor.evicted(pages)
        self.device.released([("page", page) for page in pages])

    def _slot_regions(self, slot: int) -> list[Region]:
        """The shared memory that goes with a slot: its row of the tables, and on a checking device each token of it."""
        if not self.device.checking:
            return []
        width = self.slots.tokens.shape[1]
        cells = range(slot * width, (slot + 1) * width)
        return [("row", slot), *(("token", i) for i in cells), *(("history", i) for i in cells)]

    def _slot_taken(self, request: Request) -> None:
        if self.device.checking:
            self.device.taken(self._slot_regions(request.slot))
            known = np.arange(len(request.token_ids))
            self.device.host_access(writes=self._history_regions(np.full_like(known, request.slot), known))

    def _history_regions(self, slots: IntArray, positions: IntArray) -> list[Region]:
        """Tokens as the host knows them; what works on them must not run ahead of the results."""
        return [("history", i) for i in (slots * self.slots.tokens.shape[1] + positions).tolist()]

    def _offer_to_cache(self, request: Request) -> None:
        """Offer the KV of valid tokens: never that of a step past the end, nor of one whose logits were no numbers."""
        if request.finish_reason is not FinishReason.ERROR:
            valid = min(int(self.slots.length[request.slot]), len(request.token_ids) - 1)
            self.cache.store(request.token_ids[:valid], request.pages)

    def check(self) -> None:
        """Raise RuntimeError unless free and held pages and slots add up and every holder is known."""
        self.slots.check()
        holders: dict[int, int] = {}
        requests: Sequence[Request] = [r for r in self.slots.requests if r is not None]
        for request in requests:
            for page in request.pages:
                holders[page] = holders.get(page, 0) + 1
        for page in self.cache.held():
            holders[page] = holders.get(page, 0) + 1
        self.pages.check(holders)
