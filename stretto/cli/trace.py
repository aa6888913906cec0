"""`stretto trace`: explain recorded traces, of any engine or training loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import options as o
from stretto.cli.failures import reported_failures
from stretto.cli.record import record

if TYPE_CHECKING:
    from stretto.observe.trace import Analysis

_OUTPUT = "Output"

trace_app = typer.Typer(help="Find out why the device was idle, from a recorded trace.", no_args_is_help=True)
trace_app.command()(record)


@trace_app.callback()
def _group() -> None:
    """Find out why the device was idle, from a recorded trace."""


Files = Annotated[
    list[Path],
    typer.Argument(
        help="PyTorch profiler traces (.json, .json.gz) or Nsight Systems exports (.sqlite).", metavar="FILE..."
    ),
]
StepPattern = Annotated[
    str | None, typer.Option("--step", help="Regular expression for the annotations that mark steps.", metavar="REGEX")
]


@trace_app.command()
def analyze(
    files: Files,
    step: StepPattern = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write the analysis to this file; - is standard output.", rich_help_panel=_OUTPUT),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the picture, one file that opens anywhere.", rich_help_panel=_OUTPUT)
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write the trace with steps and gaps, for ui.perfetto.dev.", rich_help_panel=_OUTPUT),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print all findings.", rich_help_panel=_OUTPUT)] = False,
    debug: o.Debug = False,
) -> None:
    """Name the line that kept the device waiting, how to fix it, and what that gains."""
    with reported_failures(debug):
        from rich.console import Console

        from stretto.errors import InvalidRequest
        from stretto.observe.trace import analyze as analyze_file
        from stretto.observe.trace.report_text import print_report

        if len(files) > 1 and (html or perfetto):
            raise InvalidRequest("--html and --perfetto take one trace; give one FILE")
        analyses = []
        for i, file in enumerate(files):
            analysis = analyze_file(file, step_pattern=step)
            if str(json_path) != "-":
                if i:
                    print()
                print_report(analysis, Console(highlight=False), most=10**6 if show_all else 6)
            analyses.append(analysis)
        _write(analyses, json_path, html, perfetto)


@trace_app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="The trace to compare with.", metavar="A")],
    after: Annotated[Path, typer.Argument(help="The trace of the change.", metavar="B")],
    step: StepPattern = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)] = False,
    debug: o.Debug = False,
) -> None:
    """Compare two traces step by step: what became slower, which causes came or went."""
    with reported_failures(debug):
        from rich.console import Console

        from stretto.observe.trace import analyze as analyze_file
        from stretto.observe.trace.diff import diff as difference
        from stretto.observe.trace.diff import print_diff
        from stretto.observe.trace.report_json import as_json

        result = difference(*(as_json(analyze_file(file, step_pattern=step)) for file in (before, after)))
        if json_output:
            print(json.dumps(result, indent=2))
        else:
            print_diff(result, Console(highlight=False))


def _write(analyses: list[Analysis], json_path: Path | None, html: Path | None, perfetto: Path | None) -> None:
    if json_path is not None:
        from stretto.observe.trace.report_json import as_json

        documents: list[dict[str, Any]] = [as_json(analysis) for analysis in analyses]
        text = json.dumps(documents if len(documents) > 1 else documents[0], indent=2)
        if str(json_path) == "-":
            print(text)
        else:
            _place(json_path).write_text(text + "\n", encoding="utf-8")
    if html is not None:
        from stretto.observe.trace.report_html import as_html

        _place(html).write_text(as_html(analyses[0]), encoding="utf-8")
    if perfetto is not None:
        from stretto.observe.trace.report_perfetto import write_perfetto

        write_perfetto(analyses[0], _place(perfetto))


def _place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
