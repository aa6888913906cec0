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
    """Decode steps: (weights + keys and values read) at `FLOOR_BYTES_PER_S`, the mean over the run; else 0."""
    idle_share: float
    """Share of device time between steps in which nothing was queued although something was runnable; last run."""
    step_ms_by_tenth: list[float]
    """Mean device time from a step's begin to the next one's, in each tenth of the last run's steps."""


FLOOR_BYTES_PER_S = 4.3e12
"""Read bandwidth that the floors assume: an H200's, measured."""


def start(setup: Setup, root: Path) -> tuple[Runtime, float]:
    """(an engine of `setup`, seconds that it took to start)."""
    began = time.perf_counter()
    parts = assemble(
        EngineConfig(
            model=str(workloads.write_model(setup.model, root)),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            device="cuda",
            max_model_len=4096,
            max_num_seqs=setup.max_num_seqs,
            overlap_depth=setup.overlap_depth,
            enforce_eager=not setup.graphs,
            deterministic=setup.deterministic,
            attention_backend=setup.attention_backend,
            enable_prefix_caching=False,
        )
    )
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, make_runner=parts.make_runner)
    return runtime, time.perf_counter() - began


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
    before = runtime.stats()
    for _ in range(repeats):
        before = runtime.stats()
        took, marks = run(runtime, requests)
        seconds.append(took)
    after = runtime.stats()
    median = statistics.median(seconds)
    outputs, inputs = sum(r.max_tokens for r in requests), sum(len(r.prompt_ids) for r in requests)
    longest = max(r.max_tokens for r in requests)
    busy, bubble = after.busy_s - before.busy_s, after.bubble_s - before.bubble_s
    contexts = sum(len(r.prompt_ids) * r.max_tokens + r.max_tokens * r.max_tokens // 2 for r in requests)
    read = workloads.weight_bytes(setup.model) * longest + contexts * workloads.kv_bytes_per_token(setup.model)
    return Measurement(
        workload=name,
        setup=setup,
        seconds=seconds,
        steps=after.steps - before.steps,
        output_tokens_per_s=outputs / median,
        input_tokens_per_s=inputs / median,
        ms_per_output=1e3 * median / longest,
        floor_ms=1e3 * read / FLOOR_BYTES_PER_S / longest if longest > 1 else 0.0,
        idle_share=bubble / (busy + bubble) if busy + bubble else 0.0,
        step_ms_by_tenth=by_tenth(marks),
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
    raise InvalidRequest(f"workload {name!r} is not known; use w1, w2:BATCH, w2:BATCH:OUTPUT or w3")


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
    parser.add_argument("--workload", action="append", help="w1, w3, w2:BATCH or w2:BATCH:OUTPUT")
    parser.add_argument("--depth", action="append", type=int, help="overlap depths to compare (default 1)")
    parser.add_argument("--no-graphs", action="store_true", help="measure without CUDA graphs too")
    parser.add_argument("--attention-backend", default="auto", help="as for the engine")
    parser.add_argument("--deterministic", action="store_true", help="measure in batch-invariant mode")
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
                        graphs,
                        attention_backend=options.attention_backend,
                        deterministic=options.deterministic,
                    )
                    runtime, start_s = start(setup, Path(root))
                    print(f"{setup} started in {start_s:.1f} s", flush=True)
                    run(runtime, workloads.warm_up())
                    for name in options.workload or ["w2:1", "w2:32", "w2:256", "w1", "w3"]:
                        result = measure(runtime, setup, name, requests_of(name), options.repeats)
                        rows.append({**asdict(result), "start_s": start_s})
                        print(_line(result), flush=True)
                    runtime.close()
                    del runtime
                    torch.cuda.empty_cache()
    report["measurements"] = rows
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1))


def _line(m: Measurement) -> str:
    return (
        f"{m.setup.model} depth {m.setup.overlap_depth} graphs {m.setup.graphs} "
        f"{'deterministic ' if m.setup.deterministic else ''}{m.workload}: "
        f"{m.ms_per_output:.3f} ms/output (floor {m.floor_ms:.3f}), "
        f"{m.output_tokens_per_s:.0f} out/s, {m.input_tokens_per_s:.0f} in/s, idle {100 * m.idle_share:.2f} %, "
        f"{m.steps} steps of {'/'.join(f'{x:.2f}' for x in m.step_ms_by_tenth)} ms, "
        f"runs {', '.join(f'{s:.3f}' for s in m.seconds)} s"
    )


if __name__ == "__main__":
    main()
