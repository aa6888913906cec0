"""What Prometheus reads at /metrics. Names are vLLM's behind the prefix `stretto:` where the meaning is the same.

Counters and histograms are the front end's own; with several front ends they live in files of the private directory and
are added up when they are read. The engine's figures come fresh from the engine.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from stretto.ipc.answer import Answer
from stretto.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)

ENGINE_GAUGES = {
    "num_running": ("num_requests_running", "Requests that the engine computes."),
    "num_waiting": ("num_requests_waiting", "Requests that wait for a slot."),
    "bubble_share": ("bubble_share", "Share of device time without work although a request was runnable."),
    "launching_share": ("launching_share", "Share of device time in steps that the host was still launching."),
    "occupancy": ("occupancy", "Device busy / wall time while anything was runnable."),
    "overlap_window_s": ("overlap_window_seconds", "Mean time of a step in which the host can work for free."),
    "overlap_depth": ("overlap_depth", "Steps that may be launched and not yet processed."),
    "num_pages": ("num_pages", "KV pages that requests can hold."),
    "num_free_pages": ("num_free_pages", "KV pages that requests could take now, unused cached ones included."),
    "num_cached_pages": ("num_cached_pages", "KV pages that the prefix cache holds, those in use included."),
}
ENGINE_COUNTERS = {
    "steps": ("engine_steps", "Steps processed."),
    "prompt_tokens": ("engine_prompt_tokens", "Prompt tokens computed, again after preemptions included."),
    "output_tokens": ("engine_generation_tokens", "Tokens generated, those of left clients included."),
    "busy_s": ("engine_busy_seconds", "Device time of steps."),
    "bubble_s": ("bubble_seconds", "Device time without work although a request was runnable."),
    "launching_s": ("launching_seconds", "Device time of steps that the host was still launching."),
    "runnable_s": ("runnable_seconds", "Wall time while anything was runnable."),
    "receive_s": ("host_receive_seconds", "Host time of the loop: taking messages."),
    "schedule_s": ("host_schedule_seconds", "Host time of the loop: choosing what runs."),
    "launch_s": ("host_launch_seconds", "Host time of the loop: launching steps."),
    "blocked_s": ("host_blocked_seconds", "Host time of the loop: the planned wait for results."),
    "process_s": ("host_process_seconds", "Host time of the loop: using results."),
    "preemptions": ("num_preemptions", "Requests that had to give their pages back."),
    "hidden_syncs": ("hidden_syncs", "Unplanned waits of the host for the device."),
    "queried_tokens": ("prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache."),
    "cached_tokens": ("prefix_cache_hits", "Prompt tokens whose KV came from the prefix cache."),
}


class _BulkHistogram(Histogram):
    """A histogram that takes many equal observations at the price of one."""

    def observe_many(self, amount: float, count: int) -> None:
        """`amount`, `count` times."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class Metrics:
    """Counters and histograms of one front end, and how they are shown."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"stretto:{name}", text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> _BulkHistogram:
            made = _BulkHistogram(
                f"stretto:{name}", text, ("model_name",), registry=self._registry, buckets=tuple(map(float, buckets))
            )
            return made.labels(model)

        self._requests = counter("request_success", "Requests whose samples ended, by reason.", "finished_reason")
        for reason in FinishReason:
            self._requests.labels(model, reason.value)  # shown from the start, as 0
        self._http = counter("http_requests", "HTTP requests by route and status.", "path", "status")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests.").labels(model)
        self._generated = counter("generation_tokens", "Tokens that clients were given.").labels(model)
        self._first = histogram("time_to_first_token_seconds", "From admission to the first token.", _SECONDS)
        self._between = histogram(
            "inter_token_latency_seconds", "Between the steps that gave a request tokens.", _SECONDS
        )
        self._each = histogram(
            "request_time_per_output_token_seconds", "Mean time between the tokens of a request.", _SECONDS
        )
        self._all = histogram("e2e_request_latency_seconds", "From admission to the end.", _SECONDS)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)

    def step(self, count: int, waits: Mapping[float, int]) -> None:
        """So many tokens came with a step; `waits` are seconds, each with the number of requests that had it."""
        self._generated.inc(count)
        for seconds, times in waits.items():
            self._between.observe_many(seconds, times)

    def http(self, path: str, status: int) -> None:
        """A response was sent; `path` is a route, never what the client made up."""
        self._http.labels(self._model, path, str(status)).inc()

    def observe(self, answer: Answer) -> None:
        """A request has ended."""
        now = time.monotonic()
        self._prompt.inc(answer.num_prompt_tokens)
        self._prompt_sizes.observe(answer.num_prompt_tokens)
        self._output_sizes.observe(answer.num_output_tokens)
        self._all.observe(now - answer.created)
        if answer.first_token_at is not None:
            self._first.observe(answer.first_token_at - answer.created)
            longest = max(sample.num_tokens for sample in answer.samples)
            if longest > 1:
                self._each.observe((now - answer.first_token_at) / (longest - 1))
        for sample in answer.samples:
            self._requests.labels(self._model, sample.finish_reason or "abort").inc()

    def show(self, engine: Mapping[str, float]) -> bytes:
        """Everything, in Prometheus' text form; `engine` are the engine's figures."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        shown = CollectorRegistry()
        shown.register(_EngineFigures(engine, self._model))
        return generate_latest(registry) + generate_latest(shown)


class _EngineFigures:
    """The engine's figures as metrics; what it does not know is not shown."""

    def __init__(self, figures: Mapping[str, float], model: str) -> None:
        self._figures = figures
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client."""
        for key, (name, text) in ENGINE_GAUGES.items():
            if key in self._figures:
                gauge = GaugeMetricFamily(f"stretto:{name}", text, labels=("model_name",))
                gauge.add_metric((self._model,), self._figures[key])
                yield gauge
        for key, (name, text) in ENGINE_COUNTERS.items():
            if key in self._figures:
                counter = CounterMetricFamily(f"stretto:{name}", text, labels=("model_name",))
                counter.add_metric((self._model,), self._figures[key])
                yield counter
        pages = self._figures.get("num_pages", 0)
        if pages:
            usage = GaugeMetricFamily(
                "stretto:kv_cache_usage_perc", "Share of KV pages in use.", labels=("model_name",)
            )
            usage.add_metric((self._model,), 1 - self._figures.get("num_free_pages", 0) / pages)
            yield usage
