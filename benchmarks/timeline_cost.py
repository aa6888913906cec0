"""What it costs to watch: the step timeline (always on) and the hidden-sync guard in `count`, at batch 1.

The timeline's own calls of one step are timed by themselves, on the device's real events, and set against the median
step of the model. For the guard three engines in one process take turns: without it, with it, and without it again.
The medians of the ratios within a round are reported; that of the third engine to the first says how far to trust them.

    python benchmarks/timeline_cost.py [--model smollm2-135m] [--device auto] [--rounds 9] [--out FILE]

On a GPU: `--device cuda`; where no weights are, `--load-format dummy --model DIRECTORY` with a config.json
does, as what is watched costs the same whatever the weights say. It takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

from stretto import LLM, SamplingParams
from stretto.bench.throughput import Workload, describe_device, make_prompts, versions
from stretto.device.base import Device
from stretto.device.cpu import CpuDevice
from stretto.observe.timeline import Timeline

RESULTS = Path(__file__).parent / "results"
CALLS = 20_000
ENGINES = {"off": "off", "count": "count", "off again": "off"}


def _device(name: str) -> Device:
    if name.startswith("cuda"):
        from stretto.device.cuda import CudaDevice

        return CudaDevice(int(name.partition(":")[2] or 0))
    return CpuDevice(1)


def timeline_us(name: str) -> float:
    """Median microseconds that the timeline's calls of one step take."""
    device = _device(name)
    stream = device.stream("engine")
    steps = []
    for index in range(4):
        begin, copy_done = device.event(timing=True), device.event(timing=True)
        stream.record(begin)
        stream.record(copy_done)
        plan = SimpleNamespace(index=index)
        steps.append(cast(Any, SimpleNamespace(plan=plan, begin=begin, copy_done=copy_done)))
    stream.synchronize()
    timeline = Timeline(device)
    times = []
    for index in range(CALLS):
        step = steps[index % 4]
        step.plan.index = index
        began = time.perf_counter()
        timeline.receive()
        timeline.schedule()
        timeline.launch(step.plan)
        timeline.launched()
        timeline.wait(step)
        timeline.process()
        timeline.step_done(step, runnable=True)
        timeline.turn_done()
        times.append(time.perf_counter() - began)
    device.close()
    return 1e6 * median(times)


def run_once(llm: LLM, new_tokens: int) -> float:
    """Tokens per second of one request."""
    prompts = make_prompts(llm, Workload(num_prompts=1, input_len=32, output_len=new_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return new_tokens / (time.perf_counter() - began)


def step_ms(llm: LLM) -> float:
    """Median milliseconds between the ends of neighbouring steps on the device."""
    ends = llm.recent_steps(24).column("device_end")
    return 1e3 * float(median((ends[1:] - ends[:-1]).tolist()))


def _ratio(rates: list[float], base: list[float]) -> float:
    return median(rate / other for rate, other in zip(rates, base, strict=True))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "timeline_cost.json")
    arguments = parser.parse_args()
    options = {
        "load_format": arguments.load_format,
        "device": arguments.device,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.25,  # three engines share the device
    }
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(arguments.model, sync_guard=mode, **options))
            for name, mode in ENGINES.items()
        }
        for llm in llms.values():
            run_once(llm, 8)
        rates: dict[str, list[float]] = {mode: [] for mode in llms}
        for number in range(arguments.rounds):
            for mode in [*list(llms)[number % 3 :], *list(llms)[: number % 3]]:
                rates[mode].append(run_once(llms[mode], arguments.new_tokens))
        step = step_ms(llms["off"])
        device = llms["off"].device
        described = describe_device(device)
        syncs = [str(finding) for finding in llms["count"].hidden_syncs()]
    cost = timeline_us(device)
    report = {
        "versions": versions(),
        "device": described,
        "model": arguments.model,
        "step_ms": step,
        "timeline_us_per_step": cost,
        "timeline_share_of_step": 1e-3 * cost / step,
        "count_over_off": _ratio(rates["count"], rates["off"]),
        "off_again_over_off": _ratio(rates["off again"], rates["off"]),
        "hidden_syncs": syncs,
        "tokens_per_s": rates,
    }
    for name in sorted(report.keys() - {"versions", "tokens_per_s"}):
        print(f"{name}: {report[name]}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
