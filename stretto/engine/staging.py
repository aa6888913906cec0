"""How a plan travels to the device: packed into one int32 buffer, through a ring of pinned and device buffers.

Owns the ring and the layout of the packed words. Legend: B rows, S sampled rows, U new pages, A admitted requests,
P prefill tokens, E stop ids per request, J adjusted rows, Q scored positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from stretto.config import SchedulerConfig
from stretto.device.base import Device, Event, HostBuffer, Region
from stretto.engine.packed_results import HostResults, ResultLayout
from stretto.engine.scoring import ScoredOut
from stretto.prompt_logprobs import Float32Array, Int32Array, ScoredTokens
from stretto.request import MAX_LOGIT_BIAS
from stretto.scheduler.batch import Adjustment, StepPlan

ADMISSION_WORDS = 9
"""Words of an admitted request before its stop ids: slot, length, top_k, seed low, seed high, first position that
may stop, and as float bits temperature, top_p, min_p."""


ADJUSTMENT_WORDS = 4
"""Words of an adjusted row before its biases: prompt length, and as float bits presence, frequency and repetition
penalty. The biased ids follow, then as float bits their biases, then the cached tokens."""


@dataclass(frozen=True, slots=True)
class AdjustmentLayout:
    """What an adjusted row's part of a packed plan holds."""

    slot: int
    penalised: bool
    num_biases: int
    num_cached: int

    @classmethod
    def of(cls, adjustment: Adjustment) -> AdjustmentLayout:
        """The layout of `adjustment`."""
        return cls(adjustment.slot, adjustment.penalised, len(adjustment.bias_ids), len(adjustment.cached_tokens))

    @property
    def num_words(self) -> int:
        """Length of the part."""
        return ADJUSTMENT_WORDS + 2 * self.num_biases + self.num_cached


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where the parts of a packed plan lie, in int32 words."""

    num_rows: int
    num_sampled: int
    num_pages: int
    num_admitted: int
    num_prefill: int
    stop_width: int
    num_scored: int = 0
    adjusted: tuple[AdjustmentLayout, ...] = ()

    @classmethod
    def of(cls, plan: StepPlan, stop_width: int) -> PlanLayout:
        """The layout of `plan`, with `stop_width` stop ids per admitted request (E)."""
        return cls(
            len(plan.slots_B),
            len(plan.sampled_S),
            len(plan.page_id_U),
            len(plan.admitted),
            len(plan.prefill_tokens),
            stop_width,
            plan.num_scored,
            tuple(AdjustmentLayout.of(adjustment) for adjustment in plan.adjusted),
        )

    @property
    def sizes(self) -> list[int]:
        """Words of: slots, new tokens, sampled rows, page slots, page indices, page ids, admissions, prefill tokens,
        scored positions, the tokens after them, adjusted rows."""
        admission = self.num_admitted * (ADMISSION_WORDS + self.stop_width)
        rows, pages = self.num_rows, self.num_pages
        adjusted = sum(part.num_words for part in self.adjusted)
        scored = self.num_scored
        return [
            rows,
            rows,
            self.num_sampled,
            pages,
            pages,
            pages,
            admission,
            self.num_prefill,
            scored,
            scored,
            adjusted,
        ]

    def scored_words(self, staged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a packed plan: index into T of each scored position, and the token after it; int32 views [Q]."""
        at = sum(self.sizes[:8])
        return staged[at : at + self.num_scored], staged[at + self.num_scored : at + 2 * self.num_scored]

    @property
    def num_words(self) -> int:
        """Length of the packed plan."""
        return sum(self.sizes)

    @staticmethod
    def capacity(config: SchedulerConfig) -> int:
        """Words of the largest plan that `config` allows."""
        rows = config.max_rows
        pages = rows * config.max_pages_per_request
        admission = ADMISSION_WORDS + config.max_stop_ids + ADJUSTMENT_WORDS + 2 * MAX_LOGIT_BIAS
        # The scheduler keeps the cached tokens of a step's adjusted rows within one longest sequence.
        return 3 * rows + 3 * pages + rows * admission + 3 * config.max_num_batched_tokens + config.max_model_len


def pack(plan: StepPlan, layout: PlanLayout, out: npt.NDArray[np.int32]) -> None:
    """Write `plan` into the first `layout.num_words` words of `out` (host). hot path"""
    parts: list[npt.NDArray[np.integer]] = [
        plan.slots_B,
        plan.num_new_B,
        plan.sampled_S,
        plan.page_slot_U,
        plan.page_index_U,
        plan.page_id_U,
        _pack_admissions(plan, layout) if plan.admitted else _NOTHING,
        plan.prefill_tokens,
    ]
    if plan.scored:
        parts += [np.arange(chunk.at, chunk.at + len(chunk.tokens)) for chunk in plan.scored]
        parts += [chunk.tokens for chunk in plan.scored]
    for adjustment in plan.adjusted:
        parts += _pack_adjustment(adjustment)
    np.concatenate(parts, axis=0, out=out[: layout.num_words], casting="same_kind")


def _pack_admissions(plan: StepPlan, layout: PlanLayout) -> npt.NDArray[np.int32]:
    """Admitted requests are the last rows of the plan, in its order."""
    start_A = plan.start_B[len(plan.start_B) - layout.num_admitted :].tolist()
    words = np.full((layout.num_admitted, ADMISSION_WORDS + layout.stop_width), -1, np.int32)
    for row, request, start in zip(words, plan.admitted, start_A, strict=True):
        params = request.params
        seed = request.seed & (2**64 - 1)
        row[:6] = np.array(
            [
                request.slot,
                start,
                min(max(params.top_k, 0), 2**31 - 1),
                seed & 0xFFFFFFFF,
                seed >> 32,
                min(len(request.prompt_ids) + params.min_tokens, 2**31 - 1) if params.min_tokens else 0,
            ],
            np.uint32,
        ).view(np.int32)
        row[6:9] = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
        row[9 : 9 + len(request.stop_ids)] = request.stop_ids
    return words.ravel()


def _pack_adjustment(adjustment: Adjustment) -> list[npt.NDArray[np.int32]]:
    # Beyond float32 a penalty is its largest or smallest number: neither infinite nor 0, which would make NaNs.
    repetition = min(max(adjustment.repetition_penalty, float(_FLOAT32.tiny)), float(_FLOAT32.max))
    penalties = np.array([adjustment.presence_penalty, adjustment.frequency_penalty, repetition], np.float32)
    return [
        np.array([adjustment.prompt_length], np.int32),
        penalties.view(np.int32),
        adjustment.bias_ids,
        adjustment.biases.view(np.int32),
        adjustment.cached_tokens,
    ]


@dataclass(frozen=True, slots=True)
class ScoredBuffers:
    """Log-probabilities of a step's prompt tokens, tops padded to the largest number that may be asked for."""

    logprob_Q: HostBuffer
    rank_Q: HostBuffer
    top_ids_QL: HostBuffer
    top_logprobs_QL: HostBuffer

    @classmethod
    def pinned(cls, device: Device, config: SchedulerConfig) -> ScoredBuffers:
        """Pinned host buffers for a step that is one prompt chunk."""
        tokens, tops = config.max_num_batched_tokens, config.max_logprobs
        return cls(
            device.pinned((tokens,), torch.float32),
            device.pinned((tokens,), torch.int32),
            device.pinned((tokens, tops), torch.int32),
            device.pinned((tokens, tops), torch.float32),
        )

    def view(self, count: int) -> ScoredTokens:
        """The first `count` tokens' as the host sees them."""
        return ScoredTokens(
            cast(Float32Array, self.logprob_Q.array)[:count],
            cast(Int32Array, self.rank_Q.array)[:count],
            cast(Int32Array, self.top_ids_QL.array)[:count],
            cast(Float32Array, self.top_logprobs_QL.array)[:count],
        )

    def fill(self, device: ScoredOut, count: int) -> None:
        """Copy the first `count` tokens' from the device; work on a stream."""
        self.logprob_Q.tensor[:count].copy_(device.logprob_Q[:count], non_blocking=True)
        self.rank_Q.tensor[:count].copy_(device.rank_Q[:count], non_blocking=True)
        self.top_ids_QL.tensor[:count].copy_(device.top_ids_QL[:count], non_blocking=True)
        self.top_logprobs_QL.tensor[:count].copy_(device.top_logprobs_QL[:count], non_blocking=True)


@dataclass(frozen=True, slots=True)
class ResultBuffers:
    """Results of a step: one entry per sampled row, tops padded to the largest number that may be asked for."""

    words: HostBuffer
    """int64, laid out as on the device."""
    views: HostResults
    """Of the words."""
    lengths_B: HostBuffer
    """Of all rows; only when everything is checked."""
    scored: ScoredBuffers
    """Of prompt tokens."""

    @classmethod
    def pinned(cls, device: Device, config: SchedulerConfig) -> ResultBuffers:
        """Pinned host buffers for the largest step."""
        layout = ResultLayout(config.max_rows, config.max_logprobs)
        words = device.pinned((layout.num_words,), torch.int64)
        lengths_B = device.pinned((config.max_rows,), torch.int64)
        return cls(words, layout.on_host(words.array), lengths_B, ScoredBuffers.pinned(device, config))


@dataclass(frozen=True, slots=True)
class RingEntry:
    """What one step in flight uses alone: staging on both sides, results, events."""

    index: int
    host: HostBuffer
    device: torch.Tensor
    results: ResultBuffers
    staged: Event
    """The copy to the device is done: the host side may be refilled."""
    consumed: Event
    """The plan is unpacked: the device side may be overwritten."""

    @property
    def host_region(self) -> Region:
        """Name of the pinned plan."""
        return ("staging.host", self.index)

    @property
    def device_region(self) -> Region:
        """Name of the plan on the device."""
        return ("staging.device", self.index)

    @property
    def results_region(self) -> Region:
        """Name of the pinned results."""
        return ("results.host", self.index)

    @property
    def scored_region(self) -> Region:
        """Name of the pinned log-probabilities of prompt tokens."""
        return ("scored.host", self.index)


class StagingRing:
    """Overlap depth + 1 entries, used in turn."""

    def __init__(self, device: Device, config: SchedulerConfig, size: int) -> None:
        capacity = PlanLayout.capacity(config)
        self._entries = [
            RingEntry(
                index=i,
                host=device.pinned((capacity,), torch.int32),
                device=torch.zeros(capacity, dtype=torch.int32, device=device.torch_device),
                results=ResultBuffers.pinned(device, config),
                staged=device.event(),
                consumed=device.event(),
            )
            for i in range(size)
        ]
        self._next = 0

    @staticmethod
    def device_bytes(config: SchedulerConfig, size: int) -> int:
        """Device memory of a ring of `size` entries."""
        return size * PlanLayout.capacity(config) * torch.int32.itemsize

    def next(self) -> RingEntry:
        """The entry for the next step; its host side may be written. hot path

        With an entry more than steps in flight its earlier copy is long done, so the wait for it never blocks.
        """
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        entry.staged.synchronize()
        return entry


_NOTHING = np.empty(0, np.int32)
_FLOAT32 = np.finfo(np.float32)
