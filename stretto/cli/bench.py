"""`stretto bench`: the benchmarks as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli import options as o
from stretto.cli.bench_serve import serve
from stretto.cli.failures import reported_failures

if TYPE_CHECKING:
    from stretto.bench.throughput import ThroughputReport

_PANEL = "Workload"

bench_app = typer.Typer(help="Measure Stretto on this machine, or any server.", no_args_is_help=True)
bench_app.command()(serve)


@bench_app.callback()
def _group() -> None:
    """Measure Stretto on this machine, or any server."""


@bench_app.command()
def throughput(
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.", rich_help_panel=_PANEL)] = 16,
    input_len: Annotated[int, typer.Option(help="Random prompt tokens of each.", rich_help_panel=_PANEL)] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens of each.", rich_help_panel=_PANEL)] = 128,
    dataset_path: Annotated[
        Path | None, typer.Option(help="Take prompts from this text file, one a line.", rich_help_panel=_PANEL)
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Runs before the measured one.", rich_help_panel=_PANEL)] = 1,
    seed: Annotated[int, typer.Option(help="Chooses the random prompts.", rich_help_panel=_PANEL)] = 0,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", "--output-json", help="Also write the figures to this file.", rich_help_panel="Output"),
    ] = None,
    model: o.Model = o.DEFAULT_MODEL,
    tokenizer: o.TokenizerPath = None,
    revision: o.Revision = None,
    load_format: o.LoadFormat = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    num_threads: o.NumThreads = None,
    max_model_len: o.MaxModelLen = None,
    max_num_seqs: o.MaxNumSeqs = 64,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    overlap_depth: o.OverlapDepth = None,
    enable_prefix_caching: o.PrefixCaching = False,
    inject: o.Inject = None,
    sync_guard: o.SyncGuard = None,
    debug: o.Debug = False,
) -> None:
    """Tokens per second, steps and bubble share of many requests at once (greedy, end-of-sequence ignored)."""
    engine = o.EngineOptions(
        model=model,
        tokenizer=tokenizer,
        revision=revision,
        load_format=load_format,
        dtype=dtype,
        device=device,
        num_threads=num_threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        overlap_depth=overlap_depth,
        enable_prefix_caching=enable_prefix_caching,
        inject=inject,
        sync_guard=sync_guard,
    )
    with reported_failures(debug):
        from stretto.bench.throughput import Workload

        workload = Workload(num_prompts, input_len, output_len, seed, num_warmups, _lines(dataset_path))
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
        with o.loaded(engine) as llm:
            from stretto.bench.throughput import measure_throughput

            report = measure_throughput(llm, workload)
        _print(report)
        if json_path is not None:
            json_path.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")


def _lines(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    from stretto.errors import InvalidRequest

    lines = tuple(line for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    if not lines:
        raise InvalidRequest(f"{path} has no prompts; put one on each line")
    return lines


def _print(report: ThroughputReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in report.rows():
        table.add_row(name, value)
    Console().print(table)
