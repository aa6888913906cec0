"""What it costs to watch: the step timeline (always on) and the hidden-sync guard in `count`, at batch 1.

The timeline's own calls of one step are timed by themselves, on the device's real events, and set against the median
step of the model. The host works while the device does, so what is left of it in the speed is measured as well: one
engine runs with the timeline, with one that does nothing in its place, and with it again, in turns. In the same way the
guard: three engines, without it, with it, and without it again. The medians of the ratios within a round are reported;
that of the same thing twice says how far to trust the other.

    python benchmarks/timeline_cost.py [--model smollm2-135m] [--device auto] [--rounds 9] [--out FILE]

On a GPU: `--device cuda`; where no weights are, `--load-format dummy --model DIRECTORY` with a config.json
does, as what is watched costs the same whatever the weights say. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from stretto import LLM, SamplingParams
from stretto.bench.throughput import Workload, describe_device, make_prompts, versions
from stretto.device.base import Device, Event
from stretto.device.cpu import CpuDevice
from stretto.observe.timeline import LAUNCH, PROCESS, SCHEDULE, WAIT, Planned, TimedStep, Timeline

RESULTS = Path(__file__).parent / "results"
CALLS = 20_000
ENGINES = {"off": "off", "count": "count", "off again": "off"}
TIMELINES = ("on", "none", "on again")


class NoTimeline(Timeline):
    """Stands where the timeline stands and keeps nothing: only the calls themselves still cost."""

    def begin_turn(self) -> None:
        """Nothing."""

    def enter(self, phase: int) -> None:
        """Nothing."""

    def launched(self, plan: Planned) -> None:
        """Nothing."""

    def step_done(self, step: TimedStep, *, runnable: bool) -> None:
        """Nothing."""

    def end_turn(self) -> None:
        """Nothing."""


@dataclass
class Step:
    """What the timeline is shown of a step."""

    index: int
    begin: Event
    copy_done: Event


def _device(name: str) -> Device:
    if name.startswith("cuda"):
        from stretto.device.cuda import CudaDevice

        return CudaDevice(int(name.partition(":")[2] or 0))
    return CpuDevice(1)


def timeline_us(name: str) -> float:
    """Median microseconds that the timeline's calls of one step take."""
    device = _device(name)
    stream = device.stream("engine")
    steps = [Step(index, device.event(timing=True), device.event(timing=True)) for index in range(4)]
    for step in steps:
        stream.record(step.begin)
        stream.record(step.copy_done)
    stream.synchronize()
    timeline = Timeline(device)
    times = []
    for index in range(CALLS):
        step = steps[index % 4]
        began = time.perf_counter()
        timeline.begin_turn()
        timeline.enter(SCHEDULE)
        timeline.enter(LAUNCH)
        timeline.launched(step)
        timeline.enter(WAIT)
        timeline.enter(PROCESS)
        timeline.step_done(step, runnable=True)
        timeline.end_turn()
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


def timeline_rates(llm: LLM, rounds: int, new_tokens: int) -> dict[str, list[float]]:
    """Tokens per second of the one engine by what stands for its timeline; its own is back at the end."""
    loop = llm._runtime.loop
    own = loop.timeline
    stands_in = {"on": own, "none": NoTimeline(llm._runtime.device), "on again": own}
    rates: dict[str, list[float]] = {name: [] for name in TIMELINES}
    for number in range(rounds):
        for name in _in_turn(TIMELINES, number):
            while llm._runtime.has_work:  # a step belongs to the timeline that saw its launch
                llm._runtime.step()
            loop.timeline = stands_in[name]
            rates[name].append(run_once(llm, new_tokens))
    loop.timeline = own
    return rates


def _in_turn(names: Iterable[str], number: int) -> list[str]:
    """All of them, beginning with another one each time."""
    every = list(names)
    first = number % len(every)
    return every[first:] + every[:first]


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
            for mode in _in_turn(llms, number):
                rates[mode].append(run_once(llms[mode], arguments.new_tokens))
        with_and_without = timeline_rates(llms["off"], arguments.rounds, arguments.new_tokens)
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
        "timeline_over_none": _ratio(with_and_without["on"], with_and_without["none"]),
        "timeline_again_over_timeline": _ratio(with_and_without["on again"], with_and_without["on"]),
        "count_over_off": _ratio(rates["count"], rates["off"]),
        "off_again_over_off": _ratio(rates["off again"], rates["off"]),
        "hidden_syncs": syncs,
        "tokens_per_s": rates,
        "tokens_per_s_by_timeline": with_and_without,
    }
    for name in sorted(report.keys() - {"versions", "tokens_per_s", "tokens_per_s_by_timeline"}):
        print(f"{name}: {report[name]}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
