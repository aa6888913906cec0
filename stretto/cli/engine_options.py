"""The engine's options on the command line: each once, the same in every command that loads a model.

Owns names, groups and help. Types, defaults and checks are EngineConfig's: a field of it that is missing both here
and among those that are not offered fails a test.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import typer

from stretto.config import (
    DEFAULT_PAGE_SIZE,
    DTYPES,
    AttentionBackendName,
    BatchPolicy,
    ControlTransport,
    EngineConfig,
    LoadFormat,
    SyncGuardMode,
)

EngineArguments: TypeAlias = dict[str, Any]
"""Arguments of EngineConfig and of LLM by name: those that were given, and the command's own defaults."""

DEFAULT_MODEL = "smollm2-135m"

_MODEL, _ENGINE, _CACHE, _OVERLAP, _RANKS = "Model", "Engine", "KV cache", "Overlap", "Several devices and hosts"
_T = TypeVar("_T")


def _option(panel: str, help_: str, *names: str) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel)


def _one_of(*values: str) -> str:
    return f"{', '.join(values[:-1])} or {values[-1]}"


OPTIONS: dict[str, Any] = {
    "model": _option(_MODEL, "Directory, .gguf file, hub id, or the alias smollm2-135m."),
    "tokenizer": _option(_MODEL, "Tokenizer directory, if not the model's own."),
    "revision": _option(_MODEL, "Branch, tag or commit of a hub model."),
    "load_format": _option(_MODEL, f"{_one_of(*get_args(LoadFormat))}; dummy makes random weights."),
    "dtype": _option(_MODEL, f"{_one_of(*DTYPES)}; auto on a GPU is the checkpoint's, on a CPU what it computes fast."),
    "device": _option(_ENGINE, "auto, cpu, cuda or cuda:N."),
    "num_threads": _option(_ENGINE, "CPU threads of the device; all by default."),
    "max_model_len": _option(_ENGINE, "Longest sequence in tokens; the model's by default, but at most 8192."),
    "max_num_seqs": _option(_ENGINE, "Requests that may run at once."),
    "max_num_batched_tokens": _option(_ENGINE, "Tokens of one step; chosen by device."),
    "batch_policy": _option(_ENGINE, f"{_one_of(*get_args(BatchPolicy))}: whether prompts and answers share a step."),
    "max_logprobs": _option(_ENGINE, "Top log-probabilities that a request may ask for."),
    "seed": _option(_ENGINE, "Of dummy weights and of what the command draws: samples, a benchmark's prompts."),
    "attention_backend": _option(_ENGINE, f"{_one_of(*get_args(AttentionBackendName))}."),
    "enforce_eager": _option(_ENGINE, "On a GPU: no CUDA graphs.", "--enforce-eager/--no-enforce-eager"),
    "deterministic": _option(
        _ENGINE,
        "On a GPU: a request gets the same logits to the bit in any batch, chunking or cache state; slower.",
        "--deterministic/--no-deterministic",
    ),
    "gpu_memory_utilization": _option(_CACHE, "Share of the GPU's memory that weights, graphs and cache may take."),
    "kv_cache_memory_bytes": _option(
        _CACHE, "Bytes of the KV cache; by default what is left on a GPU, up to 4 GiB on a CPU."
    ),
    "num_pages": _option(_CACHE, "KV pages, instead of a size in bytes; also --num-gpu-blocks-override."),
    "page_size": _option(
        _CACHE,
        f"Tokens per KV page; by default {' and '.join(f'{n} on {d}' for d, n in DEFAULT_PAGE_SIZE.items())}.",
        "--block-size",
        "--page-size",
    ),
    "enable_prefix_caching": _option(
        _CACHE,
        "Share the KV of requests that begin alike; also --prefix-cache.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
    "overlap_depth": _option(_OVERLAP, "Steps launched and not yet processed; 0 is the plain loop."),
    "sync_guard": _option(_OVERLAP, f"Watch for hidden syncs: {_one_of(*get_args(SyncGuardMode))}."),
    "inject": _option(
        _OVERLAP, "Fault on purpose: sync@sample, pageable@stage, slow-host=2ms, slow-device=5ms; may be repeated."
    ),
    "tensor_parallel_size": _option(
        _RANKS, "Ranks that share the model, a device each.", "--tensor-parallel-size", "-tp"
    ),
    "nnodes": _option(_RANKS, "Hosts that the ranks are spread over."),
    "node_rank": _option(_RANKS, "Which of the hosts this is; 0 leads."),
    "dist_init_addr": _option(_RANKS, "host:port of host 0, where the ranks meet."),
    "control_transport": _option(
        _RANKS, f"{_one_of(*get_args(ControlTransport))}: what carries the schedule to the ranks."
    ),
}
"""By field of EngineConfig, in the order of --help."""

NOT_OFFERED = {
    "skip_tokenizer_init": "every command reads and writes text",
    "hf_token": "a secret does not belong into a process list; HF_TOKEN in the environment gives it",
    "max_queued_requests": "commands wait for all that they queue; `serve` has it as a limit of the HTTP side",
    "max_queued_tokens": "as max_queued_requests",
    "request_timeout_s": "commands wait for all that they queue; `serve` has it as --request-timeout",
}
"""Fields of EngineConfig that are no options, and why."""

ALIASES = {
    "prefix-cache": "enable-prefix-caching",
    "no-prefix-cache": "no-enable-prefix-caching",
    "num-gpu-blocks-override": "num-pages",
}
"""Second names that would not fit into the help beside the first; app.py has them replaced wherever they are given."""


def engine_command(**defaults: Any) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Give a command the engine's options in the place of its parameter `engine`, which gets those that have a value.

    `defaults` are the command's own, by field; None leaves the choice to EngineConfig and shows no default.
    """

    def expand(command: Callable[..., _T]) -> Callable[..., _T]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            expanded = _parameters(defaults) if parameter.name == "engine" else [parameter]
            parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in expanded]

        @functools.wraps(command)
        def run(**given: Any) -> _T:
            values = {name: given.pop(name) for name in OPTIONS}
            return command(**given, engine={name: value for name, value in values.items() if value is not None})

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return expand


def _parameters(defaults: dict[str, Any]) -> list[inspect.Parameter]:
    """The options as parameters, with EngineConfig's types and defaults."""
    types = get_type_hints(EngineConfig)
    own = {field.name: None if field.default is MISSING else field.default for field in fields(EngineConfig)}
    own |= {"model": DEFAULT_MODEL, "inject": None} | defaults
    parameters = []
    for name, option in OPTIONS.items():
        of_command = list[str] if name == "inject" else str if get_origin(types[name]) is Literal else types[name]
        if own[name] is None:
            of_command = of_command | None
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=own[name], annotation=Annotated[of_command, option]
            )
        )
    return parameters
