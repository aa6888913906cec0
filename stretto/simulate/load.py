"""Runs a request trace through the real scheduler in virtual time, and says what its clients would have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from stretto.cache.base import NoCache, PrefixCache
from stretto.cache.page_pool import PagePool
from stretto.cache.radix import RadixCache
from stretto.config import SchedulerConfig
from stretto.device.base import Device
from stretto.engine.engine import Engine
from stretto.observe.timeline import Timeline
from stretto.request import Request, SamplingParams
from stretto.scheduler.loop import Loop
from stretto.scheduler.scheduler import Scheduler
from stretto.scheduler.turns import AddRequest, LocalTurns, Message
from stretto.simulate.engine import Clock, CostModel, SimulatedEngine, endless
from stretto.simulate.trace import Trace

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one latency over all requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: FloatArray) -> Percentiles:
        """Zeros when there are no values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(values.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load gave, in virtual time."""

    requests: int
    refused: int
    """Too long for the context or the cache."""
    seconds: float
    steps: int
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    cached_tokens: int
    preemptions: int
    bubble_share: float
    ttft_s: Percentiles
    """Time to first token."""
    tpot_s: Percentiles
    """Time per output token after the first."""
    e2e_s: Percentiles

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Arrivals:
    """Hands the trace's requests to the loop when their time has come; with nothing else to do, time jumps."""

    def __init__(self, trace: Trace, config: SchedulerConfig, clock: Clock, costs: CostModel) -> None:
        self._trace = trace
        self._config = config
        self._clock = clock
        self._costs = costs
        self._next = 0
        self.refused = 0

    @property
    def is_over(self) -> bool:
        return self._next == len(self._trace)

    def receive(self, block: bool) -> Iterable[Message]:
        self._clock.time += self._costs.host_turn_s
        arrivals = self._trace.arrival_s
        if block and not self.is_over:
            self._clock.time = max(self._clock.time, float(arrivals[self._next]))
        until = int(np.searchsorted(arrivals, self._clock.time, side="right"))
        messages = []
        for index in range(self._next, until):
            request = self._request(index)
            if request is None:
                self.refused += 1
            else:
                messages.append(AddRequest(request))
        self._next = until
        return messages

    def _request(self, index: int) -> Request | None:
        prompt_len, output_len = int(self._trace.input_length[index]), int(self._trace.output_length[index])
        if prompt_len + output_len > self._config.max_model_len:
            return None
        return Request(index, self._trace.prompt(index), _PARAMS, 0, prompt_len + output_len, ())


def simulate_load(
    trace: Trace,
    config: SchedulerConfig,
    costs: CostModel,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Run the whole trace; `progress` is told how many of its requests have ended. Takes minutes for 10^6 requests."""
    clock = Clock()
    device = cast(Device, clock)
    pool = PagePool(config.num_pages)
    cache: PrefixCache = RadixCache(pool, config.page_size) if _shares(trace, config) else NoCache()
    scheduler = Scheduler(config, device, pool, cache)
    arrivals = _Arrivals(trace, config, clock, costs)
    timeline = Timeline(device)
    engine = cast(Engine, SimulatedEngine(clock, costs, endless()))
    loop = Loop(scheduler, engine, LocalTurns(arrivals, device.now), timeline)
    first = np.full(len(trace), np.nan)
    last = np.full(len(trace), np.nan)
    ended = 0
    while loop.has_work or not arrivals.is_over:
        for output in loop.turn():
            uids = output.uids
            new = uids[np.isnan(first[uids])]
            first[new] = clock.time
            last[uids] = clock.time
            ended += len(output.finished)
        if progress is not None:
            progress(ended + arrivals.refused, len(trace))
    served = ~np.isnan(first)
    return _report(trace, served, first, last, scheduler, timeline, arrivals.refused, clock.time)


def _shares(trace: Trace, config: SchedulerConfig) -> bool:
    return config.enable_prefix_caching and trace.hash_ids is not None


def _report(
    trace: Trace,
    served: npt.NDArray[np.bool_],
    first: FloatArray,
    last: FloatArray,
    scheduler: Scheduler,
    timeline: Timeline,
    refused: int,
    seconds: float,
) -> LoadReport:
    arrival, outputs = trace.arrival_s[served], trace.output_length[served]
    several = outputs > 1
    decoding = (last - first)[served][several] / (outputs[several] - 1)
    totals = timeline.totals()
    output_tokens = int(outputs.sum())
    return LoadReport(
        requests=int(served.sum()),
        refused=refused,
        seconds=seconds,
        steps=totals.steps,
        input_tokens=int(trace.input_length[served].sum()),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds if seconds else 0.0,
        cached_tokens=scheduler.lifecycle.num_cached_tokens,
        preemptions=scheduler.lifecycle.num_preemptions,
        bubble_share=totals.bubble_share,
        ttft_s=Percentiles.of(first[served] - arrival),
        tpot_s=Percentiles.of(decoding),
        e2e_s=Percentiles.of(last[served] - arrival),
    )


_PARAMS = SamplingParams(temperature=0)
