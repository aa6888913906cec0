"""What the control plane does to a real engine of several ranks: bubbles and speed with each transport, in turns.

Every engine is loaded once; then they take turns, so that a change of the machine hits all of them. One rank alone runs
with them: what tensor parallelism itself costs is not the transport's.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from stretto import LLM, SamplingParams
from stretto.bench.throughput import Workload, make_prompts

TRANSPORTS = {"shared memory": "shared-memory", "zeromq": "zeromq", "gloo": "gloo"}


def measure_engines(model: str, ranks: int, quick: bool) -> dict[str, dict[str, float]]:
    """By transport, `ranks` each: medians of the leader's bubble share, step time and tokens per second."""
    rounds, tokens = (3, 24) if quick else (7, 96)
    options: dict[str, dict[str, Any]] = {"one rank": {}}
    for name, transport in TRANSPORTS.items():
        options[f"{ranks} ranks, {name}"] = {"tensor_parallel_size": ranks, "control_transport": transport}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in options}
    with ExitStack() as stack:
        engines = {}
        for name, own in options.items():
            print(f"loading: {name}", flush=True)
            engines[name] = stack.enter_context(LLM(model, max_model_len=512, max_num_seqs=8, **own))
        for turn in range(rounds + 1):
            for name, llm in engines.items():
                figure = _run(llm, tokens)
                if turn:  # the first round warms up
                    figures[name].append(figure)
            print(f"-- round {turn} of {rounds} done", flush=True)
    return {
        name: {key: round(median(row[key] for row in rows), 5) for key in rows[0]} for name, rows in figures.items()
    }


def _run(llm: LLM, tokens: int) -> dict[str, float]:
    prompts = make_prompts(llm, Workload(num_prompts=4, input_len=32, output_len=tokens))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    before, began = llm.stats(), time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - began, llm.stats()
    busy, bubble = after.busy_s - before.busy_s, after.bubble_s - before.bubble_s
    return {
        "bubble_share": bubble / max(busy + bubble, 1e-9),
        "step_ms": 1e3 * seconds / max(after.steps - before.steps, 1),
        "tokens_per_s": 4 * tokens / seconds,
    }
