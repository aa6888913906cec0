"""Milliseconds from every rank's part of the logits to the same token on every rank, two ways, on real processes.

    OMP_NUM_THREADS=1 python benchmarks/tp_sampling.py [--ranks 2] [--calls 30] [--json FILE]

*gather*: the parts are brought together, and every rank samples from all of it. *candidates*: every rank looks for its
own best tokens, and four numbers a row are exchanged. Both in turn in the same processes; medians over calls of the
slowest rank. With more ranks than cores the ranks wait for each other's turn on a core, in both ways.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from sampler import rows_and_mix
from torch.distributed import TCPStore

from stretto.distributed.group import TensorGroup, connect_group
from stretto.engine.sampler import SampledOut, sample
from stretto.engine.split_sampling import sample_split

VOCABULARIES = (32_000, 49_152, 151_936)
ROWS = (1, 4, 16, 64)
TEMPERATURES = {"greedy": 0.0, "temperature": 1.0}


def measure(group: TensorGroup, calls: int) -> list[dict[str, Any]]:
    """One rank's times of every case."""
    found = []
    for vocabulary in VOCABULARIES:
        width = -(-vocabulary // group.size)
        ids = range(group.rank * width, min((group.rank + 1) * width, vocabulary))
        for count in ROWS:
            logits = torch.randn(count, width * group.size, generator=torch.Generator().manual_seed(0)) * 3
            part = logits[:, group.rank * width : (group.rank + 1) * width].contiguous()
            for name, temperature in TEMPERATURES.items():
                rows, mix = rows_and_mix(count, vocabulary, {"temperature": temperature})
                outs = SampledOut.allocate(count, 0, part.device), SampledOut.allocate(count, 0, part.device)

                def gather(part: Any = part, rows: Any = rows, mix: Any = mix, out: Any = outs[0], v: int = vocabulary):
                    sample(group.all_gather(part, v), rows, mix, out)

                def candidates(part: Any = part, rows: Any = rows, mix: Any = mix, out: Any = outs[1], ids: Any = ids):
                    sample_split(part, ids, rows, mix, out, group)

                times = {way.__name__: [] for way in (gather, candidates)}
                for call in range(calls + 3):
                    for way in (gather, candidates):
                        took = timed(way, group)
                        if call >= 3:
                            times[way.__name__].append(took)
                assert torch.equal(outs[0].tokens_S, outs[1].tokens_S)
                found.append({"vocabulary": vocabulary, "rows": count, "mix": name, "ms": times})
    return found


def timed(way: Callable[[], None], group: TensorGroup) -> float:
    """Milliseconds of a call that all ranks begin together."""
    group.all_reduce(torch.zeros(1))
    begin = time.perf_counter()
    way()
    return 1000 * (time.perf_counter() - begin)


def run_rank(pipe: Connection, rank: int, size: int, calls: int, port: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    group = connect_group(store, rank, size, torch.device("cpu"))
    with torch.inference_mode():
        pipe.send(measure(group, calls))
    group.close()


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(options.ranks):
        here, there = context.Pipe()
        arguments = (there, rank, options.ranks, options.calls, store.port)
        processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        by_rank = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    results = []
    print(f"{options.ranks} ranks\n{'vocabulary':>10} {'rows':>5} {'mix':<12} {'gather':>9} {'candidates':>11} ratio")
    for cases in zip(*by_rank, strict=True):
        case = cases[0]
        gather, candidates = (
            statistics.median(map(max, zip(*(rank["ms"][way] for rank in cases), strict=True)))
            for way in ("gather", "candidates")
        )
        results.append({**case, "ms": {"gather": round(gather, 3), "candidates": round(candidates, 3)}})
        print(
            f"{case['vocabulary']:>10} {case['rows']:>5} {case['mix']:<12} {gather:>8.2f}  {candidates:>10.2f} "
            f"{gather / candidates:>6.1f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"ranks": options.ranks, "calls": options.calls, "cases": results}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
