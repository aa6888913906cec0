"""What decode attention really reads in a run of W1: the page table, slots and contexts of one of its decode steps.

The scheduler is the real one, over an engine that computes nothing; where pages lie depends on who took and gave back
pages before. Owns the run; the requests are `workloads.py`'s.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from stretto.assembly import CUDA_BATCHED_TOKENS
from stretto.bench import workloads
from stretto.cache.base import NoCache
from stretto.cache.page_pool import PagePool
from stretto.config import SchedulerConfig
from stretto.device.base import Device
from stretto.engine.engine import Engine
from stretto.engine.graphs import ladder
from stretto.observe.timeline import Timeline
from stretto.request import Request, SamplingParams
from stretto.scheduler.batch import IntArray, StepPlan
from stretto.scheduler.loop import Loop
from stretto.scheduler.scheduler import Scheduler
from stretto.scheduler.turns import AddRequest, LocalTurns, Message
from stretto.simulate.engine import Clock, CostModel, SimulatedEngine, SimulatedStep, endless

_MAX_NUM_SEQS = 256
_MAX_MODEL_LEN = 4096
_PAGE_SIZE = 16
_NUM_PAGES = 60_000
"""About what an H200 has for the 0.6B."""


@dataclass(frozen=True, slots=True)
class DecodeState:
    """One decode step, padded as its graph is. Legend: B rows, R slots, M pages of a request."""

    slot_B: IntArray
    """0 for padding."""
    context_B: IntArray
    """Tokens that each row reads; 1 for padding."""
    page_table_RM: IntArray
    num_tokens: int
    """Of the rows that are no padding."""


class _Offline:
    """All requests at once, in the first turn (the loop's inbox)."""

    def __init__(self) -> None:
        self._requests = workloads.w1()

    def receive(self, block: bool) -> Iterable[Message]:
        requests, self._requests = self._requests, []
        return [
            AddRequest(
                Request(
                    index,
                    np.array(wanted.prompt_ids, np.int32),
                    SamplingParams(temperature=wanted.temperature, max_tokens=wanted.max_tokens, ignore_eos=True),
                    0,
                    len(wanted.prompt_ids) + wanted.max_tokens,
                    (),
                )
            )
            for index, wanted in enumerate(requests)
        ]


class _Last(SimulatedEngine):
    """Remembers the last plan."""

    plan: StepPlan | None = None

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self.plan = plan
        return super().launch(plan)


def w1_decode_step(index: int) -> DecodeState:
    """Step `index` of W1, counted from 0. Takes a second. ValueError if the step is none in which all rows decode."""
    config = SchedulerConfig(
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=CUDA_BATCHED_TOKENS,
        max_model_len=_MAX_MODEL_LEN,
        page_size=_PAGE_SIZE,
        num_pages=_NUM_PAGES,
        overlap_depth=1,
        enable_prefix_caching=False,
        vocab_size=151_936,
    )
    clock = Clock()
    device = cast(Device, clock)
    scheduler = Scheduler(config, device, PagePool(config.num_pages), NoCache())
    engine = _Last(clock, CostModel(), endless())
    loop = Loop(scheduler, cast(Engine, engine), LocalTurns(_Offline(), clock.now), Timeline(device))
    loop.turn()
    while loop.has_work and (engine.plan is None or engine.plan.index < index):
        loop.turn()
    plan = engine.plan
    if plan is None or plan.index != index or plan.num_decode < len(plan.slots_B):
        raise ValueError(f"step {index} of W1 is none in which all rows decode")
    sizes = ladder(_MAX_NUM_SEQS)
    rows = len(plan.slots_B)
    padded = sizes[bisect.bisect_left(sizes, rows)]
    slot_B, context_B = np.zeros(padded, np.int64), np.ones(padded, np.int64)
    slot_B[:rows], context_B[:rows] = plan.slots_B, plan.start_B + 1
    return DecodeState(slot_B, context_B, scheduler.slots.page_table.copy(), int(context_B[:rows].sum()))
