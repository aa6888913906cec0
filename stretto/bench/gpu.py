"""The benchmarks of the GPU engine: W1, W2 and W3 on the Qwen3 shapes, with the GPU's idle share and ablations.

`python -m stretto.bench.gpu --help`. Owns the runs and their report; the requests are `workloads.py`'s. Times are wall
clock over whole runs, after a warm-up; idle shares come from device events around every step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.assembly import assemble
from stretto.bench import workloads
from stretto.bench.workloads import BenchRequest
from stretto.config import AttentionBackendName, EngineConfig
from stretto.errors import InvalidRequest
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from stretto.version import __version__


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine to measure."""

    model: str
    overlap_depth: int = 1
    graphs: bool = True
    max_num_seqs: int = 256
    attention_backend: AttentionBackendName = "auto"
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload on one engine; medians over the repetitions where there are several."""

    workload: str
    setup: Setup
    seconds: list[float]
    """Of each repetition."""
    steps: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    ms_per_output: float
    """Wall milliseconds per output token of the longest request: the step time where all decode together."""
    floor_ms: float
    """Decode steps: (weights + keys and values read) at `FLOOR_BYTES_PER_S`, the mean over the run; of prompts alone,
    their products at `FLOOR_FLOPS`."""
    idle_share: float
    """Share of device time between steps in which nothing was queued although something was runnable; last run."""
    launching_share: float
    """Share of device time in steps that the host was still launching: an upper bound of waits within them."""
    step_ms_by_tenth: list[float]
    """Mean device time from a step's begin to the next one's, in each tenth of the last run's steps."""


FLOOR_BYTES_PER_S = 4.3e12
"""Read bandwidth that the floors assume: an H200's, measured."""
FLOOR_FLOPS = 7.9e14
"""bf16 products a second that they assume."""


def engine_config(model: str, root: Path, **options: Any) -> EngineConfig:
    """An engine of random weights in the shape of `model`, whose config goes to `root`."""
    return EngineConfig(
        model=str(workloads.write_model(model, root)),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        max_model_len=4096,
        **options,
    )


def start(setup: Setup, root: Path) -> tuple[Runtime, dict[str, float]]:
    """An engine of `setup`; seconds that it took to start, and to capture graphs within these."""
    from stretto.engine.fused_runner import FusedRunner  # needs Triton, which this module's other users may lack

    began = time.perf_counter()
    parts = assemble(
        engine_config(
            setup.model,
            root,
            max_num_seqs=setup.max_num_seqs,
            overlap_depth=setup.overlap_depth,
            enforce_eager=not setup.graphs,
            deterministic=setup.deterministic,
            attention_backend=setup.attention_backend,
            enable_prefix_caching=False,
        )
    )
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, make_runner=parts.make_runner)
    took = {"start_s": time.perf_counter() - began, "capture_s": 0.0}
    if isinstance(runtime.engine.runner, FusedRunner):
        took["capture_s"] = runtime.engine.runner.capture_s
    return runtime, took


def run(runtime: Runtime, requests: Sequence[BenchRequest]) -> tuple[float, list[tuple[int, float]]]:
    """(wall seconds, after each turn: steps so far and device seconds that they took, gaps included)."""
    began = time.perf_counter()
    for index, request in enumerate(requests):
        params = SamplingParams(
            temperature=request.temperature, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
        )
        runtime.add(request.prompt_ids, params, seed=index)
    marks = []
    with runtime.running():
        while runtime.has_work:
            runtime.step()
            totals = runtime.stats()
            marks.append((totals.steps, totals.busy_s + totals.bubble_s))
    return time.perf_counter() - began, marks


def by_tenth(marks: Sequence[tuple[int, float]]) -> list[float]:
    """Mean milliseconds of a step in each tenth of a run."""
    first, last = marks[0][0], marks[-1][0]
    edges = [next(m for m in marks if m[0] >= first + (last - first) * tenth / 10) for tenth in range(11)]
    return [1e3 * (end[1] - begin[1]) / max(1, end[0] - begin[0]) for begin, end in pairwise(edges)]


def measure(runtime: Runtime, setup: Setup, name: str, requests: Sequence[BenchRequest], repeats: int) -> Measurement:
    """Run a workload `repeats` times."""
    seconds: list[float] = []
    marks: list[tuple[int, float]] = []
    before = runtime.timeline.totals()
    for _ in range(repeats):
        before = runtime.timeline.totals()
        took, marks = run(runtime, requests)
        seconds.append(took)
    last = runtime.timeline.totals().since(before)
    median = statistics.median(seconds)
    outputs, inputs = sum(r.max_tokens for r in requests), sum(len(r.prompt_ids) for r in requests)
    longest = max(r.max_tokens for r in requests)
    contexts = sum(len(r.prompt_ids) * r.max_tokens + r.max_tokens * r.max_tokens // 2 for r in requests)
    read = workloads.weight_bytes(setup.model) * longest + contexts * workloads.kv_bytes_per_token(setup.model)
    floor_s = read / FLOOR_BYTES_PER_S
    if longest == 1:
        floor_s = workloads.prompt_flops(setup.model, [len(r.prompt_ids) for r in requests]) / FLOOR_FLOPS
    return Measurement(
        workload=name,
        setup=setup,
        seconds=seconds,
        steps=last.steps,
        output_tokens_per_s=outputs / median,
        input_tokens_per_s=inputs / median,
        ms_per_output=1e3 * median / longest,
        floor_ms=1e3 * floor_s / longest,
        idle_share=last.bubble_share,
        launching_share=last.launching_share,
        step_ms_by_tenth=by_tenth(marks),
    )


@dataclass(frozen=True, slots=True)
class OnlineMeasurement:
    """Steps while requests arrive: means over the steps that compute a prompt, and over those that do not."""

    workload: str
    setup: Setup
    prompt_step_ms: float
    """Device time of a step that computes an arriving prompt beside the rows that decode."""
    prompt_launch_ms: float
    """Host time that launches it."""
    decode_step_ms: float
    idle_share: float


def measure_online(runtime: Runtime, setup: Setup, rows: int, prompt: int, arrivals: int = 30) -> OnlineMeasurement:
    """`rows` requests decode; every fourth step a prompt of `prompt` tokens arrives, for one token."""

    def add(length: int, outputs: int) -> None:
        params = SamplingParams(temperature=0.6, max_tokens=outputs, ignore_eos=True, detokenize=False)
        runtime.add([7] * length, params, seed=1)

    for _ in range(rows):
        add(128, 40 + 4 * arrivals + 200)
    with runtime.running():
        for _ in range(40):
            runtime.step()
        before = runtime.stats().prompt_tokens
        for step in range(4 * arrivals):
            if step % 4 == 0:
                add(prompt, 1)
            runtime.step()
        assert runtime.stats().prompt_tokens > before
        recent = runtime.timeline.recent(4 * arrivals - 8)
        for request in list(runtime.requests.values()):
            runtime.end(request)
        while runtime.has_work:
            runtime.step()
    device_s = recent.column("device_end") - recent.column("device_begin")
    launch_s = recent.column("launch_end") - recent.column("launch_begin")
    with_prompt = launch_s >= np.quantile(launch_s, 0.75)  # a decode step is one graph launch, whatever it computes
    return OnlineMeasurement(
        workload=f"online:{rows}:{prompt}",
        setup=setup,
        prompt_step_ms=1e3 * float(device_s[with_prompt].mean()),
        prompt_launch_ms=1e3 * float(launch_s[with_prompt].mean()),
        decode_step_ms=1e3 * float(device_s[~with_prompt].mean()),
        idle_share=recent.bubble_share,
    )


def requests_of(name: str) -> list[BenchRequest]:
    """The requests of `w1`, `w2:BATCH`, `w2:BATCH:OUTPUT` or `w3`."""
    kind, *numbers = name.split(":")
    match kind:
        case "w1":
            return workloads.w1()
        case "w2":
            return workloads.w2(*map(int, numbers))
        case "w3":
            return workloads.w3()
    raise InvalidRequest(f"workload {name!r} is not known; use w1, w2:BATCH, w2:BATCH:OUTPUT, w3 or online:ROWS:PROMPT")


def environment() -> dict[str, str]:
    """What the figures depend on."""
    import triton

    from stretto.kernels.launch import dependent_launch

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dependent_launch": str(dependent_launch(torch.device("cuda"))),
        "python": platform.python_version(),
        "stretto": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _driver() -> str:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
        return found[0] if found else "unknown"
    except OSError:
        return "unknown"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=sorted(workloads.SHAPES))
    parser.add_argument("--workload", action="append", help="w1, w3, w2:BATCH[:OUTPUT] or online:ROWS:PROMPT")
    parser.add_argument("--depth", action="append", type=int, help="overlap depths to compare (default 1)")
    parser.add_argument("--no-graphs", action="store_true", help="measure without CUDA graphs too")
    parser.add_argument("--attention-backend", default="auto", help="as for the engine")
    parser.add_argument("--deterministic", action="store_true", help="measure in batch-invariant mode")
    parser.add_argument("--rows", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    report: dict[str, object] = {"environment": environment()}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as root:
        for model in options.model or ["qwen3-0.6b"]:
            for graphs in (True, False) if options.no_graphs else (True,):
                for depth in options.depth or [1]:
                    setup = Setup(
                        model,
                        depth,
                        graphs and options.attention_backend in ("auto", "triton"),
                        options.rows,
                        attention_backend=options.attention_backend,
                        deterministic=options.deterministic,
                    )
                    runtime, took = start(setup, Path(root))
                    print(f"{setup} started: {took}", flush=True)
                    run(runtime, workloads.warm_up())
                    for name in options.workload or ["w2:1", "w2:32", "w2:256", "w1", "w3"]:
                        if name.startswith("online:"):
                            online = measure_online(runtime, setup, *map(int, name.split(":")[1:]))
                            rows.append({**asdict(online), **took})
                            print(_line_of_online(online), flush=True)
                            continue
                        result = measure(runtime, setup, name, requests_of(name), options.repeats)
                        rows.append({**asdict(result), **took})
                        print(_line(result), flush=True)
                    runtime.close()
                    del runtime
                    torch.cuda.empty_cache()
    report["measurements"] = rows
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1))


def _line_of_online(m: OnlineMeasurement) -> str:
    return (
        f"{m.setup.model} depth {m.setup.overlap_depth} graphs {m.setup.graphs} {m.workload}: step with a prompt "
        f"{m.prompt_step_ms:.3f} ms ({m.prompt_launch_ms:.3f} to launch), without {m.decode_step_ms:.3f} ms, "
        f"idle {100 * m.idle_share:.2f} %"
    )


def _line(m: Measurement) -> str:
    return (
        f"{m.setup.model} depth {m.setup.overlap_depth} graphs {m.setup.graphs} "
        f"{'deterministic ' if m.setup.deterministic else ''}{m.workload}: "
        f"{m.ms_per_output:.3f} ms/output (floor {m.floor_ms:.3f}), "
        f"{m.output_tokens_per_s:.0f} out/s, {m.input_tokens_per_s:.0f} in/s, idle {100 * m.idle_share:.2f} %, "
        f"launching {100 * m.launching_share:.2f} %, "
        f"{m.steps} steps of {'/'.join(f'{x:.2f}' for x in m.step_ms_by_tenth)} ms, "
        f"runs {', '.join(f'{s:.3f}' for s in m.seconds)} s"
    )


if __name__ == "__main__":
    main()
