"""`bench serve`: sends a load to a server and gathers what came of it. Owns pacing, connections and the result file."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from stretto.bench.serve_figures import LATENCIES, FloatArray, ServeFigures, figures_of
from stretto.bench.serve_request import Outcome, Planned, Target, send
from stretto.errors import StrettoError
from stretto.version import __version__

Progress = Callable[[int, int], None]
"""Told how many requests have ended, and how many there are."""


class ServerUnusable(StrettoError):
    """The server cannot be reached, or does not answer as an OpenAI-compatible server does."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, and how."""

    requests: Sequence[Planned]
    arrival_s: FloatArray
    """Seconds after the start at which each is sent, in order."""
    max_concurrency: int | None = None
    """Requests that may be open at once: later ones wait on this side, and their time counts from when they go out."""
    num_warmups: int = 1
    """Copies of the first request that are sent, one after the other, before anything is measured."""


@dataclass(frozen=True, slots=True)
class ServeReport:
    """A run's figures, its requests, and what was asked for."""

    figures: ServeFigures
    outcomes: Sequence[Outcome]
    """In the order of sending; times are seconds after the start."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self, *, detailed: bool) -> dict[str, Any]:
        """For a file. `detailed`: also every request's lengths and times, in vLLM's arrays (seconds)."""
        result: dict[str, Any] = {
            "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
            "stretto_version": __version__,
            **{name: str(value) if value == math.inf else value for name, value in self.settings.items()},
            **self.figures.as_json(),
            "errors": sorted({o.error for o in self.outcomes if o.error is not None}),
        }
        if detailed:
            result |= {
                "start_times": [o.sent for o in self.outcomes],
                "input_lens": [o.num_input for o in self.outcomes],
                "output_lens": [o.num_output for o in self.outcomes],
                "ttfts": [o.ttft for o in self.outcomes],
                "itls": [o.itl for o in self.outcomes],
                "e2els": [o.latency for o in self.outcomes],
                "generated_texts": [o.text for o in self.outcomes],
                "request_errors": [o.error or "" for o in self.outcomes],
            }
        return result

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of what a person wants to read; latencies are in latency_rows."""
        f = self.figures
        rows = [
            ("requests", f"{f.completed} complete, {f.failed} failed"),
            ("duration", f"{f.duration_s:.2f} s"),
            ("input tokens", f"{f.input_tokens}"),
            ("output tokens", f"{f.output_tokens} of {sum(o.planned.output_len for o in self.outcomes)} asked for"),
            ("requests/s", f"{f.request_throughput:.2f}"),
            ("output tokens/s", f"{f.output_throughput:.1f}"),
            ("all tokens/s", f"{f.total_token_throughput:.1f}"),
            ("most at once", f"{f.peak_concurrency}"),
        ]
        if f.request_goodput is not None:
            share = f.request_goodput / f.request_throughput if f.request_throughput else 0.0
            rows.append(("goodput", f"{f.request_goodput:.2f} requests/s ({100 * share:.0f} % of the complete ones)"))
        return rows

    def latency_rows(self) -> list[tuple[str, ...]]:
        """A head, and for each latency its name, mean, deviation and percentiles in milliseconds."""
        head = ("ms", "mean", "std", *(f"p{number:g}" for number in self.figures.latencies["ttft"].percentiles))
        rows: list[tuple[str, ...]] = [head]
        for name in LATENCIES:
            spread = self.figures.latencies[name]
            values = (spread.mean, spread.std, *spread.percentiles.values())
            rows.append((name.upper(), *(f"{value:.2f}" for value in values)))
        return rows


async def run_load(
    target: Target,
    load: Load,
    *,
    api_key: str | None = None,
    timeout_s: float = 3600.0,
    progress: Progress | None = None,
) -> tuple[list[Outcome], float]:
    """Send everything; the outcomes in the order of sending, times after the start, and the duration in seconds.

    Raises ServerUnusable if a warm-up fails; then nothing else is sent.
    """
    async with open_session(api_key, timeout_s) as session:
        for _ in range(load.num_warmups):
            outcome = await send(session, target, load.requests[0])
            if outcome.error is not None:
                raise ServerUnusable(f"a first request to {target.url} fails: {outcome.error}")
        gate = asyncio.Semaphore(load.max_concurrency or len(load.requests))
        start = time.perf_counter()
        ended = 0

        async def one(planned: Planned) -> Outcome:
            nonlocal ended
            async with gate:
                outcome = await send(session, target, planned)
            ended += 1
            if progress is not None:
                progress(ended, len(load.requests))
            return outcome

        tasks = []
        async with asyncio.TaskGroup() as group:
            for planned, at in zip(load.requests, load.arrival_s.tolist(), strict=True):
                wait = start + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(planned)))
        duration = time.perf_counter() - start
    outcomes = [task.result() for task in tasks]
    for outcome in outcomes:
        outcome.sent -= start
        outcome.chunks = [at - start for at in outcome.chunks]
    return outcomes, duration


def open_session(api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """Any number of connections, which are kept. Needs a running event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
        trust_env=True,
        read_bufsize=2**20,
    )


async def wait_until_ready(base_url: str, api_key: str | None, seconds: float) -> None:
    """Wait until the server listens and does not answer 503 (as it does while it loads). Raises ServerUnusable."""
    url = _models_url(base_url)
    until = time.monotonic() + seconds
    why = ""
    async with open_session(api_key, 30.0) as session:
        while time.monotonic() < until:
            try:
                async with session.get(url) as response:
                    if response.status != 503:
                        return
                    why = "it answers 503"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            await asyncio.sleep(min(0.5, max(0.0, until - time.monotonic())))
    raise ServerUnusable(f"{url} is not ready after {seconds:g} s: {why}")


def _models_url(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1") + "/v1/models"


async def first_model(base_url: str, api_key: str | None) -> str:
    """The name of the model that the server serves. Raises ServerUnusable."""
    url = _models_url(base_url)
    try:
        async with open_session(api_key, 30.0) as session, session.get(url) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise ServerUnusable(f"{url} does not say which model there is ({error}); give --model") from error


def bench_serve(
    target: Target,
    load: Load,
    *,
    api_key: str | None = None,
    timeout_s: float = 3600.0,
    percentiles: Sequence[float] = (50, 90, 95, 99),
    goodput: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ServeReport:
    """Run the load and report. Blocks until its last answer is complete. Raises ServerUnusable."""
    outcomes, duration = asyncio.run(run_load(target, load, api_key=api_key, timeout_s=timeout_s, progress=progress))
    figures = figures_of(outcomes, duration, percentiles=percentiles, goodput=goodput)
    return ServeReport(figures, outcomes, settings or {})
