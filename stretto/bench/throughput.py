"""Throughput of many requests at once, end to end through one LLM. Owns the workload and the report."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.config import SchedulerConfig
from stretto.errors import InvalidRequest
from stretto.request import SamplingParams
from stretto.version import __version__

if TYPE_CHECKING:
    from stretto.llm import LLM
    from stretto.prompts import TokensPrompt


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once; greedy, end-of-sequence ignored. Lengths are in tokens."""

    num_prompts: int = 16
    input_len: int = 128
    output_len: int = 128
    seed: int = 0
    """Chooses the random prompts."""
    num_warmups: int = 1
    """Runs of the same workload before the measured one."""
    texts: tuple[str, ...] = ()
    """Prompts to take, over and over, instead of random tokens; `input_len` then means nothing."""

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("num_warmups", 0)):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; allowed: at least {least}")


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """What one run gave. Rates are tokens per second of wall time; times are seconds."""

    model: str
    dtype: str
    device: str
    num_prompts: int
    input_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    steps: int
    overlap_depth: int
    device_busy_s: float
    bubble_s: float
    bubble_share: float
    launching_share: float
    """Share of device time in steps that the host was still launching."""
    occupancy: float
    """Device busy / wall time while anything was runnable."""
    overlap_window_s: float
    """Mean time of a step in which the host could work for free."""
    host_s: dict[str, float]
    """Host time by phase of the loop."""
    hidden_syncs: list[str] | None
    """Where the host waited without a plan; None: nobody watched (`sync_guard`)."""
    preemptions: int
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain values under the names of the fields."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of what a person wants to read."""
        return [
            ("model", f"{self.model}, {self.dtype}"),
            ("device", self.device),
            ("requests", f"{self.num_prompts}"),
            ("input tokens", f"{self.input_tokens}"),
            ("output tokens", f"{self.output_tokens}"),
            ("time", f"{self.seconds:.2f} s"),
            ("output", f"{self.output_tokens_per_s:.1f} tokens/s"),
            ("input and output", f"{self.total_tokens_per_s:.1f} tokens/s"),
            ("steps", f"{self.steps}"),
            ("overlap depth", f"{self.overlap_depth}"),
            ("bubble share", f"{100 * self.bubble_share:.2f} %"),
            ("launching share", f"{100 * self.launching_share:.2f} %"),
            ("occupancy", f"{100 * self.occupancy:.2f} %"),
            ("overlap window", f"{1e3 * self.overlap_window_s:.3f} ms a step"),
            ("host", f"{self._phases()} µs a step"),
            ("preemptions", f"{self.preemptions}"),
            *(("hidden sync", text) for text in self.hidden_syncs or ()),
        ]

    def _phases(self) -> str:
        each = 1e6 / max(self.steps, 1)
        return ", ".join(f"{name} {seconds * each:.0f}" for name, seconds in self.host_s.items())


def measure_throughput(llm: LLM, workload: Workload) -> ThroughputReport:
    """Run `workload` and measure it. Blocks for all of its runs. Raises InvalidRequest if it does not fit the model."""
    prompts = make_prompts(llm, workload)
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True, detokenize=False)
    for _ in range(workload.num_warmups):
        llm.generate(prompts, params, use_tqdm=False)
    before = llm.stats()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = llm.stats()
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    runnable_s, steps = after.runnable_s - before.runnable_s, after.steps - before.steps
    window_s = after.overlap_window_s * after.steps - before.overlap_window_s * before.steps
    busy_s, bubble_s = after.busy_s - before.busy_s, after.bubble_s - before.bubble_s
    device_s = busy_s + bubble_s
    return ThroughputReport(
        model=llm.config.model,
        dtype=llm.dtype,
        device=describe_device(llm.device),
        num_prompts=workload.num_prompts,
        input_tokens=num_input,
        output_tokens=num_output,
        seconds=seconds,
        output_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_input + num_output) / seconds,
        steps=steps,
        overlap_depth=after.overlap_depth,
        device_busy_s=busy_s,
        bubble_s=bubble_s,
        bubble_share=bubble_s / device_s if device_s else 0.0,
        launching_share=(after.launching_s - before.launching_s) / device_s if device_s else 0.0,
        occupancy=min(1.0, busy_s / runnable_s) if runnable_s else 0.0,
        overlap_window_s=window_s / steps if steps else 0.0,
        host_s={
            "receive": after.receive_s - before.receive_s,
            "schedule": after.schedule_s - before.schedule_s,
            "launch": after.launch_s - before.launch_s,
            "blocked": after.blocked_s - before.blocked_s,
            "process": after.process_s - before.process_s,
        },
        hidden_syncs=None if after.hidden_syncs is None else [str(finding) for finding in llm.hidden_syncs()],
        preemptions=after.preemptions - before.preemptions,
        versions=versions(),
    )


def make_prompts(llm: LLM, workload: Workload) -> list[TokensPrompt]:
    """The prompts as token ids. Raises InvalidRequest if the lengths do not fit the context."""
    config = llm.scheduler_config
    if workload.texts:
        given = [llm.tokenizer.encode(text) for text in workload.texts]
        ids = [given[index % len(given)] for index in range(workload.num_prompts)]
    else:
        rng = np.random.default_rng(workload.seed)
        ids = rng.integers(0, config.vocab_size, (workload.num_prompts, workload.input_len)).tolist()
    longest = max(map(len, ids))
    _check_fits(longest, workload.output_len, config)
    return [{"prompt_token_ids": prompt} for prompt in ids]


def _check_fits(longest: int, output_len: int, config: SchedulerConfig) -> None:
    """A shorter output than asked for would be measured as if it were the whole."""
    if longest + output_len > config.max_model_len:
        raise InvalidRequest(
            f"{longest} prompt tokens and {output_len} new ones are {longest + output_len}, more than the context "
            f"length of {config.max_model_len}: shorten them or raise max_model_len"
        )


def describe_device(device: str) -> str:
    """The device for a reader: its name, and how much of it is used."""
    import torch

    if device.startswith("cuda"):
        return f"{device}: {torch.cuda.get_device_name(torch.device(device))}"
    return f"{device}: {_cpu_name()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    import torch

    return {"stretto": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
