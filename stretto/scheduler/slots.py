"""SlotTable: the host's exact mirror of the device's request tables, as arrays with one row per slot.

Owns which slot belongs to which request. A request's slot stays its own until `Scheduler.release` frees it, so a row
of a launched step always means the request that it meant at launch.
"""

from __future__ import annotations

import heapq

import numpy as np

from stretto.config import SchedulerConfig
from stretto.engine.sampling_rows import GREEDY_BELOW, SamplingMix
from stretto.request import Request, TokenArray
from stretto.scheduler.batch import Adjustment, BoolArray, IntArray


class SlotTable:
    """Host rows of all running requests. Slot 0 is padding and never handed out."""

    def __init__(self, config: SchedulerConfig) -> None:
        n = config.num_slots
        self.requests: list[Request | None] = [None] * n
        self.tokens = np.zeros((n, config.max_model_len + 1), np.int32)
        """Prompt and output tokens; valid up to what has been processed."""
        self.page_table = np.zeros((n, config.max_pages_per_request), np.int64)
        self.num_pages = np.zeros(n, np.int64)
        self.length = np.zeros(n, np.int64)
        """Tokens whose KV is computed by launched steps; equals the device's length once they are done."""
        self.target = np.zeros(n, np.int64)
        """Tokens to prefill: the prompt, and after a preemption the output so far."""
        self.prompt_len = np.zeros(n, np.int64)
        self.num_output = np.zeros(n, np.int64)
        """Output tokens processed and valid so far."""
        self.uid = np.zeros(n, np.int64)
        self.final_len = np.zeros(n, np.int64)
        self.in_flight = np.zeros(n, np.int64)
        """Launched and not yet processed steps that hold the slot."""
        self.active = np.zeros(n, np.bool_)
        """The request has not ended: results for it count."""
        self.stop_ids = np.full((n, config.max_stop_ids), -1, np.int64)
        self.stop_width = 0
        """Most stop ids that a request has had: columns of `stop_ids` worth looking at."""
        self.wants_logprobs = np.zeros(n, np.bool_)
        self._sampled = np.zeros(n, np.bool_)
        self._top_k = np.zeros(n, np.int64)
        self._top_p = np.zeros(n, np.bool_)
        self._min_p = np.zeros(n, np.bool_)
        self._min_tokens = np.zeros(n, np.bool_)
        self._num_logprobs = np.full(n, -1, np.int64)
        self._penalised = np.zeros(n, np.bool_)
        self._num_biases = np.zeros(n, np.int64)
        self._adjusted = np.zeros(n, np.bool_)
        """The device changes the slot's logits: by its last holder's wishes, if it has not been told otherwise."""
        self._vocab_size = config.vocab_size
        self._free = list(range(1, n))

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def acquire(self, request: Request) -> int:
        """Give `request` a slot and fill its row. Raises IndexError when none is free."""
        slot = heapq.heappop(self._free)
        params = request.params
        known = len(request.token_ids)
        self.requests[slot] = request
        self.tokens[slot, :known] = request.token_ids
        self.num_pages[slot] = 0
        self.length[slot] = 0
        self.target[slot] = known
        self.prompt_len[slot] = len(request.prompt_ids)
        self.num_output[slot] = request.num_output
        self.uid[slot] = request.uid
        self.final_len[slot] = request.final_len
        self.in_flight[slot] = 0
        self.active[slot] = True
        self.stop_width = max(self.stop_width, len(request.stop_ids))
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        self.wants_logprobs[slot] = params.logprobs is not None
        sampled = params.temperature >= GREEDY_BELOW
        self._sampled[slot] = sampled
        self._top_k[slot] = params.top_k if sampled and 0 < params.top_k < self._vocab_size else 0
        self._top_p[slot] = sampled and params.top_p < 1
        self._min_p[slot] = sampled and params.min_p > 0
        self._min_tokens[slot] = params.min_tokens > 0 and bool(request.stop_ids)
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._penalised[slot] = params.has_penalties
        self._num_biases[slot] = len(params.logit_bias or ())
        return slot

    def adjustment(self, request: Request, num_cached: int) -> Adjustment | None:
        """What the device must be told of how to change the logits of `request`, which has just got its slot.

        `num_cached`: tokens that no chunk will bring. None: the device has it right.
        """
        slot, params = request.slot, request.params
        adjusts = bool(self._penalised[slot]) or self._num_biases[slot] > 0
        if not adjusts and not self._adjusted[slot]:
            return None
        self._adjusted[slot] = adjusts
        biases = params.logit_bias or {}
        return Adjustment(
            slot=slot,
            prompt_length=len(request.prompt_ids),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            bias_ids=np.fromiter(biases.keys(), np.int32, len(biases)),
            biases=np.fromiter(biases.values(), np.float32, len(biases)),
            cached_tokens=request.token_ids[: num_cached if self._penalised[slot] else 0],
        )

    def holder(self, slot: int) -> Request:
        """The request that holds `slot`. Raises RuntimeError when nobody does."""
        request = self.requests[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} is in a step, but no request holds it")
        return request

    def held(self, slots: IntArray) -> BoolArray:
        """Which of `slots` a request holds."""
        return np.array([self.requests[slot] is not None for slot in slots.tolist()], np.bool_)

    def known_tokens(self, request: Request) -> TokenArray:
        """Copy of the prompt and the processed output of a request that holds a slot."""
        slot = request.slot
        return self.tokens[slot, : self.prompt_len[slot] + self.num_output[slot]].copy()

    def free(self, slot: int) -> None:
        """Take the slot back from its request."""
        if self.in_flight[slot]:
            raise RuntimeError(f"slot {slot} is freed while {self.in_flight[slot]} launched steps hold it")
        self.requests[slot] = None
        self.active[slot] = False
        self.length[slot] = 0
        self.num_pages[slot] = 0
        self.page_table[slot] = 0
        heapq.heappush(self._free, slot)

    def mix(self, slots: IntArray, positions: IntArray) -> SamplingMix:
        """What is known about the sampling of these rows before launch; never from a device tensor. hot path

        `positions`: index in its sequence of the token that each row gets.
        """
        sampled = self._sampled[slots]
        top_k = self._top_k[slots]
        max_top_k = int(top_k.max(initial=0))
        num_penalised = penalised_length = max_biases = 0
        if self._adjusted.any():
            penalised = self._penalised[slots]
            num_penalised = int(np.count_nonzero(penalised))
            penalised_length = int(positions.max(initial=0, where=penalised))
            max_biases = int(self._num_biases[slots].max(initial=0))
        return SamplingMix(
            all_greedy=not sampled.any(),
            all_top_k=bool(((top_k > 0) == sampled).all()),
            any_top_k=max_top_k > 0,
            max_top_k=max_top_k,
            any_top_p=bool(self._top_p[slots].any()),
            any_min_p=bool(self._min_p[slots].any()),
            any_min_tokens=bool(self._min_tokens[slots].any()),
            num_logprobs=int(self._num_logprobs[slots].max(initial=-1)),
            num_penalised=num_penalised,
            penalised_length=penalised_length,
            max_biases=max_biases,
        )

    def check(self) -> None:
        """Raise RuntimeError unless every slot is either free, once, or held by the request that names it."""
        free = set(self._free)
        if len(free) != len(self._free) or 0 in free:
            raise RuntimeError("the list of free slots names a slot twice, or slot 0")
        for slot in range(1, len(self.requests)):
            request = self.requests[slot]
            if (slot in free) == (request is not None):
                raise RuntimeError(f"slot {slot}: free {slot in free}, held by {request and request.uid}")
            if request is not None and request.slot != slot:
                raise RuntimeError(f"slot {slot} is held by request {request.uid}, which names slot {request.slot}")
