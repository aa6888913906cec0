"""Output tokens per second of SmolLM2-135M on this CPU, end to end: Stretto in every weight format, as a ratio to the
best `transformers` configuration of the same run, and to llama.cpp where an interpreter that has it is named.

Every contender runs in a process of its own with the same number of threads, on the same prompts (64 to 128 tokens,
128 new ones, end-of-sequence ignored, greedy). Rounds go through all contenders, so that a machine that drifts (15 %
is usual) drifts for all; ratios are taken within a round, and their median is reported.

    python benchmarks/throughput.py [--rounds 3] [--threads 2] [--out benchmarks/results/cpu_throughput.json]
        [--llama-cpp PYTHON]   an interpreter in which llama-cpp-python is installed; it runs the same GGUF file
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

BATCHES = (1, 8, 32)
NEW_TOKENS = 128
WARM_UP_S = 2.0
"""Every contender generates at least this long before it is timed: start-up work beside the first steps has ended."""
PREFILL_LEN = 512
VOCABULARY = 49_152
STRETTO = ("float32", "float16", "bfloat16", "int4")
DEFAULT_DTYPE = "float16"
TRANSFORMERS = tuple(f"{dtype}, {cache} cache" for dtype in ("float32", "bfloat16") for cache in ("dynamic", "static"))
RESULTS = Path(__file__).parent / "results"


def prompts(batch: int) -> list[list[int]]:
    """The same token ids for every contender: lengths from 64 to 128."""
    rng = np.random.default_rng(batch)
    return [rng.integers(100, VOCABULARY, length).tolist() for length in rng.integers(64, 129, batch)]


def run_stretto(dtype: str, batches: Sequence[int], threads: int, model: str) -> dict[str, float]:
    """Tokens per second by batch size, and `prefill`: prompt tokens per second."""
    from stretto import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    warm_up = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    rates: dict[str, float] = {}
    with LLM(model, dtype=dtype, num_threads=threads, max_model_len=1024, enable_prefix_caching=False) as llm:
        warm_at = time.perf_counter() + WARM_UP_S
        for batch in batches:
            ids = prompts(batch)
            llm.generate([{"prompt_token_ids": p} for p in ids], warm_up, use_tqdm=False)
            while time.perf_counter() < warm_at:
                llm.generate([{"prompt_token_ids": p} for p in ids], warm_up, use_tqdm=False)
            started = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
            seconds = time.perf_counter() - started
            assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
            rates[str(batch)] = batch * NEW_TOKENS / seconds
        ids = np.random.default_rng(0).integers(100, VOCABULARY, (4, PREFILL_LEN)).tolist()
        llm.generate([{"prompt_token_ids": ids[0]}], one, use_tqdm=False)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in ids], one, use_tqdm=False)
        rates["prefill"] = len(ids) * PREFILL_LEN / (time.perf_counter() - started)
    return rates


def run_transformers(configuration: str, batches: Sequence[int], threads: int, model: str) -> dict[str, float]:
    """Tokens per second by batch size of `generate`, prompts padded on the left.

    The network has the model's shapes and random weights, which cost the same time.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stretto.models.gguf import GGUFFile, config_from_gguf

    dtype, cache = configuration.removesuffix(" cache").split(", ")
    torch.set_num_threads(threads)
    path = Path(model)
    fields = config_from_gguf(GGUFFile(path)) if path.is_file() else json.loads((path / "config.json").read_text())
    network = LlamaForCausalLM(LlamaConfig(**fields)).to(getattr(torch, dtype)).eval()
    rates: dict[str, float] = {}
    warm_at = time.perf_counter() + WARM_UP_S
    for batch in batches:
        ids = prompts(batch)
        width = max(map(len, ids))
        input_ids = torch.tensor([[0] * (width - len(p)) + p for p in ids])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids])

        def generate(new: int, input_ids: torch.Tensor = input_ids, mask: torch.Tensor = mask) -> torch.Tensor:
            return network.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
                disable_compile=True,
                **({"cache_implementation": "static"} if cache == "static" else {}),
            )

        with torch.inference_mode():
            generate(8)
            while time.perf_counter() < warm_at:
                generate(8)
            started = time.perf_counter()
            output = generate(NEW_TOKENS)
            seconds = time.perf_counter() - started
        assert output.shape[1] == width + NEW_TOKENS
        rates[str(batch)] = batch * NEW_TOKENS / seconds
    return rates


def run_llama_cpp(python: str, batches: Sequence[int], threads: int, model: str) -> dict[str, float]:
    """Tokens per second by batch size, and `decode N`: without the prefill."""
    task = {"threads": threads, "new": NEW_TOKENS, "prompts": {str(batch): prompts(batch) for batch in batches}}
    peer = Path(__file__).with_name("llama_cpp_peer.py")
    done = subprocess.run([python, str(peer), model, json.dumps(task)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed:\n{done.stderr[-3000:]}")
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print("  llama.cpp: " + ", ".join(f"{key}: {rate:.1f}" for key, rate in rates.items()), flush=True)
    return rates


def run_alone(engine: str, configuration: str, batches: Sequence[int], threads: int, model: str) -> dict[str, float]:
    """One contender in a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--model", model]
    command += ["--contender", engine, configuration, ",".join(map(str, batches))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{engine} {configuration} failed:\n{done.stderr[-3000:]}")
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {engine} {configuration}: " + ", ".join(f"{key}: {rate:.1f}" for key, rate in rates.items()), flush=True)
    return rates


def measure(rounds: int, threads: int, model: str, llama_cpp: str | None) -> dict[str, Any]:
    """All rounds. After the first, only the fastest `transformers` configurations of a batch size run on."""
    stretto: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in STRETTO}
    peers: dict[str, list[dict[str, float]]] = {name: [] for name in TRANSFORMERS}
    llama: list[dict[str, float]] = []
    wanted: dict[str, list[int]] = {name: list(BATCHES) for name in TRANSFORMERS}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds} (output tokens/s by batch size)", flush=True)
        for dtype in STRETTO:
            stretto[dtype].append(run_alone("stretto", dtype, BATCHES, threads, model))
        for name, batches in wanted.items():
            peers[name].append(run_alone("transformers", name, batches, threads, model) if batches else {})
        if llama_cpp is not None:
            llama.append(run_llama_cpp(llama_cpp, BATCHES, threads, model))
        if number == 0:
            keep = {(best_peer(peers, 0, batch, dtypes)[0], batch) for batch in BATCHES for dtypes in ("", "float32")}
            wanted = {name: [batch for batch in BATCHES if (name, batch) in keep] for name in TRANSFORMERS}
    return {"stretto": stretto, "transformers": peers, "llama.cpp": llama}


def best_peer(peers: dict[str, list[dict[str, float]]], number: int, batch: int, dtype: str) -> tuple[str, float]:
    """The fastest configuration of a round at this batch size (whose name starts with `dtype`), and its rate."""
    rates = {
        name: rounds[number][str(batch)]
        for name, rounds in peers.items()
        if name.startswith(dtype) and str(batch) in rounds[number]
    }
    return max(rates.items(), key=lambda item: item[1])


def summarise(measured: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Medians over the rounds: rates, and ratios taken within each round."""
    stretto, peers, llama = measured["stretto"], measured["transformers"], measured["llama.cpp"]
    summary: dict[str, Any] = {"prefill_tokens_per_s": {d: median(r["prefill"] for r in stretto[d]) for d in STRETTO}}
    for batch in BATCHES:
        key = str(batch)
        rates = {dtype: median(entry[key] for entry in stretto[dtype]) for dtype in STRETTO}
        best = max(rates, key=lambda dtype: rates[dtype])
        fastest = [best_peer(peers, number, batch, "")[1] for number in range(rounds)]
        float32 = [best_peer(peers, number, batch, "float32")[1] for number in range(rounds)]
        summary[key] = {
            "stretto_tokens_per_s": rates,
            "best_transformers": best_peer(peers, 0, batch, "")[0],
            "best_transformers_tokens_per_s": median(fastest),
            "transformers_float32_tokens_per_s": median(float32),
            "best_dtype": best,
            "best_dtype_over_best_transformers": median(
                entry[key] / peer for entry, peer in zip(stretto[best], fastest, strict=True)
            ),
            "default_dtype_over_transformers_float32": median(
                entry[key] / peer for entry, peer in zip(stretto[DEFAULT_DTYPE], float32, strict=True)
            ),
        }
        if llama:
            summary[key]["llama_cpp_tokens_per_s"] = median(entry[key] for entry in llama)
            summary[key]["llama_cpp_decode_tokens_per_s"] = median(entry[f"decode {key}"] for entry in llama)
            summary[key]["best_dtype_over_llama_cpp"] = median(
                entry[key] / peer[key] for entry, peer in zip(stretto[best], llama, strict=True)
            )
    return summary


def show(summary: dict[str, Any]) -> None:
    """The summary for a person."""
    for batch in BATCHES:
        row = summary[str(batch)]
        rates = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in row["stretto_tokens_per_s"].items())
        print(f"batch {batch}: Stretto {rates} output tokens/s")
        print(
            f"  best ({row['best_dtype']}) / best transformers ({row['best_transformers']}, "
            f"{row['best_transformers_tokens_per_s']:.0f}): {row['best_dtype_over_best_transformers']:.2f}x; "
            f"default ({DEFAULT_DTYPE}) / transformers float32 ({row['transformers_float32_tokens_per_s']:.0f}): "
            f"{row['default_dtype_over_transformers_float32']:.2f}x"
        )
        if "best_dtype_over_llama_cpp" in row:
            print(
                f"  best / llama.cpp ({row['llama_cpp_tokens_per_s']:.0f}; its decoding alone "
                f"{row['llama_cpp_decode_tokens_per_s']:.0f}): {row['best_dtype_over_llama_cpp']:.2f}x"
            )
    prefill = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in summary["prefill_tokens_per_s"].items())
    print(f"prefill of {PREFILL_LEN}-token prompts: {prefill} tokens/s")


def main() -> None:
    """Run the benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", help="path of SmolLM2-135M-Instruct; found or fetched by default")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_throughput.json")
    parser.add_argument("--contender", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        engine, configuration, batches = arguments.contender
        run = run_stretto if engine == "stretto" else run_transformers
        sizes = [int(batch) for batch in batches.split(",")]
        print(json.dumps(run(configuration, sizes, arguments.threads, arguments.model)))
        return
    from stretto.bench.throughput import describe_device, versions
    from stretto.models.resolve import resolve_model

    model = arguments.model or str(resolve_model("smollm2-135m").path)
    measured = measure(arguments.rounds, arguments.threads, model, arguments.llama_cpp)
    summary = summarise(measured, arguments.rounds)
    show(summary)
    report = {
        "device": describe_device("cpu"),
        "threads": arguments.threads,
        "versions": versions(),
        "new_tokens": NEW_TOKENS,
        "summary": summary,
        "rounds": measured,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
