"""Overlap depth 1 and 2 against depth 0 with the real model on this CPU, at batch sizes 1, 8 and 32.

Each depth has an engine in a process of its own (several OpenMP pools in one process slow each other down). They take
turns, in another order each time, so that a machine that drifts (15 % is usual) drifts for all. A ratio is taken
between neighbours in time, and the median of the ratios is reported, with the share of device time that bubbles take.

    python benchmarks/overlap.py [--rounds 7] [--new-tokens 48] [--out benchmarks/results/overlap.json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from stretto import LLM, SamplingParams
from stretto.bench.throughput import Workload, describe_device, make_prompts, versions

BATCHES = (1, 8, 32)
DEPTHS = (0, 1, 2)
INPUT_LEN = 96
RESULTS = Path(__file__).parent / "results"


def run_once(llm: LLM, batch: int, new_tokens: int) -> dict[str, float]:
    """Output tokens per second of one batch, and the device's busy and bubble seconds."""
    prompts = make_prompts(llm, Workload(num_prompts=batch, input_len=INPUT_LEN, output_len=new_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    before = llm.stats()
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = llm.stats()
    return {
        "tokens_per_s": batch * new_tokens / seconds,
        "busy_s": after.busy_s - before.busy_s,
        "bubble_s": after.bubble_s - before.bubble_s,
    }


def serve(pipe: Connection, model: str, options: Mapping[str, Any]) -> None:
    """One engine: says its dtype, then runs each (batch, new tokens) that comes, until None does."""
    with LLM(model, **options) as llm:
        pipe.send(llm.dtype)
        while (task := pipe.recv()) is not None:
            pipe.send(run_once(llm, *task))


def ask(pipe: Connection, batch: int, new_tokens: int) -> dict[str, float]:
    """One run in an engine's process."""
    pipe.send((batch, new_tokens))
    figures: dict[str, float] = pipe.recv()
    return figures


def measure(
    engines: Mapping[int, Connection], batch: int, rounds: int, new_tokens: int
) -> dict[int, list[dict[str, float]]]:
    """Rounds of all depths in turn, after one run each to warm up."""
    runs: dict[int, list[dict[str, float]]] = {depth: [] for depth in engines}
    for engine in engines.values():
        ask(engine, batch, 8)
    depths = list(engines)
    for number in range(rounds):
        turn = number % len(depths)
        for depth in depths[turn:] + depths[:turn]:
            runs[depth].append(ask(engines[depth], batch, new_tokens))
    return runs


def summarise(runs: dict[int, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Median rate, median ratio to depth 0 within a round, and bubble share of all rounds, by depth."""
    summary = {}
    for depth, entries in runs.items():
        busy, bubble = sum(entry["busy_s"] for entry in entries), sum(entry["bubble_s"] for entry in entries)
        ratios = [entry["tokens_per_s"] / plain["tokens_per_s"] for entry, plain in zip(entries, runs[0], strict=True)]
        summary[str(depth)] = {
            "tokens_per_s": median(entry["tokens_per_s"] for entry in entries),
            "over_depth_0": median(ratios),
            "bubble_share": bubble / (busy + bubble),
        }
    return summary


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=RESULTS / "overlap.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"versions": versions(), "threads": arguments.threads, "batches": {}}
    options = {
        "dtype": arguments.dtype,
        "num_threads": arguments.threads,
        "max_model_len": 512,
        "enable_prefix_caching": False,  # every round has the same prompts
    }
    context = multiprocessing.get_context("spawn")
    engines: dict[int, Connection] = {}
    for depth in DEPTHS:
        engines[depth], theirs = context.Pipe()
        given = {**options, "overlap_depth": depth}
        context.Process(target=serve, args=(theirs, arguments.model, given), daemon=True).start()
        report["dtype"] = engines[depth].recv()
    report["device"] = describe_device("cpu")
    for batch in BATCHES:
        runs = measure(engines, batch, arguments.rounds, arguments.new_tokens)
        summary = summarise(runs)
        report["batches"][str(batch)] = {"summary": summary, "runs": runs}
        for depth, row in summary.items():
            print(
                f"batch {batch}, depth {depth}: {row['tokens_per_s']:.1f} tokens/s, "
                f"{row['over_depth_0']:.3f} x depth 0, "
                f"bubble share {100 * row['bubble_share']:.2f} %",
                flush=True,
            )
    for engine in engines.values():
        engine.send(None)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
