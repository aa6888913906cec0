"""Host cost of steps with a model that does nothing: of unchanged decode steps, and of such as admit or end requests.

Run: python benchmarks/host_cost.py [--json FILE]. One core; prints microseconds per unchanged step (turn + schedule +
launch's packing + process) from 1 to 1,024 requests, and microseconds per request where all come, or end, in one step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from stretto.cache.base import NoCache
from stretto.cache.page_pool import PagePool
from stretto.config import SchedulerConfig
from stretto.device.cpu import CpuDevice
from stretto.engine.staging import PlanLayout, pack
from stretto.request import Request, SamplingParams
from stretto.scheduler.batch import StepResults
from stretto.scheduler.scheduler import Scheduler
from stretto.scheduler.turns import LocalTurns, Message

STEPS = 400
BATCHES = (1, 4, 16, 64, 256, 1024)


def measure(num_requests: int, page_size: int = 16) -> dict[str, float]:
    """Median microseconds of turn, schedule, pack and process over steps in which no request comes or goes."""
    prompt_len = 8
    length = prompt_len + STEPS + 64
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(2048, num_requests * prompt_len),
        max_model_len=length,
        page_size=page_size,
        num_pages=1 + num_requests * -(-length // page_size),
        overlap_depth=1,
        eos_ids=(2,),
        vocab_size=50_000,
    )
    device = CpuDevice(1)
    scheduler = Scheduler(config, device, PagePool(config.num_pages), NoCache())
    params = SamplingParams(max_tokens=None)
    for uid in range(num_requests):
        prompt = np.full(prompt_len, 5, np.int32)
        scheduler.add(Request(uid, prompt, params, seed=uid, final_len=length, stop_ids=(2,)))
    words = np.empty(PlanLayout.capacity(config), np.int32)
    tokens = np.full(num_requests, 7, np.int64)
    times: dict[str, list[float]] = {"turn": [], "schedule": [], "pack": [], "process": [], "total": []}
    in_flight = [_scheduled(scheduler)]
    turns, launched = LocalTurns(_Nobody(), device.now), [_Done()]
    for step in range(STEPS):
        begin = time.perf_counter()
        turns.next(launched, block=False)
        taken = time.perf_counter()
        plan = _scheduled(scheduler)
        scheduled = time.perf_counter()
        pack(plan, PlanLayout.of(plan, config.max_stop_ids), words)
        packed = time.perf_counter()
        oldest = in_flight.pop(0)
        scheduler.process(oldest, StepResults(tokens[: len(oldest.sampled_S)]))
        done = time.perf_counter()
        in_flight.append(plan)
        if step >= 16:
            times["turn"].append(taken - begin)
            times["schedule"].append(scheduled - taken)
            times["pack"].append(packed - scheduled)
            times["process"].append(done - packed)
            times["total"].append(done - begin)
    device.close()
    return {name: statistics.median(values) * 1e6 for name, values in times.items()} | {
        "total_mean": statistics.fmean(times["total"]) * 1e6
    }


def measure_turnover(num_requests: int, prompt_len: int = 8, rounds: int = 5) -> dict[str, float]:
    """Least microseconds per request of the step that admits all, and of taking in the one that ends all."""
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(2048, num_requests * prompt_len),
        max_model_len=1024,
        num_pages=1 + 64 * num_requests,
        overlap_depth=1,
        vocab_size=50_000,
    )
    device = CpuDevice(1)
    scheduler = Scheduler(config, device, PagePool(config.num_pages), NoCache())
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    results = StepResults(np.full(num_requests, 7, np.int64))
    admit_s, end_s = [], []
    for first in range(0, rounds * num_requests, num_requests):
        for uid in range(first, first + num_requests):
            prompt = np.full(prompt_len, 5, np.int32)
            scheduler.add(Request(uid, prompt, params, seed=uid, final_len=prompt_len + 2, stop_ids=()))
        begin = time.perf_counter()
        admitting = _scheduled(scheduler)
        admit_s.append(time.perf_counter() - begin)
        ending = _scheduled(scheduler)
        scheduler.process(admitting, results)
        begin = time.perf_counter()
        output = scheduler.process(ending, results)
        end_s.append(time.perf_counter() - begin)
        assert len(output.finished) == num_requests
    device.close()
    return {"admit": min(admit_s) / num_requests * 1e6, "end": min(end_s) / num_requests * 1e6}


class _Nobody:
    """An inbox that stays empty."""

    def receive(self, block: bool) -> list[Message]:
        return []


class _Done:
    """A step whose results are there."""

    def is_done(self) -> bool:
        return True


def _scheduled(scheduler: Scheduler):  # type: ignore[no-untyped-def]
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    rows = {}
    print(f"{'requests':>8} {'turn':>6} {'schedule':>9} {'pack':>6} {'process':>8} {'median us':>10} {'mean us':>8}")
    for batch in BATCHES:
        row = rows[batch] = measure(batch)
        print(
            f"{batch:8d} {row['turn']:6.1f} {row['schedule']:9.1f} {row['pack']:6.1f} {row['process']:8.1f} "
            f"{row['total']:10.1f} {row['total_mean']:8.1f}"
        )
    turnover = {}
    print(f"{'requests':>8} {'admit':>6} {'end':>6}  us each")
    for batch in BATCHES:
        one = turnover[batch] = measure_turnover(batch)
        print(f"{batch:8d} {one['admit']:6.1f} {one['end']:6.1f}")
    if arguments.json:
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "date": time.strftime("%Y-%m-%d"),
        }
        report = {"machine": machine, "microseconds_per_step": rows, "microseconds_per_request": turnover}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
