"""The figures of a serving benchmark, from the timestamps of its requests, as vLLM's `bench serve` defines them.

Owns formulas only; docs/bench-serve.md writes them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.bench.serve_request import Outcome
from stretto.errors import InvalidRequest

FloatArray = npt.NDArray[np.float64]

LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:500` as milliseconds by metric. Raises InvalidRequest."""
    limits = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            colon = ""
        if not colon or name not in GOODPUT_METRICS or not limits[name] >= 0:
            raise InvalidRequest(
                f"goodput is {pair!r}; allowed: METRIC:MILLISECONDS with a metric of {', '.join(GOODPUT_METRICS)}"
            )
    return limits


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`50,99` as numbers. Raises InvalidRequest."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number <= 100 for number in numbers):
        raise InvalidRequest(f"percentiles are {text!r}; allowed: numbers from 0 to 100 with commas between")
    return numbers


@dataclass(frozen=True, slots=True)
class Spread:
    """A latency over all requests, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
        """Zeros when there are no values."""
        values = np.asarray(seconds if len(seconds) else [0.0]) * 1000
        found = np.percentile(values, percentiles).tolist()
        return cls(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            dict(zip(percentiles, found, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """What a run gave. Rates are per second of the run's duration; latencies are milliseconds."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """Requests per second that met every limit; None without limits."""
    output_throughput: float
    total_token_throughput: float
    peak_concurrency: int
    latencies: Mapping[str, Spread]
    """By the names of LATENCIES."""

    def as_json(self) -> dict[str, Any]:
        """Under the names that vLLM's result files have."""
        result: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.peak_concurrency,
        }
        for name, spread in self.latencies.items():
            result[f"mean_{name}_ms"] = spread.mean
            result[f"median_{name}_ms"] = spread.median
            result[f"std_{name}_ms"] = spread.std
            result |= {f"p{number:g}_{name}_ms": value for number, value in spread.percentiles.items()}
        return result


def figures_of(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    percentiles: Sequence[float] = (50, 90, 95, 99),
    goodput: Mapping[str, float] | None = None,
) -> ServeFigures:
    """Figures of the requests that completed, over a run of `duration_s`. `goodput`: limits in milliseconds."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    seconds = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [outcome.tpot for outcome in done if outcome.tpot is not None],
        "itl": [gap for outcome in done for gap in outcome.itl],
        "e2el": [outcome.latency for outcome in done],
    }
    num_input, num_output = sum(o.num_input for o in done), sum(o.num_output for o in done)
    good = sum(meets(outcome, goodput) for outcome in done) if goodput else None
    return ServeFigures(
        duration_s=duration_s,
        completed=len(done),
        failed=len(outcomes) - len(done),
        input_tokens=num_input,
        output_tokens=num_output,
        request_throughput=len(done) / duration_s,
        request_goodput=None if good is None else good / duration_s,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        peak_concurrency=int(concurrency(outcomes)[1].max(initial=0)),
        latencies={name: Spread.of(values, percentiles) for name, values in seconds.items()},
    )


def meets(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a completed request kept every limit (milliseconds). An answer of one token has a TPOT of 0."""
    values = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1000 * values[name] <= limit for name, limit in limits.items())


def concurrency(outcomes: Sequence[Outcome]) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Times at which the number of open requests changes, and the number from then on. Without text none was open."""
    open_ = [outcome for outcome in outcomes if outcome.chunks]
    times = np.array([o.sent for o in open_] + [o.chunks[-1] for o in open_])
    change = np.repeat([1, -1], len(open_))
    order = np.lexsort((change, times))  # at equal times an end counts before a start
    return times[order], np.cumsum(change[order])
