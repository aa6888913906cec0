"""`bench serve`: its figures follow from timestamps as defined, and its client counts what a server really sent."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.bench.serve import Load, ServerUnusable, bench_serve
from stretto.bench.serve_figures import concurrency, figures_of, meets, parse_goodput, parse_percentiles
from stretto.bench.serve_plot import as_svg
from stretto.bench.serve_prompts import Words, arrivals, random_prompts, trace_prompts
from stretto.bench.serve_request import EventSplitter, Outcome, Planned, Target, take_event
from stretto.errors import InvalidRequest
from stretto.simulate.trace import Trace
from stretto.tokenizer import Tokenizer
from tests.helpers.fake_openai import DONE, FakeOpenAI, chat, event, usage
from tests.helpers.server_process import ServerProcess


def outcome(sent: float, *chunks: float, output: int | None = None, error: str | None = None) -> Outcome:
    return Outcome(Planned("x", 10, 5), sent, list(chunks), "", 10, output, error)


def plan(count: int = 1, output_len: int = 3) -> Load:
    return Load([Planned(f"prompt {i}", 2, output_len) for i in range(count)], np.zeros(count), num_warmups=0)


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_latencies_are_those_of_the_timestamps() -> None:
    one = outcome(10.0, 10.5, 10.7, 11.3, output=5)
    assert one.ttft == pytest.approx(0.5)
    assert one.latency == pytest.approx(1.3)
    assert one.itl == pytest.approx([0.2, 0.6])
    assert one.tpot == pytest.approx(0.8 / 4)  # by tokens, not by events


def test_answers_of_one_token_have_no_tpot() -> None:
    figures = figures_of([outcome(0.0, 0.5, output=1), outcome(0.0, 0.5, 1.5, output=2)], 2.0)
    assert figures.latencies["tpot"].mean == pytest.approx(1000)
    assert figures.latencies["ttft"].mean == pytest.approx(500)


def test_rates_count_complete_requests_over_the_duration() -> None:
    figures = figures_of(
        [outcome(0, 1, 2, output=4), outcome(1, 3, 5, output=6), outcome(0, 1, output=9, error="broken")], 5.0
    )
    assert (figures.completed, figures.failed) == (2, 1)
    assert figures.request_throughput == pytest.approx(0.4)
    assert figures.output_throughput == pytest.approx(2.0)
    assert figures.total_token_throughput == pytest.approx(6.0)


def test_percentiles_are_numpys() -> None:
    ttfts = np.random.default_rng(0).exponential(0.2, 301)
    spread = figures_of([outcome(0, t, output=1) for t in ttfts], 1, percentiles=(50, 90, 99.9)).latencies["ttft"]
    assert list(spread.percentiles.values()) == pytest.approx(np.percentile(ttfts * 1000, [50, 90, 99.9]))
    assert spread.median == pytest.approx(spread.percentiles[50])
    assert spread.std == pytest.approx(ttfts.std() * 1000)


def test_without_a_complete_request_all_figures_are_zero() -> None:
    figures = figures_of([outcome(0, error="refused")], 1.0, goodput={"ttft": 1})
    assert figures.failed == 1
    assert figures.request_goodput == 0
    assert {spread.mean for spread in figures.latencies.values()} == {0}


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    fast, slow_start, slow_tokens = (
        outcome(0, 0.1, 0.2, output=2),
        outcome(0, 0.9, 1.0, output=2),
        outcome(0, 0.1, 0.9, output=2),
    )
    limits = parse_goodput(["ttft:500", "tpot:150"])
    assert [meets(one, limits) for one in (fast, slow_start, slow_tokens)] == [True, False, False]
    assert figures_of([fast, slow_start, slow_tokens], 2.0, goodput=limits).request_goodput == pytest.approx(0.5)
    assert figures_of([fast], 2.0).request_goodput is None
    assert meets(outcome(0, 0.1, output=1), {"tpot": 0})


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:fast", "speed:5", "ttft:-1", "ttft:nan"])
def test_limits_that_are_none_are_refused(pair: str) -> None:
    with pytest.raises(InvalidRequest, match="METRIC:MILLISECONDS"):
        parse_goodput([pair])


@pytest.mark.parametrize("text", ["", "fifty", "50,101", "-1"])
def test_percentiles_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="0 to 100"):
        parse_percentiles(text)


def test_concurrency_is_the_number_of_open_requests() -> None:
    times, counts = concurrency([outcome(0, 2), outcome(1, 3), outcome(3, 4), outcome(2, error="refused")])
    assert list(zip(times.tolist(), counts.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 1), (3, 0), (3, 1), (4, 0)]


# -- arrivals and prompts ---------------------------------------------------------------------------------------------


def test_an_infinite_rate_is_one_burst() -> None:
    assert arrivals(5, float("inf"), 1.0, 0).tolist() == [0] * 5


def test_arrivals_keep_the_rate_and_are_as_bursty_as_asked() -> None:
    variation = []
    for burstiness in (0.25, 1.0, 16.0):
        times = arrivals(4000, 50.0, burstiness, 1)
        assert times[-1] == pytest.approx(80.0)
        gaps = np.diff(times)
        variation.append(gaps.std() / gaps.mean())
    assert variation == pytest.approx([2.0, 1.0, 0.25], rel=0.1)  # 1 / sqrt(shape) of a gamma distribution


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (5, 0)])
def test_rates_that_are_none_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(InvalidRequest, match="above 0"):
        arrivals(3, rate, burstiness, 0)


def test_a_tokenizer_makes_prompt_lengths_exact(dummy_model: Path) -> None:
    tokenizer = Tokenizer.from_directory(dummy_model)
    words = Words.of(tokenizer)
    assert words.exact
    prompts = random_prompts(20, 50, 8, range_ratio=0.5, words=words, seed=3)
    assert [len(tokenizer.encode(p.prompt, False)) for p in prompts] == [p.input_len for p in prompts]
    assert {25 <= p.input_len <= 75 and 4 <= p.output_len <= 12 for p in prompts} == {True}
    assert len({p.input_len for p in prompts}) > 5


def test_equal_seeds_make_equal_prompts() -> None:
    def make(seed: int) -> list[Planned]:
        return random_prompts(3, 9, 2, range_ratio=0, words=Words.common(), seed=seed)

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert len({p.prompt for p in make(1)}) == 3


def test_prompts_of_a_trace_begin_alike_where_its_blocks_are_the_same() -> None:
    hashes = ((1, 2), (1, 3), (4,), (1, 2))
    trace = Trace(np.zeros(4), np.array([1024, 700, 20, 1100]), np.array([1, 2, 3, 4]), hashes)
    a, b, c, d = (p.prompt.split() for p in trace_prompts(trace, words=Words.common(), seed=0))
    assert [len(a), len(b), len(c), len(d)] == [1024, 700, 20, 1100]
    assert a[:512] == b[:512] == d[:512]
    assert a[512:700] != b[512:]
    assert d[:1024] == a
    assert c != a[:20]


# -- the stream -------------------------------------------------------------------------------------------------------


def test_events_are_the_same_however_the_network_cuts_them() -> None:
    stream = 'data: {"a": "é"}\n\n: note\n\ndata: one\r\ndata:two\r\n\r\nevent: x\ndata: [DONE]\n\n'.encode()
    expected = ['{"a": "é"}'.encode(), b"one\ntwo", b"[DONE]"]
    for size in range(1, len(stream)):
        splitter = EventSplitter()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [data for piece in pieces for data in splitter.feed(piece)] == expected


def test_only_events_with_text_count_as_tokens() -> None:
    one = outcome(0.0)
    take_event(one, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    take_event(one, {"choices": [{"delta": {"content": "a"}}]}, 2.0)
    take_event(one, {"choices": [{"text": "b"}]}, 3.0)
    assert take_event(one, {"choices": [{"delta": {}, "finish_reason": "length"}]}, 4.0)
    assert one.chunks == [2.0, 3.0]
    assert one.text == "ab"


def test_the_server_counts_the_tokens_if_it_does() -> None:
    def script(body: dict[str, Any]) -> list[bytes]:
        pieces = [chat("", role="assistant"), chat("one two "), chat("three", "length")]
        return [*pieces, usage(7, 3), DONE] if body["messages"][0]["content"] == "prompt 0" else [*pieces, DONE]

    with FakeOpenAI(script) as fake:
        report = bench_serve(Target(fake.url, "m", "chat", {"temperature": 0}), plan(2))
    assert [o.num_output for o in report.outcomes] == [3, 2]
    assert [o.num_input for o in report.outcomes] == [7, 2]
    assert [o.text for o in report.outcomes] == ["one two three"] * 2
    assert next(body for body in fake.bodies if body["messages"][0]["content"] == "prompt 0") == {
        "model": "m",
        "messages": [{"role": "user", "content": "prompt 0"}],
        "temperature": 0,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([chat("half")], "the stream broke off"),
        ([chat("half"), event(error={"message": "out of luck"})], "out of luck"),
        ([b"data: {no json\n\n"], "JSONDecodeError"),
        ([b"<html>", b"surprise</html>"], "the stream broke off"),
        ([event(choices=[7])], "AttributeError"),
    ],
)
def test_answers_that_do_not_end_well_are_failures(pieces: list[bytes], words: str) -> None:
    with FakeOpenAI(lambda body: pieces) as fake:
        report = bench_serve(Target(fake.url, "m"), plan())
    assert (report.figures.completed, report.figures.failed) == (0, 1)
    assert words in (report.outcomes[0].error or "")


def test_refusals_are_failures_with_the_servers_words() -> None:
    with FakeOpenAI(lambda body: [], status=429) as fake:
        report = bench_serve(Target(fake.url, "m"), plan(2))
        assert report.figures.failed == 2
        assert report.as_json(detailed=False)["errors"] == ["HTTP 429: no such luck"]
        with pytest.raises(ServerUnusable, match="no such luck"):
            bench_serve(Target(fake.url, "m"), Load(*(lambda p: (p.requests, p.arrival_s))(plan())))
        assert len(fake.bodies) == 3


def test_all_requests_of_a_burst_are_open_at_once_unless_that_is_limited() -> None:
    with FakeOpenAI(lambda body: [chat("x", "stop"), DONE]) as fake:
        fake.gate = threading.Barrier(8)  # nobody is answered before eight are there
        report = bench_serve(Target(fake.url, "m"), plan(8))
        assert report.figures.completed == fake.most_open == 8
        fake.gate, fake.most_open = None, 0
        limited = Load(plan(8).requests, np.zeros(8), max_concurrency=2, num_warmups=0)
        assert bench_serve(Target(fake.url, "m"), limited).figures.completed == 8
        assert fake.most_open <= 2


def test_requests_go_out_in_their_order_with_the_key() -> None:
    with FakeOpenAI(lambda body: [event(choices=[{"text": "x", "finish_reason": "stop"}])]) as fake:
        load = Load(plan(4).requests, np.arange(4) / 50, max_concurrency=1)
        report = bench_serve(Target(fake.url + "/v1/", "m", "completions"), load, api_key="secret")
    assert [body["prompt"] for body in fake.bodies] == ["prompt 0", *(f"prompt {i}" for i in range(4))]
    assert {headers["authorization"] for headers in fake.headers} == {"Bearer secret"}
    assert all(o.sent >= at for o, at in zip(report.outcomes, load.arrival_s, strict=True))


# -- the whole command ------------------------------------------------------------------------------------------------


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto", "bench", "serve", *options], capture_output=True, text=True, timeout=120
    )


def test_the_command_measures_a_real_server(server: ServerProcess, dummy_model: Path, tmp_path: Path) -> None:
    result, picture = tmp_path / "out" / "run.json", tmp_path / "run.svg"
    options = [
        "--base-url",
        server.url,
        "--endpoint",
        "completions",
        "--tokenizer",
        str(dummy_model),
        "--save-detailed",
    ]
    options += ["--num-prompts", "12", "--input-len", "30", "--output-len", "6", "--request-rate", "100"]
    ran = command(*options, "--goodput", "ttft:60000 tpot:60000", "--json", str(result), "--plot", str(picture))
    assert ran.returncode == 0, ran.stderr
    assert "12 complete, 0 failed" in ran.stdout
    data = json.loads(result.read_text())
    assert data["model_id"] == "tested"
    assert data["input_lens"] == [30] * 12
    assert data["output_lens"] == [6] * 12
    assert data["total_output_tokens"] == 72
    assert data["request_goodput"] == data["request_throughput"] > 0
    assert all(0 < ttft <= e2el <= data["duration"] for ttft, e2el in zip(data["ttfts"], data["e2els"], strict=True))
    assert all(len(gaps) < 6 for gaps in data["itls"])
    assert {f"p{n}_{name}_ms" for n in (50, 90, 95, 99) for name in ("ttft", "tpot", "itl", "e2el")} <= data.keys()
    root = ElementTree.fromstring(picture.read_text())
    ways = [element.get("class") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert ways.count("wait") == ways.count("run") == 12
    assert "href" not in picture.read_text()
    server.wait_until_idle()


def test_the_command_replays_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 5 + i, "output_length": 2 + i} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    one = ("--max-concurrency", "1")
    with FakeOpenAI(lambda body: [chat("x", "stop"), DONE]) as fake:
        ran = command(
            "--base-url", fake.url, "--trace", str(path), "--ignore-eos", "--extra-body", '{"top_k": 5}', *one
        )
    assert ran.returncode == 0, ran.stderr
    assert [body["max_tokens"] for body in fake.bodies] == [2, 2, 3, 4]  # the first one warms up
    assert [len(body["messages"][0]["content"].split()) for body in fake.bodies] == [5, 5, 6, 7]
    assert {(body["model"], body["ignore_eos"], body["top_k"]) for body in fake.bodies} == {("made-by-hand", True, 5)}


def test_a_run_with_failures_exits_with_one() -> None:
    with FakeOpenAI(lambda body: [chat("half")]) as fake:
        ran = command("--base-url", fake.url, "--num-prompts", "2", "--num-warmups", "0", "--workload", "sharegpt")
    assert ran.returncode == 1
    assert "2 x the stream broke off" in ran.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--base-url", "localhost:8000"], "http://"),
        (["--endpoint", "responses"], "chat, completions"),
        (["--workload", "trace"], "--trace FILE"),
        (["--workload", "poems"], "sharegpt"),
        (["--extra-body", "[]"], "JSON object"),
        (["--max-concurrency", "0"], "at least 1"),
    ],
)
def test_bad_options_are_refused(options: list[str], words: str) -> None:
    ran = command(*options)
    assert ran.returncode == 2
    assert words in ran.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    ran = command("--base-url", "http://127.0.0.1:9", "--num-prompts", "1")
    assert ran.returncode == 1
    assert "http://127.0.0.1:9/v1/models" in ran.stderr


def test_a_server_that_is_still_loading_is_waited_for() -> None:
    options = ("--num-prompts", "1", "--num-warmups", "0", "--ready-timeout")
    with FakeOpenAI(lambda body: [chat("x", "stop"), DONE]) as fake:
        fake.loading = 2
        assert command("--base-url", fake.url, *options, "60").returncode == 0
        fake.loading = 10**6
        ran = command("--base-url", fake.url, *options, "0.7")
    assert ran.returncode == 1
    assert "not ready after 0.7 s: it answers 503" in ran.stderr


def test_the_plot_survives_runs_without_values() -> None:
    with FakeOpenAI(lambda body: [], status=500) as fake:
        report = bench_serve(Target(fake.url, "m"), plan(2))
    assert ElementTree.fromstring(as_svg(report, "<none> & nothing")).get("aria-label") == "<none> & nothing"
