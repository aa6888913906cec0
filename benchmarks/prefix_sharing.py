"""Prefill time of requests that share a prefix, with the prefix cache and without, in one process.

`python benchmarks/prefix_sharing.py [--json FILE]`: 32 requests of 512 shared and 16 own tokens, one new token each, on
the embedded model; rounds alternate, each with a prefix of its own, and the median ratio is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from stretto.config import EngineConfig
from stretto.request import SamplingParams
from stretto.runtime import Runtime

REQUESTS, SHARED, OWN = 32, 512, 16


def prefill_s(runtime: Runtime, seed: int, requests: int = REQUESTS) -> float:
    """Seconds until all requests have their first token."""
    random = np.random.default_rng(seed)
    prefix = random.integers(5, 40_000, SHARED).tolist()
    for _ in range(requests):
        prompt = prefix + random.integers(5, 40_000, OWN).tolist()
        runtime.add(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    begin = time.perf_counter()
    with runtime.running():
        while runtime.has_work:
            runtime.step()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    rounds = []
    for number in range(arguments.rounds):
        seconds = {}
        for caching in (True, False):
            config = EngineConfig(model=arguments.model, enable_prefix_caching=caching, max_num_seqs=REQUESTS)
            runtime = Runtime.start(config)
            prefill_s(runtime, 1_000_000, 1)  # warm up
            seconds["cached" if caching else "uncached"] = prefill_s(runtime, number)
            runtime.close()
        rounds.append(seconds)
        print(
            f"round {number + 1}: without {seconds['uncached']:.2f} s, with {seconds['cached']:.2f} s, "
            f"{seconds['uncached'] / seconds['cached']:.1f} times less"
        )
    ratio = statistics.median(r["uncached"] / r["cached"] for r in rounds)
    print(f"median: {ratio:.1f} times less prefill time with the prefix cache")
    if arguments.json:
        report = {"machine": platform.machine(), "date": time.strftime("%Y-%m-%d"), "rounds": rounds, "ratio": ratio}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
