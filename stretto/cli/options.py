"""Options that several commands share, under vLLM's names, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.loading import LoadProgress
from stretto.cli.record import recorded

if TYPE_CHECKING:
    from stretto.llm import LLM

DEFAULT_MODEL = "smollm2-135m"

_MODEL, _SAMPLING, _ENGINE, _OUTPUT, _OVERLAP = "Model", "Sampling", "Engine", "Output", "Overlap"

Model = Annotated[
    str, typer.Option(help="Directory, .gguf file, hub id, or the alias smollm2-135m.", rich_help_panel=_MODEL)
]
TokenizerPath = Annotated[
    str | None, typer.Option("--tokenizer", help="Tokenizer directory, if not the model's own.", rich_help_panel=_MODEL)
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=_MODEL)]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.", rich_help_panel=_MODEL)]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16, bfloat16 or int4.", rich_help_panel=_MODEL)]

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)]
NumThreads = Annotated[
    int | None, typer.Option(help="CPU threads of the device; all by default.", rich_help_panel=_ENGINE)
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence in tokens.", rich_help_panel=_ENGINE)]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests that may run at once.", rich_help_panel=_ENGINE)]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens of one step at most.", rich_help_panel=_ENGINE)]
OverlapDepth = Annotated[
    int | None,
    typer.Option(help="Steps launched and not yet processed; 0 is the plain loop.", rich_help_panel=_ENGINE),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Share the KV of requests that begin alike.",
        rich_help_panel=_ENGINE,
    ),
]
Inject = Annotated[
    list[str] | None,
    typer.Option(
        help="Fault on purpose: sync@sample, pageable@stage, slow-host=2ms, slow-device=5ms; may be repeated.",
        rich_help_panel=_OVERLAP,
    ),
]
SyncGuard = Annotated[
    str | None, typer.Option(help="Watch for hidden syncs: off, count or raise.", rich_help_panel=_OVERLAP)
]

Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest tokens up to this probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Makes samples reproducible.", rich_help_panel=_SAMPLING)]
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


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine as given; the names are those of `stretto.LLM`."""

    model: str
    tokenizer: str | None
    revision: str | None
    load_format: str
    dtype: str
    device: str
    num_threads: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    overlap_depth: int | None
    enable_prefix_caching: bool = True
    inject: list[str] | None = None
    sync_guard: str | None = None

    def as_arguments(self) -> dict[str, Any]:
        unset = {name for name in ("inject", "sync_guard") if getattr(self, name) is None}
        return {name: getattr(self, name) for name in self.__slots__ if name not in unset}


@contextmanager
def loaded(options: EngineOptions) -> Iterator[LLM]:
    """The model of these options, with progress on standard error while it loads. Closed at the end of the block."""
    with LoadProgress() as progress:
        progress("starting", 0.0)
        from stretto.llm import LLM  # brings torch

        llm = LLM(**options.as_arguments(), on_progress=progress)
    with llm, recorded():
        yield llm
