"""What serving costs: the same requests over HTTP, streamed to real clients, and offline, on the same device.

    python benchmarks/server_load.py --concurrency 128 [--model qwen3-8b] [--ranks 2] [--api-workers 8] [--json FILE]

A server of random weights in the shape of a real model, with `--concurrency` requests open at any time, until all are
answered; then `LLM`'s engine alone, which is given them all at once and runs as many together. Reported: output tokens
per second of both, what clients see, and the share of device time in which the device waited although a request could
have run. Server, front ends and clients are processes of their own; clients are several, as one could not read so much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from stretto.bench import workloads
from stretto.bench.serve import Load, ServerUnusable, run_load, wait_until_ready
from stretto.bench.serve_figures import figures_of
from stretto.bench.serve_prompts import Words, random_prompts
from stretto.bench.serve_request import Outcome, Planned, Target
from stretto.config import EngineConfig

NAME = "random"
READY_S = 300.0
Options = dict[str, Any]


def write_model(shape: str, folder: Path) -> tuple[Path, Words]:
    """A model without weights, with a vocabulary of words that are one token each; and these words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = workloads.write_model(shape, folder)
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    words = tuple(f"w{number}" for number in range(size))
    tokenizer = Tokenizer(models.WordLevel({f"▁{word}": number for number, word in enumerate(words)}, unk_token="▁w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path, Words(words, True)


def engine_options(options: argparse.Namespace) -> Options:
    """Options of the engine, served and offline; names are EngineConfig's."""
    return {
        "load_format": "dummy",
        "dtype": options.dtype,
        "max_model_len": 2 * (options.input_len + options.output_len),
        "max_num_seqs": options.concurrency,
        "tensor_parallel_size": options.ranks,
        "enable_prefix_caching": False,
        "overlap_depth": options.depth,
    }


# -- served -----------------------------------------------------------------------------------------------------------


@contextmanager
def server(model: Path, options: Options, api_workers: int) -> Iterator[str]:
    """The URL of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stretto", "serve", "--model", str(model), "--served-model-name", NAME]
    command += ["--port", str(port), "--api-workers", str(api_workers), "--log-level", "warning", "--no-access-log"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        command += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    """Until the server is ready. Raises SystemExit if it ends before."""
    until = time.monotonic() + READY_S
    while process.poll() is None:
        try:
            asyncio.run(wait_until_ready(url, None, 2.0))
        except ServerUnusable:
            if time.monotonic() < until:
                continue
            raise
        return
    raise SystemExit(f"the server has ended with {process.returncode}")


def engine_figures(url: str) -> dict[str, float]:
    """The engine's counters so far, by name."""
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^stretto:(\w+)_total\{[^,}]*\} (\S+)$", text, re.M)}


def client(url: str, planned: Sequence[Planned], at_once: int, at: float) -> tuple[list[Outcome], float]:
    """From time `at` on, send all, `at_once` open at any time; what came of them, and the seconds that it took."""
    target = Target(url, NAME, "completions", {"ignore_eos": True, "temperature": 0.6})
    time.sleep(max(0.0, at - time.time()))
    return asyncio.run(run_load(target, Load(planned, np.zeros(len(planned)), at_once, num_warmups=0)))


def serve(model: Path, requests: Sequence[Planned], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the served run."""
    parts = [requests[number :: options.clients] for number in range(options.clients)]
    at_once = options.concurrency // options.clients
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(options.clients, mp_context=spawn) as clients,
        server(model, engine_options(options), options.api_workers) as url,
    ):
        send(clients, url, [part[:at_once] for part in parts], at_once)  # imports, connections, first steps
        before = engine_figures(url)
        outcomes, seconds = send(clients, url, parts, at_once)
        after = engine_figures(url)
    spent = {name: after[name] - before[name] for name in after}
    return {
        **figures_of(outcomes, seconds).as_json(),
        "idle_share": idle_share(spent["engine_busy_seconds"], spent["bubble_seconds"]),
        "steps": spent["engine_steps"],
        "engine": {name: value for name, value in spent.items() if name.endswith("_seconds")},
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error is not None}),
    }


def send(
    clients: ProcessPoolExecutor, url: str, parts: Sequence[Sequence[Planned]], at_once: int
) -> tuple[list[Outcome], float]:
    """All outcomes, and the seconds that the slowest client took."""
    at = time.time() + 3.0  # by then each has started
    futures = [clients.submit(client, url, part, at_once, at) for part in parts]
    ended = [future.result() for future in futures]
    return [outcome for outcomes, _ in ended for outcome in outcomes], max(seconds for _, seconds in ended)


# -- offline ----------------------------------------------------------------------------------------------------------


def offline(model: Path, requests: Sequence[Planned], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the engine alone. In a process of its own, so that the device is free again afterwards."""
    import torch

    from stretto.bench.gpu import environment, run
    from stretto.runtime import Runtime

    prompts = [[int(word[1:]) for word in request.prompt.split()] for request in requests]
    given = [
        workloads.BenchRequest(prompt, request.output_len, 0.6)
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    runtime = Runtime.start(EngineConfig(str(model), skip_tokenizer_init=True, **engine_options(options)))
    try:
        run(runtime, given[: options.concurrency])
        before = runtime.stats()
        seconds, _ = run(runtime, given)
        after = runtime.stats()
    finally:
        runtime.close()
    return {
        "environment": environment() if torch.cuda.is_available() else {"torch": torch.__version__, "device": "cpu"},
        "duration": seconds,
        "output_throughput": sum(request.max_tokens for request in given) / seconds,
        "idle_share": idle_share(after.busy_s - before.busy_s, after.bubble_s - before.bubble_s),
        "steps": after.steps - before.steps,
    }


def idle_share(busy_s: float, idle_s: float) -> float:
    """Of the device's time in which it had, or could have had, work."""
    return idle_s / (busy_s + idle_s)


def in_own_process(measure: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(workloads.SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1, help="overlap depth")
    parser.add_argument("--concurrency", type=int, default=128, help="requests that are open at any time")
    parser.add_argument("--rounds", type=int, default=3, help="requests for each that is open at once")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--api-workers", type=int, default=8)
    parser.add_argument("--clients", type=int, default=4, help="client processes; divides the concurrency")
    parser.add_argument("--json", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.concurrency % options.clients:
        parser.error(f"--clients is {options.clients}, which does not divide --concurrency {options.concurrency}")
    with tempfile.TemporaryDirectory() as folder:
        model, words = write_model(options.model, Path(folder))
        requests = random_prompts(
            options.concurrency * options.rounds,
            options.input_len,
            options.output_len,
            range_ratio=0.5,
            words=words,
            seed=0,
        )
        alone = in_own_process(offline, model, requests, options)
        print(f"offline: {alone['output_throughput']:.0f} output tokens/s, idle {100 * alone['idle_share']:.2f} %")
        served = serve(model, requests, options)
    ratio = served["output_throughput"] / alone["output_throughput"]
    print(
        f"served: {served['output_throughput']:.0f} output tokens/s ({ratio:.3f} of offline), idle "
        f"{100 * served['idle_share']:.2f} %, {served['completed']} complete, {served['failed']} failed, median TTFT "
        f"{served['median_ttft_ms']:.1f} ms, TPOT {served['median_tpot_ms']:.2f} ms, ITL {served['median_itl_ms']:.2f} "
        f"ms, 99 % {served['p99_itl_ms']:.2f} ms"
    )
    if options.json:
        given = {name: value for name, value in vars(options).items() if name != "json"}
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "environment": alone.pop("environment"),
            **given,
            "offline": alone,
            "served": served,
            "ratio": ratio,
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
