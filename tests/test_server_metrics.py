"""What Prometheus reads is what happened."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client.parser import text_string_to_metric_families

from stretto.runtime_stats import RuntimeStats
from stretto.server import metrics
from tests.helpers.server_process import ServerProcess


def test_metrics_count_what_was_done(server: ServerProcess) -> None:
    server.wait_until_idle()
    names = (
        "generation_tokens_total",
        "prompt_tokens_total",
        "request_success_total",
        "inter_token_latency_seconds_count",
    )
    before = [server.metric(name) for name in names]
    status, _ = server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 20})
    assert status == 200
    after = [server.metric(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [20, 3, 1, 19]
    assert server.metric("num_pages") > 0
    assert server.metric("engine_steps_total") >= 20
    assert 0 <= server.metric("bubble_share") < 1


def test_cached_prompt_tokens_are_counted(server: ServerProcess) -> None:
    body = {"prompt": [201 + i % 60 for i in range(150)], "max_tokens": 2}
    server.post("/v1/completions", body)
    before, queries = server.metric("prefix_cache_hits_total"), server.metric("prefix_cache_queries_total")
    _, answer = server.post("/v1/completions", body)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert server.metric("prefix_cache_hits_total") - before == cached
    assert server.metric("prefix_cache_queries_total") - queries == 150
    assert server.metric("num_cached_pages") > 0


def test_every_figure_that_is_shown_is_one_that_the_engine_has() -> None:
    shown = {*metrics.ENGINE_GAUGES, *metrics.ENGINE_COUNTERS}
    assert shown <= {field.name for field in fields(RuntimeStats)}


def test_metrics_are_prometheus_text_and_histograms_add_up(server: ServerProcess) -> None:
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
    _, body = server.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    for name in (
        "stretto:time_to_first_token_seconds",
        "stretto:inter_token_latency_seconds",
        "stretto:e2e_request_latency_seconds",
        "stretto:request_generation_tokens",
    ):
        samples = families[name].samples
        (count,) = [sample.value for sample in samples if sample.name.endswith("_count")]
        (last,) = [sample.value for sample in samples if sample.labels.get("le") == "+Inf"]
        assert count == last > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"):
        assert f"stretto:{name}" in families
