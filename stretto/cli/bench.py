"""`stretto bench`: the benchmarks as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli import options as o
from stretto.cli.bench_serve import serve
from stretto.cli.engine_options import EngineArguments, engine_command
from stretto.cli.failures import reported_failures
from stretto.cli.text import prompt_lines

if TYPE_CHECKING:
    from stretto.bench.throughput import ThroughputReport

_PANEL = "Workload"

bench_app = typer.Typer(help="Measure Stretto on this machine, or any server.", no_args_is_help=True)
bench_app.command()(serve)


@bench_app.callback()
def _group() -> None:
    """Measure Stretto on this machine, or any server."""


@bench_app.command()
@engine_command(enable_prefix_caching=False)
def throughput(
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.", rich_help_panel=_PANEL)] = 16,
    input_len: Annotated[int, typer.Option(help="Random prompt tokens of each.", rich_help_panel=_PANEL)] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens of each.", rich_help_panel=_PANEL)] = 128,
    dataset_path: Annotated[
        Path | None, typer.Option(help="Take prompts from this text file, one a line.", rich_help_panel=_PANEL)
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Runs before the measured one.", rich_help_panel=_PANEL)] = 1,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", "--output-json", help="Also write the figures to this file.", rich_help_panel="Output"),
    ] = None,
    *,
    engine: EngineArguments,
    debug: o.Debug = False,
) -> None:
    """Tokens per second, steps and bubble share of many requests at once (greedy, end-of-sequence ignored)."""
    with reported_failures(debug):
        from stretto.bench.throughput import Workload

        lines = () if dataset_path is None else tuple(prompt_lines(dataset_path))
        workload = Workload(num_prompts, input_len, output_len, engine["seed"], num_warmups, lines)
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
        with o.loaded(engine) as llm:
            from stretto.bench.throughput import measure_throughput

            report = measure_throughput(llm, workload)
        _print(report)
        if json_path is not None:
            json_path.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")


def _print(report: ThroughputReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in report.rows():
        table.add_row(name, value)
    Console().print(table)
