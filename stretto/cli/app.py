"""The tree of commands, and the form of its usage errors. What a command does is in the file of its name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from stretto.cli.bench import bench_app
from stretto.cli.chat import chat
from stretto.cli.engine_options import ALIASES
from stretto.cli.failures import INTERRUPTED, fail, usage_message
from stretto.cli.generate import generate
from stretto.cli.serve import serve
from stretto.cli.simulate import simulate
from stretto.cli.trace import trace_app
from stretto.version import __version__

app = typer.Typer(
    name="stretto",
    help="Stretto: LLM inference whose CPU prepares the next step while the device computes this one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: ALIASES.get(name, name),
    },
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(simulate)
app.add_typer(bench_app, name="bench")
app.add_typer(trace_app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


def run() -> None:
    """Parse the command line, run the command, exit."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(INTERRUPTED)
    except Exception as error:
        message = usage_message(error)
        if message is None:
            raise
        context = getattr(error, "ctx", None)
        if not message:  # the help that no_args_is_help shows
            sys.exit(0)
        where = f" (see {context.command_path} --help)" if context else ""
        raise fail(f"{message.rstrip('.')}{where}", getattr(error, "exit_code", 2)) from None
    sys.exit(code if isinstance(code, int) else 0)
