"""`stretto trace record`: run one of the other commands and write a trace of it. Owns how that command is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.failures import reported_failures
from stretto.errors import InvalidRequest

ALLOWED = ("generate", "bench")
SUFFIXES = (".json", ".json.gz")
TRACE, STACKS = "STRETTO_TRACE", "STRETTO_TRACE_STACKS"
"""Environment: where the command that runs writes its trace, and whether with Python frames."""


@contextmanager
def recorded() -> Iterator[None]:
    """Record the block if the environment says where to: what a loaded model does, not its loading."""
    path = os.environ.get(TRACE)
    if not path:
        yield
        return
    from stretto.observe.record import profile

    with profile(path, stacks=os.environ.get(STACKS, "1") != "0"):
        yield


def check_suffix(path: Path) -> None:
    """Raise InvalidRequest before anything is loaded, if the trace could not be written."""
    if not path.name.endswith(SUFFIXES):
        raise InvalidRequest(f"the trace is to be written to {path}; allowed suffixes: {', '.join(SUFFIXES)}")


def record(
    command: Annotated[
        list[str],
        typer.Argument(help="What to run: generate or bench with their options, after --.", metavar="-- COMMAND..."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The trace: .json or .json.gz.", rich_help_panel="Output")
    ] = Path("stretto-trace.json.gz"),
    stacks: Annotated[
        bool, typer.Option(help="Record Python frames, by which lines are named.", rich_help_panel="Output")
    ] = True,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Also push NVTX ranges, for Nsight Systems.", rich_help_panel="Output")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Run a workload with Stretto under torch.profiler: stretto trace record -- generate "Hello" --max-tokens 32."""
    with reported_failures(debug):
        if command[0] not in ALLOWED:
            raise InvalidRequest(f"cannot record {command[0]!r}; allowed: {', '.join(ALLOWED)}")
        if nvtx:
            os.environ["STRETTO_NVTX"] = "1"
        check_suffix(output)
        output.parent.mkdir(parents=True, exist_ok=True)  # says before the model is loaded if it cannot be
        os.environ[TRACE], os.environ[STACKS] = str(output), str(int(stacks))
        from stretto.cli.app import app

        try:
            code = app(command, standalone_mode=False)
        finally:
            del os.environ[TRACE], os.environ[STACKS]
        if not output.exists():
            raise InvalidRequest(f"{' '.join(command)}: ended before it had a model to run; nothing was recorded")
        print(f"stretto: trace written to {output}; explain it: stretto trace analyze {output}", file=sys.stderr)
    if isinstance(code, int) and code:
        raise SystemExit(code)
