"""Options that several commands share beside the engine's, under vLLM's names; and how an engine is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.engine_options import EngineArguments
from stretto.cli.loading import LoadProgress
from stretto.cli.record import recorded

if TYPE_CHECKING:
    from stretto.llm import LLM

_SAMPLING, _OUTPUT = "Sampling", "Output"

Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest tokens up to this probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=_SAMPLING)]
MaxTokens = Annotated[int, typer.Option(help="New tokens at most.", rich_help_panel=_SAMPLING)]
MinTokens = Annotated[int, typer.Option(help="New tokens at least.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option(help="String that ends the text; may be repeated.", rich_help_panel=_SAMPLING)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence.", rich_help_panel=_SAMPLING)
]

System = Annotated[str | None, typer.Option(help="System message of the conversation.", rich_help_panel="Conversation")]

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)]


def print_hidden_syncs(llm: LLM) -> None:
    """What `--sync-guard` has found, on standard error."""
    for finding in llm.hidden_syncs():
        print(f"stretto: hidden sync: {finding}", file=sys.stderr)


@contextmanager
def loaded(engine: EngineArguments) -> Iterator[LLM]:
    """An LLM with these options, with progress on standard error while it loads. Closed at the end of the block."""
    with LoadProgress() as progress:
        progress("starting", 0.0)
        from stretto.llm import LLM  # brings torch

        llm = LLM(**engine, on_progress=progress)
    with llm, recorded():
        yield llm
