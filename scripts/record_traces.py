"""Records small traces of real programs on a CUDA GPU, for tests/data/traces: python scripts/record_traces.py [FOLDER]

Programs: `generate` of transformers, a hand-written decode loop with and without the second seed's bug (also with a
pageable upload), the loop on a CUDA graph, two streams, and a training loop that prints its loss. Models have random
weights and nothing is downloaded. Each program runs alone: one that fails is reported and the others are recorded. The
folder is $OUT or the current one; each file is below 300 kB, and `summary.json` says what the analysis found.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MOST_BYTES = 300_000
WIDTH, LAYERS, STEPS = 2048, 6, 12
KEPT_ARGUMENTS = ("correlation", "stream", "device", "bytes", "External id")
KEPT_CATEGORIES = (
    *("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"),
    *("cpu_op", "user_annotation", "python_function"),
)


class Decoder(torch.nn.Module):
    """A stack of wide layers: about a millisecond of device time at batch 64."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(WIDTH, 32_000, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(4):
                hidden = torch.relu(layer(hidden)) + hidden * 0.5
        return self.head(hidden)


class Loop:
    """The overlap loop of the seeds, by hand. `bug`: "", "sync@sample" or "pageable@stage"."""

    def __init__(self, bug: str, *, graph: bool = False, batch: int = 512) -> None:
        self.bug = bug
        self.model = Decoder().to("cuda", torch.float16).eval()
        self.scheduler, self.engine = torch.cuda.Stream(), torch.cuda.Stream()
        self.plan_host = torch.zeros(batch, WIDTH, dtype=torch.float16).pin_memory()
        self.plan_pageable = torch.zeros(batch, WIDTH, dtype=torch.float16)
        self.plan = torch.zeros(batch, WIDTH, dtype=torch.float16, device="cuda")
        self.hidden = torch.zeros_like(self.plan)
        self.is_greedy = torch.ones(batch, dtype=torch.bool, device="cuda")
        self.tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.results = [torch.zeros(batch, dtype=torch.int64).pin_memory() for _ in range(2)]
        self.graph = self._capture() if graph else None
        torch.cuda.synchronize()

    def _capture(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.engine):
            for _ in range(3):
                self.logits = self.model(self.hidden)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.engine):
            self.logits = self.model(self.hidden)
        return graph

    def schedule(self) -> None:
        total = 0
        for i in range(3000):
            total += i % 7
        self.stage()

    def stage(self) -> None:
        source = self.plan_pageable if self.bug == "pageable@stage" else self.plan_host
        self.plan.copy_(source, non_blocking=self.bug != "pageable@stage")

    def forward(self) -> torch.Tensor:
        self.hidden.copy_(self.plan)
        if self.graph is not None:
            self.graph.replay()
            return self.logits
        return self.model(self.hidden)

    def sample(self, logits: torch.Tensor) -> None:
        if self.bug == "sync@sample" and self.is_greedy.all():
            torch.argmax(logits, dim=-1, out=self.tokens)
        else:
            torch.argmax(logits, dim=-1, out=self.tokens)

    def process(self, result: torch.Tensor) -> None:
        seen: dict[int, int] = {}
        for token in result.tolist():
            seen[token] = seen.get(token, 0) + 1

    @torch.inference_mode()
    def run(self, steps: int = STEPS) -> None:
        last: tuple[torch.cuda.Event, torch.Tensor] | None = None
        for number in range(steps):
            with record_function(f"decode step {number}"):
                with torch.cuda.stream(self.scheduler):
                    self.schedule()
                with torch.cuda.stream(self.engine):
                    self.engine.wait_stream(self.scheduler)
                    self.sample(self.forward())
                    result = self.results[number % 2]
                    result.copy_(self.tokens, non_blocking=True)
                    done = torch.cuda.Event()
                    done.record()
                if last is not None:
                    last[0].synchronize()
                    self.process(last[1])
                last = (done, result)
        torch.cuda.synchronize()


def generate() -> Callable[[], None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.float16).eval()
    prompt = torch.arange(1, 17, device="cuda").repeat(2, 1)
    mask = torch.ones_like(prompt)

    def run() -> None:
        with torch.inference_mode():
            model.generate(
                prompt, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
            )
        torch.cuda.synchronize()

    return run


def two_streams() -> Callable[[], None]:
    left, right = torch.cuda.Stream(), torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    b = torch.randn(512, 512, device="cuda", dtype=torch.float16)

    def run() -> None:
        for number in range(STEPS):
            with record_function(f"round {number}"):
                with torch.cuda.stream(left):
                    x = a
                    for _ in range(4):
                        x = x @ a
                with torch.cuda.stream(right):
                    y = b
                    for _ in range(12):
                        y = y @ b
                left.wait_stream(right)
        torch.cuda.synchronize()

    return run


def training() -> Callable[[], None]:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    batches = [torch.randn(256, 1024) for _ in range(STEPS)]

    def run() -> None:
        losses = []
        for number, batch in enumerate(batches[:8]):
            with record_function(f"ProfilerStep#{number}"):
                loss = model(batch.to("cuda")).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        torch.cuda.synchronize()

    return run


PROGRAMS: dict[str, Callable[[], Callable[[], None]]] = {
    "generate": generate,
    "loop_good": lambda: Loop("").run,
    "loop_sync_at_sample": lambda: Loop("sync@sample").run,
    "loop_pageable_at_stage": lambda: Loop("pageable@stage").run,
    "graph_good": lambda: Loop("", graph=True).run,
    "graph_sync_at_sample": lambda: Loop("sync@sample", graph=True).run,
    "two_streams": two_streams,
    "training": training,
}


def record(make: Callable[[], Callable[[], None]], folder: Path, name: str) -> Path:
    """Run a program twice to warm up, then record it once; with Python stacks if they fit into the size."""
    run = make()
    run()
    run()
    path = folder / f"{name}.json.gz"
    for stacks in (True, False):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=stacks) as recorder:
            run()
        with tempfile.TemporaryDirectory() as temporary:
            raw = Path(temporary) / "trace.json"
            recorder.export_chrome_trace(str(raw))
            document = json.loads(raw.read_text())
        for shortest in (0.0, 1.0, 3.0, 10.0):
            path.write_bytes(gzip.compress(json.dumps(slim(document, shortest)).encode(), 9, mtime=0))
            if path.stat().st_size <= MOST_BYTES:
                return path
    raise RuntimeError(f"{name} does not fit into {MOST_BYTES} bytes: {path.stat().st_size}")


def slim(document: dict[str, Any], shortest: float) -> dict[str, Any]:
    head = {k: document[k] for k in ("schemaVersion", "displayTimeUnit", "baseTimeNanoseconds") if k in document}
    events = []
    for event in document["traceEvents"]:
        category = event.get("cat")
        if event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name"):
            events.append(event)
        if event.get("ph") != "X" or category not in KEPT_CATEGORIES:
            continue
        if category == "python_function" and event.get("dur", 0) < shortest:
            continue
        arguments = {key: value for key, value in event.get("args", {}).items() if key in KEPT_ARGUMENTS}
        events.append(event | {"args": arguments, "name": str(event["name"]).replace(str(Path.home()), "~")[:160]})
    head = {
        key: document[key] for key in ("schemaVersion", "displayTimeUnit", "baseTimeNanoseconds") if key in document
    }
    devices = [{"id": one.get("id"), "name": one.get("name")} for one in document.get("deviceProperties", [])]
    return head | {"deviceProperties": devices[:1], "traceEvents": events}


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA GPU here", file=sys.stderr)
        return 1
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from stretto.observe.trace import analyze
    from stretto.observe.trace.report_json import as_json

    summary: dict[str, Any] = {}
    for name, make in PROGRAMS.items():
        try:
            path = record(make, folder, name)
            device = as_json(analyze(path))["devices"][0]
            summary[name] = {key: device[key] for key in ("verdict", "busy_share", "step_us", "steps_found_by")}
            summary[name] |= {"bytes": path.stat().st_size, "steps": len(device["steps"])}
            summary[name] |= {key: device[key] for key in ("overlap_window_us", "replay_error", "idle_by_cause_us")}
            summary[name]["findings"] = [
                {key: finding[key] for key in ("severity", "kind", "cause", "location", "count", "idle_us", "gain_us")}
                for finding in device["findings"]
            ]
            print(f"{name}: {path.stat().st_size} bytes, {device['verdict']}", flush=True)
        except Exception:
            summary[name] = {"failed": traceback.format_exc()}
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if not any("failed" in one for one in summary.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
