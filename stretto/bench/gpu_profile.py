"""Where a step's time goes: the kernels of some steps of a workload, per step, and the gaps between them.

A run under the profiler is slower than one without: shares count here, not sums. Owns nothing but the report.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from stretto.bench import workloads
from stretto.bench.gpu import Setup, requests_of, run, start
from stretto.request import SamplingParams


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(workloads.SHAPES))
    parser.add_argument("--workload", action="append", help="as for stretto.bench.gpu; default w2:1, w2:32, w1")
    parser.add_argument("--first", type=int, default=120, help="first step to look at")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--top", type=int, default=18)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        runtime, _ = start(Setup(options.model), Path(root))
        run(runtime, workloads.warm_up())
        for name in options.workload or ["w2:1", "w2:32", "w1"]:
            for index, wanted in enumerate(requests_of(name)):
                params = SamplingParams(
                    temperature=wanted.temperature, max_tokens=wanted.max_tokens, ignore_eos=True, detokenize=False
                )
                runtime.add(wanted.prompt_ids, params, seed=index)
            for _ in range(options.first):
                runtime.step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                for _ in range(options.steps):
                    runtime.step()
                torch.cuda.synchronize()
            report(name, trace, options.steps, options.top)
            for request in list(runtime.requests.values()):
                runtime.end(request)
            while runtime.has_work:
                runtime.step()
        runtime.close()


def report(name: str, trace: profile, steps: int, top: int) -> None:
    """Print the kernels by time, and how much of the span nothing ran."""
    spans: list[tuple[float, float]] = []
    sums: dict[str, list[float]] = defaultdict(list)
    for event in trace.events() or ():  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            sums[event.name].append(event.time_range.end - event.time_range.start)
    spans.sort()
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    span = reached - spans[0][0]
    print(f"{name}: {span / steps:.1f} us/step, {100 * (1 - busy / span):.2f} % without a kernel", flush=True)
    for kernel, times in sorted(sums.items(), key=lambda item: -sum(item[1]))[:top]:
        middle = sorted(times)[len(times) // 2]
        print(f"  {sum(times) / steps:8.1f} us/step {len(times) / steps:6.1f} x {middle:7.2f} us  {kernel[:90]}")


if __name__ == "__main__":
    main()
