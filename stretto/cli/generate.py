"""`stretto generate`: answers to the prompts of the command line, a file or standard input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli import options as o
from stretto.cli.engine_options import EngineArguments, engine_command
from stretto.cli.failures import reported_failures
from stretto.cli.text import prompt_lines, read_stdin
from stretto.errors import InvalidRequest

if TYPE_CHECKING:
    from stretto.llm import LLM
    from stretto.request import SamplingParams


@engine_command(seed=None)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, standard input is one.")] = None,
    file: Annotated[
        str | None,
        typer.Option(help="Read prompts from this file, one a line; - is standard input.", rich_help_panel="Prompts"),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.", rich_help_panel="Prompts")
    ] = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples of each prompt.", rich_help_panel="Sampling")] = 1,
    max_tokens: o.MaxTokens = 128,
    min_tokens: o.MinTokens = 0,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Log-probabilities of this many tokens, with --json.", rich_help_panel="Sampling"),
    ] = None,
    *,
    engine: EngineArguments,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each prompt, in order.", rich_help_panel="Output")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="End with a line of figures on standard error.", rich_help_panel="Output")
    ] = False,
    debug: o.Debug = False,
) -> None:
    """Answer prompts, all at the same time, and print the answers in order as they come."""
    with reported_failures(debug):
        texts = _read_prompts(prompts or [], file)
        if logprobs is not None and not json_lines:
            raise InvalidRequest("--logprobs needs --json")
        from stretto.request import SamplingParams

        params = SamplingParams(
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=engine.get("seed"),
            stop=stop or None,
            ignore_eos=ignore_eos,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            logprobs=logprobs,
        )
        with o.loaded(engine) as llm:
            started = time.perf_counter()
            if json_lines:
                _print_json(llm, texts, params, chat)
            else:
                _print_streams(llm, texts, params, chat)
            if stats:
                sys.stdout.flush()
                print(_figures(llm, time.perf_counter() - started), file=sys.stderr)
            o.print_hidden_syncs(llm)


def _read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    if arguments and file is not None:
        raise InvalidRequest("prompts and --file both given; give one of them")
    if arguments:
        return list(arguments)
    if file is None:
        if sys.stdin.isatty():
            raise InvalidRequest('no prompt; give one: stretto generate "The capital of France is"')
        text = read_stdin()
        if not text.strip():
            raise InvalidRequest("standard input has no text; give a prompt there or as an argument")
        return [text.rstrip("\n")]
    return prompt_lines(file)


def _print_json(llm: LLM, texts: Sequence[str], params: SamplingParams, chat: bool) -> None:
    if chat:
        outputs = llm.chat(
            [[{"role": "user", "content": text}] for text in texts], params, use_tqdm=sys.stderr.isatty()
        )
    else:
        outputs = llm.generate(list(texts), params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        print(json.dumps(asdict(output), ensure_ascii=False))


def _print_streams(llm: LLM, texts: Sequence[str], params: SamplingParams, chat: bool) -> None:
    from stretto.cli.answers import AnswerPrinter

    streams = [
        llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
        for text in texts
    ]
    running = dict(enumerate(streams))
    try:
        with AnswerPrinter(texts, params.n) as printer:
            while running:
                for index, stream in list(running.items()):
                    output = next(stream)
                    for sample in output.outputs:
                        printer.add(index, sample.index, sample.text)
                        if sample.finish_reason is not None:
                            printer.finish(index, sample.index)
                    if output.finished:
                        del running[index]
    finally:
        for stream in streams:
            stream.close()


def _figures(llm: LLM, seconds: float) -> str:
    stats = llm.stats()
    return (
        f"{stats.output_tokens} tokens in {seconds:.2f} s: {stats.output_tokens / seconds:.1f} tokens/s, "
        f"{stats.steps} steps, bubble share {100 * stats.bubble_share:.1f} %, launching share "
        f"{100 * stats.launching_share:.1f} %, overlap depth {stats.overlap_depth}"
    )
