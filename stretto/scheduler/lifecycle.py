"""Lifecycle: the states of requests, and the only ways between them. Owns arrival, admission, ends and release.

    WAITING -> PREFILL -> DECODE -> RETIRING -> FINISHED
       ^          |         |                     (from any state, once)
       +--------- PREEMPTING

Decides nothing about who comes next; that is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.cache.base import NoCache, Prefix, PrefixCache
from stretto.request import FinishReason, Request, RequestState
from stretto.scheduler.decode import DecodeManager
from stretto.scheduler.monitor import ScheduleMonitor
from stretto.scheduler.pages import PageBook
from stretto.scheduler.prefill import Chunk, PrefillManager
from stretto.scheduler.slots import SlotTable


@dataclass(frozen=True, slots=True)
class Hooks:
    """Who is told when a request gets its slot, and when slot and pages change hands."""

    acquired: Callable[[Request], None]
    released: Callable[[int, list[int]], None]
    """Slot, and the pages that nobody holds any more."""


class Lifecycle:
    """Moves requests between their states.

    A request's slot and pages are released by `release` alone, once it needs them no more *and* no launched step that
    holds it is unprocessed (I2).
    """

    def __init__(
        self,
        slots: SlotTable,
        pages: PageBook,
        cache: PrefixCache,
        hooks: Hooks,
        monitor: ScheduleMonitor | None,
    ) -> None:
        self.slots = slots
        self.pages = pages
        self.cache = cache
        self.monitor = monitor
        self.prefill = PrefillManager()
        self.decode = DecodeManager()
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_queried_tokens = 0
        """Tokens of prompts that were looked for in the prefix cache; those found are `num_cached_tokens`."""
        self._hooks = hooks
        self._leaving: dict[int, Request] = {}
        """Requests that will be released once their launched steps are processed, by uid."""
        self._distrusted: set[int] = set()
        """Of those, the ones whose KV may be no numbers."""
        self._ended: list[Request] = []
        """Ended since the last output: their terminal results are still to be told."""

    @property
    def num_running(self) -> int:
        """Requests that may still produce tokens by further steps: what admission counts."""
        return len(self.prefill.running) + len(self.decode)

    @property
    def leaving(self) -> list[Request]:
        """Requests whose slot and pages are about to be released."""
        return list(self._leaving.values())

    # -- on the way in ----------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Queue a request, already validated against the config."""
        request.token_ids = request.prompt_ids
        self.prefill.wait(request)

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Give the first waiting request a slot and its cached prefix (locked for it)."""
        request.slot = self.slots.acquire(request)
        self._hooks.acquired(request)
        self.prefill.admit(request)
        self.pages.adopt(request, prefix)
        if request.num_preemptions == 0:
            request.num_cached = prefix.num_tokens
            self.num_cached_tokens += prefix.num_tokens
            if request.prompt_logprobs is None and not isinstance(self.cache, NoCache):
                self.num_queried_tokens += len(request.prompt_ids)

    def chunk_scheduled(self, chunk: Chunk) -> None:
        """The step that is being planned writes the chunk's KV: whoever is admitted from now on may share it.

        Safe at once: stream order puts that step's writes before any later step's reads, and within the step an
        attention backend writes a layer's keys and values before it reads them.
        """
        request = chunk.request
        written = int(self.slots.length[request.slot]) + chunk.num_tokens
        self._share(request, written)

    def chunk_launched(self, request: Request) -> None:
        """A chunk of `request` is in a plan; with its last one it goes on to decode."""
        if self.slots.length[request.slot] == self.slots.target[request.slot]:
            self.prefill.leave(request)
            request.state = RequestState.DECODE
            self.decode.join(request)

    def last_step_launched(self, request: Request) -> None:
        """`request`'s last step by length is in a plan: only its results are awaited."""
        self.decode.leave(request)
        request.state = RequestState.RETIRING
        self._leaving[request.uid] = request

    # -- on the way out ---------------------------------------------------------------------------------------------

    def end(self, request: Request, reason: FinishReason, num_output: int | None = None) -> None:
        """End a request from outside: an abort, or a stop string that its first `num_output` tokens complete.

        Idempotent: a request that has ended stays as it ended. Only marks; the release follows I2.
        """
        if request.state is RequestState.FINISHED:
            return
        self.finish(request, reason)
        if num_output is not None:
            self._cut_output(request, num_output)

    def finish(self, request: Request, reason: FinishReason) -> None:
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

    def distrust(self, request: Request) -> None:
        """A row of `request`, which may have ended otherwise since it was launched, was no numbers: nor may its KV be.

        `release` will take it out of the cache. Only of a request that holds a slot.
        """
        self._distrusted.add(request.uid)

    def preempt(self, request: Request, need: int) -> None:
        """Make `request` give its pages back and compute again later; results of its launched steps still count.

        `need`: the missing pages that make it necessary.
        """
        if self.monitor is not None:
            self.monitor.preempting(request, need)
        self._leave_batch(request)
        request.state = RequestState.PREEMPTING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._leave_when_processed(request)

    def take_ended(self) -> tuple[Request, ...]:
        """Requests that ended since the last call; each is told once."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether terminal results wait to be told."""
        return bool(self._ended)

    def _cut_output(self, request: Request, num_output: int) -> None:
        """Drop output tokens after the first `num_output`."""
        request.num_output = min(request.num_output, num_output)
        request.token_ids = request.token_ids[: len(request.prompt_ids) + request.num_output]
        if request.logprobs is not None:
            del request.logprobs[num_output:]

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

    def release_processed(self) -> None:
        """Release whoever is to leave and is in no launched step any more."""
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
        forgotten: list[int] = []
        if request.uid in self._distrusted:
            self._distrusted.remove(request.uid)
            forgotten = self.pages.forget(request)
        else:
            # The newest token's KV is not computed, and that of a step past the end is not the sequence's.
            self._share(request, min(int(self.slots.length[slot]), len(request.token_ids) - 1))
        freed = self.pages.take_back(request)
        self.slots.free(slot)
        request.slot = 0
        self._hooks.released(slot, [*forgotten, *freed])
        if request.state is RequestState.PREEMPTING:
            request.state = RequestState.WAITING
            self.prefill.wait(request)

    def _share(self, request: Request, num_tokens: int) -> None:
        """Offer the cache the KV of the request's first `num_tokens` tokens, written by launched steps."""
        if request.prefix is None:
            raise RuntimeError(f"request {request.uid} holds a slot, but no lock in the prefix cache")
        request.prefix = self.cache.store(request.token_ids[:num_tokens], request.pages, request.prefix)
