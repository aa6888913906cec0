"""`stretto bench serve`: a load against any OpenAI-compatible server."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.failures import FAILED, reported_failures

if TYPE_CHECKING:
    from stretto.bench.serve import Load, ServeReport

SERVER, WORKLOAD, TRAFFIC, OUTPUT = "Server", "Workload", "Traffic", "Output"
WORKLOADS = ("random", "sharegpt", "long-context", "shared-prefix", "trace")


def serve(
    base_url: Annotated[
        str, typer.Option(help="The server, with or without /v1.", rich_help_panel=SERVER)
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(help="Its name in the API; the first that the server lists unless given.", rich_help_panel=SERVER),
    ] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.", rich_help_panel=SERVER)] = "chat",
    api_key: Annotated[
        str | None,
        typer.Option(help="Else OPENAI_API_KEY from the environment.", rich_help_panel=SERVER, show_default=False),
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object: more fields of every request.", rich_help_panel=SERVER)
    ] = None,
    temperature: Annotated[float, typer.Option(rich_help_panel=SERVER)] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for full outputs (no field of OpenAI's).", rich_help_panel=SERVER)
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.", rich_help_panel=SERVER)] = 3600.0,
    ready_timeout: Annotated[
        float,
        typer.Option(
            "--ready-timeout",
            "--ready-check-timeout-sec",
            help="Seconds to wait for a server that is still starting.",
            rich_help_panel=SERVER,
        ),
    ] = 0.0,
    workload: Annotated[
        str, typer.Option("--workload", "--dataset-name", help=", ".join(WORKLOADS), rich_help_panel=WORKLOAD)
    ] = "random",
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests; a trace's all unless given, else 100.", rich_help_panel=WORKLOAD)
    ] = None,
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", help="random: prompt tokens.", rich_help_panel=WORKLOAD)
    ] = 1024,
    output_len: Annotated[
        int, typer.Option("--output-len", "--random-output-len", help="random: new tokens.", rich_help_panel=WORKLOAD)
    ] = 128,
    range_ratio: Annotated[
        float,
        typer.Option("--range-ratio", "--random-range-ratio", help="random: spread.", rich_help_panel=WORKLOAD),
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", "--dataset-path", help="Trace file (JSON lines or CSV).", rich_help_panel=WORKLOAD),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model or directory whose vocabulary makes prompt lengths exact.", rich_help_panel=WORKLOAD),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.", rich_help_panel=WORKLOAD)] = 0,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Per second; inf: all at once. A trace keeps its times unless given.", rich_help_panel=TRAFFIC
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson; less: burstier; more: more even.", rich_help_panel=TRAFFIC)
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests open at once.", rich_help_panel=TRAFFIC)] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before the run.", rich_help_panel=TRAFFIC)] = 1,
    percentiles: Annotated[
        str, typer.Option("--percentiles", "--metric-percentiles", rich_help_panel=OUTPUT)
    ] = "50,90,95,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limit METRIC:MS of ttft, tpot or e2el; may be repeated.", rich_help_panel=OUTPUT),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", "--output-json", help="Write the figures here.", rich_help_panel=OUTPUT)
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="And every request's times and text.", rich_help_panel=OUTPUT)
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the run as SVG here.", rich_help_panel=OUTPUT)] = None,
    debug: Annotated[bool, typer.Option(help="Show where an error comes from.")] = False,
) -> None:
    """Send a load to an OpenAI-compatible server and measure what its clients see."""
    with reported_failures(debug):
        import asyncio

        from stretto.bench.serve import bench_serve, first_model, wait_until_ready
        from stretto.bench.serve_figures import parse_goodput, parse_percentiles
        from stretto.bench.serve_request import PATHS, Target
        from stretto.errors import InvalidRequest

        if endpoint not in PATHS:
            raise InvalidRequest(f"endpoint is {endpoint!r}; allowed: {', '.join(PATHS)}")
        if not base_url.startswith(("http://", "https://")):
            raise InvalidRequest(f"base_url is {base_url!r}; it must begin with http:// or https://")
        limits = parse_goodput([pair for given in goodput or () for pair in given.split()])
        wanted = parse_percentiles(percentiles)
        fields: dict[str, Any] = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
        fields |= _json_object(extra_body)
        load, rate = _make_load(
            workload,
            num_prompts,
            (input_len, output_len, range_ratio),
            trace,
            tokenizer,
            seed,
            request_rate,
            burstiness,
        )
        if max_concurrency is not None and max_concurrency < 1:
            raise InvalidRequest(f"max_concurrency is {max_concurrency}; allowed: at least 1")
        load = replace(load, max_concurrency=max_concurrency, num_warmups=num_warmups)
        key = api_key or os.environ.get("OPENAI_API_KEY")
        if ready_timeout > 0:
            asyncio.run(wait_until_ready(base_url, key, ready_timeout))
        name = model or asyncio.run(first_model(base_url, key))
        target = Target(base_url, name, endpoint, fields)  # type: ignore[arg-type]  # checked above
        settings = {
            "backend": "openai-chat" if endpoint == "chat" else "openai",
            "base_url": base_url,
            "model_id": name,
            "workload": workload if trace is None else str(trace),
            "num_prompts": len(load.requests),
            "request_rate": rate,
            "burstiness": burstiness,
            "max_concurrency": max_concurrency,
            "seed": seed,
            "goodput": limits,
        }
        for path in (json_path, plot):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        with _Bar(len(load.requests)) as bar:
            report = bench_serve(
                target,
                load,
                api_key=key,
                timeout_s=timeout,
                percentiles=wanted,
                goodput=limits,
                settings=settings,
                progress=bar,
            )
        _print(report)
        if json_path is not None:
            text = json.dumps(report.as_json(detailed=save_detailed), indent=2)
            json_path.write_text(text + "\n", encoding="utf-8")
        if plot is not None:
            from stretto.bench.serve_plot import as_svg

            plot.write_text(as_svg(report, f"{name}: {settings['workload']}, {_rate_words(rate)}"), encoding="utf-8")
        failed = report.figures.failed
    if failed:
        raise typer.Exit(FAILED)


def _make_load(
    workload: str,
    num_prompts: int | None,
    sizes: tuple[int, int, float],
    trace_path: Path | None,
    tokenizer: str | None,
    seed: int,
    rate: float | None,
    burstiness: float,
) -> tuple[Load, float | str]:
    """The load, and its rate for people."""
    from stretto.bench.serve import Load
    from stretto.bench.serve_prompts import Words, arrivals, random_prompts, trace_prompts
    from stretto.errors import InvalidRequest
    from stretto.simulate.trace import generate, read_trace

    if workload not in WORKLOADS:
        raise InvalidRequest(f"workload is {workload!r}; allowed: {', '.join(WORKLOADS)}")
    if workload == "trace" and trace_path is None:
        raise InvalidRequest("the workload trace needs --trace FILE")
    if num_prompts is not None and num_prompts < 1:
        raise InvalidRequest(f"num_prompts is {num_prompts}; allowed: at least 1")
    words = Words.common() if tokenizer is None else Words.of(_tokenizer(tokenizer))
    count = num_prompts or 100
    if trace_path is not None:
        trace = read_trace(trace_path)
        requests = trace_prompts(trace, num_prompts, words=words, seed=seed)
        if rate is None:
            return Load(requests, trace.arrival_s[: len(requests)]), "as traced"
    elif workload == "random":
        requests = random_prompts(count, sizes[0], sizes[1], range_ratio=sizes[2], words=words, seed=seed)
    else:
        requests = trace_prompts(generate(workload, count, 0.0, seed), words=words, seed=seed)
    rate = math.inf if rate is None else rate
    return Load(requests, arrivals(len(requests), rate, burstiness, seed)), rate


def _tokenizer(name: str) -> Any:
    from stretto.models.resolve import resolve_model
    from stretto.tokenizer import Tokenizer

    source = resolve_model(name, token=os.environ.get("HF_TOKEN"))
    if source.kind == "gguf":
        from stretto.models.gguf_file import GGUFFile

        return Tokenizer.from_gguf(GGUFFile(source.path).metadata)
    return Tokenizer.from_directory(source.path)


def _json_object(text: str | None) -> dict[str, Any]:
    from stretto.errors import InvalidRequest

    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"extra_body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"extra_body is {text!r}; allowed: a JSON object")
    return fields


def _rate_words(rate: float | str) -> str:
    if isinstance(rate, str):
        return f"arrivals {rate}"
    return "all at once" if math.isinf(rate) else f"{rate:g} requests/s"


class _Bar:
    """How many requests have ended, on a terminal."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="req", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)

    def __call__(self, ended: int, total: int) -> None:
        self._bar.update(ended - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *args: object) -> None:
        self._bar.close()


def _print(report: ServeReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in report.rows():
        table.add_row(name, value)
    console.print(table)
    head, *rows = report.latency_rows()
    latencies = Table(*head, box=None, pad_edge=False)
    for column in latencies.columns[1:]:
        column.justify = "right"
    for row in rows:
        latencies.add_row(*row)
    console.print()
    console.print(latencies)
    for error in _distinct([o.error for o in report.outcomes if o.error is not None]):
        console.print(f"failed: {error}", style="red", markup=False, highlight=False)


def _distinct(errors: Sequence[str]) -> list[str]:
    """Each error once, with how often, the most frequent first."""
    counts = {error: errors.count(error) for error in set(errors)}
    return [f"{counts[error]} x {error}" for error in sorted(counts, key=lambda e: (-counts[e], e))[:10]]
