"""Traces made by hand: a small host and device that follow the rules, so that every answer is known by construction."""

from __future__ import annotations

import gzip
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAUNCH_US = 2.0  # length of a launch call
LATENCY_US = 3.0  # from its begin to the begin of the kernel, on an idle stream
READ_US = 1.0  # a small copy


@dataclass
class Host:
    """A thread that works, launches and waits on a virtual clock (us). Written as a profiler would write it."""

    pid: int = 100
    tid: int = 100
    device: int = 0
    now: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    streams: dict[int, float] = field(default_factory=dict)
    correlation: int = 1000
    clock_error: float = 0.0
    """Added to the device's times."""

    def span(self, category: str, name: str, start: float, end: float, **arguments: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": self.pid, "tid": self.tid}
            | {"ts": start, "dur": end - start, "args": arguments}
        )

    def work(self, duration: float, *frames: str) -> None:
        """Python, in these frames (outermost first)."""
        for name in frames:
            self.span("python_function", name, self.now, self.now + duration)
        self.now += duration

    def within(self, category: str, *names: str) -> Within:
        """The spans around what happens in the block, outermost first."""
        return Within(self, category, names)

    def step(self, number: int) -> Within:
        return self.within("user_annotation", f"stretto.step {number}")

    def launch(
        self, duration: float, name: str = "gemm", stream: int = 7, call: str = "cudaLaunchKernel", kernels: int = 1
    ) -> float:
        """Launch kernels of `duration` each; returns when the last will end."""
        self.correlation += 1
        self.span("cuda_runtime", call, self.now, self.now + LAUNCH_US, correlation=self.correlation)
        begin = self.now + LATENCY_US
        self.now += LAUNCH_US
        for i in range(kernels):
            begin = max(begin, self.streams.get(stream, 0.0))
            title = name if kernels == 1 else f"{name}_{i}"
            self._activity("kernel", title, begin, begin + duration, stream, grid=[1, 1, 1])
            begin = self.streams[stream] = begin + duration
        return begin

    def copy(self, kind: str, duration: float = READ_US, stream: int = 7, size: int = 4, block: bool = False) -> float:
        """A copy, `kind` as in "DtoH (Device -> Pinned)". With `block`, the call returns when it is done."""
        self.correlation += 1
        begin = max(self.now + LATENCY_US, self.streams.get(stream, 0.0))
        end = self.streams[stream] = begin + duration
        returned = end + 1.0 if block else self.now + LAUNCH_US
        self.span("cuda_runtime", "cudaMemcpyAsync", self.now, returned, correlation=self.correlation)
        self._activity("gpu_memcpy", f"Memcpy {kind}", begin, end, stream, bytes=size)
        self.now = returned
        return end

    def wait(self, until: float, call: str = "cudaStreamSynchronize") -> None:
        """A synchronising call that returns 1 us after `until`."""
        end = max(self.now + 1.0, until + 1.0)
        self.correlation += 1
        self.span("cuda_runtime", call, self.now, end, correlation=self.correlation)
        self.now = end

    def record(self, stream: int = 7) -> tuple[int, int, float]:
        """Record an event on a stream: the correlation of the call, the stream, and when it will happen."""
        self.correlation += 1
        self.span("cuda_runtime", "cudaEventRecord", self.now, self.now + LAUNCH_US, correlation=self.correlation)
        self.now += LAUNCH_US
        return self.correlation, stream, self.streams.get(stream, 0.0)

    def wait_event(self, event: tuple[int, int, float], took: float = 1.0) -> None:
        """Wait for an event; the call takes `took` of its own. Told as `cuda_sync` too."""
        begin = self.now
        self.correlation += 1
        self.now = max(begin + took, event[2] + took)
        self.span("cuda_runtime", "cudaEventSynchronize", begin, self.now, correlation=self.correlation)
        self._sync("Event Sync", begin, event, -1)

    def stream_wait(self, stream: int, event: tuple[int, int, float]) -> None:
        """Let a stream wait for an event. Told as `cuda_sync` too."""
        begin = self.now
        self.correlation += 1
        self.now += LAUNCH_US
        self.span("cuda_runtime", "cudaStreamWaitEvent", begin, self.now, correlation=self.correlation)
        self.streams[stream] = max(self.streams.get(stream, 0.0), event[2])
        self._sync("Stream Wait Event", begin, event, stream)

    def _sync(self, kind: str, begin: float, event: tuple[int, int, float], stream: int) -> None:
        about = {"cuda_sync_kind": kind, "stream": stream, "device": self.device, "context": 1}
        about |= {"wait_on_stream": event[1], "wait_on_cuda_event_record_corr_id": event[0]}
        about |= {"correlation": self.correlation, "wait_on_cuda_event_id": event[0] % 50}
        self.events.append(
            {"ph": "X", "cat": "cuda_sync", "name": kind, "pid": self.device, "tid": stream, "ts": begin}
            | {"dur": self.now - begin, "args": about}
        )

    def item(self, *operators: str, stream: int = 7) -> None:
        """Read a value of the device in these operators, outermost first: a copy and a sync."""
        with self.within("cpu_op", *operators):
            done = self.copy("DtoH (Device -> Pageable)", stream=stream)
            self.wait(done)

    def read(self, stream: int = 7) -> float:
        """Copy results to pinned memory; returns when they will be there."""
        return self.copy("DtoH (Device -> Pinned)", stream=stream)

    def _activity(self, category: str, name: str, start: float, end: float, stream: int, **more: Any) -> None:
        arguments = {"device": self.device, "stream": stream, "correlation": self.correlation} | more
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": self.device, "tid": stream}
            | {"ts": start + self.clock_error, "dur": end - start, "args": arguments}
        )


class Within:
    """Spans that begin with the block and end with it."""

    def __init__(self, host: Host, category: str, names: tuple[str, ...]) -> None:
        self._host, self._category, self._names = host, category, names

    def __enter__(self) -> None:
        self._start = self._host.now

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            self._host.span(self._category, name, self._start, self._host.now)


SAMPLE = "engine/sampler.py(41): sample"
SCHEDULE = "engine/scheduler.py(12): schedule"
PROCESS = "engine/scheduler.py(80): process"


def overlap_loop(
    steps: int = 20,
    *,
    forward: float = 1000.0,
    schedule: float = 100.0,
    process: float = 150.0,
    bug: str = "",
    depth: int = 1,
    stacks: bool = True,
    annotate: bool = True,
    graph: bool = True,
    host: Host | None = None,
) -> Host:
    """The overlap loop of an engine: schedule, upload, launch, then wait for the previous step and process it.

    `bug`: "sync@sample" (a truth value of a device tensor after the forward), "pageable@stage" (an upload from pageable
    memory before the launch). `depth` 0 waits for the step just launched.
    """
    host = host or Host()
    done: list[float] = []

    def frames(*names: str) -> tuple[str, ...]:
        return names if stacks else ()

    for number in range(steps):
        step = host.within("user_annotation", *([f"stretto.step {number}"] if annotate else []))
        with step, host.within("python_function", *frames("engine/loop.py(5): run")):
            host.work(schedule, *frames(SCHEDULE))
            _stage(host, bug, frames("engine/staging.py(9): stage"))
            host.launch(forward, "forward", call="cudaGraphLaunch" if graph else "cudaLaunchKernel")
            with host.within("python_function", *frames(SAMPLE)):
                if bug == "sync@sample":
                    host.launch(2.0, "all", call="cudaLaunchKernel")
                    host.item("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense")
                host.launch(20.0, "argmax", call="cudaLaunchKernel")
            done.append(host.read())
            if len(done) > depth:
                with host.within("user_annotation", *(["stretto.wait"] if annotate else [])):
                    host.wait(done[len(done) - 1 - depth], "cudaEventSynchronize")
                host.work(process, *frames(PROCESS))
    host.wait(max(host.streams.values()), "cudaDeviceSynchronize")
    return host


def _stage(host: Host, bug: str, frames: tuple[str, ...]) -> None:
    """Upload the plan of a step."""
    if bug != "pageable@stage":
        host.copy("HtoD (Pinned -> Device)", 5.0, stream=20, size=4096)
        return
    with host.within("python_function", *frames), host.within("cpu_op", "aten::to", "aten::_to_copy", "aten::copy_"):
        host.wait(host.copy("HtoD (Pageable -> Device)", 200.0, stream=20, size=1 << 20))


def document(*hosts: Host, **fields: Any) -> dict[str, Any]:
    """The JSON document that a profiler writes."""
    events: list[dict[str, Any]] = []
    for host in hosts:
        for name, value in (("process_name", "python"), ("thread_name", f"thread {host.tid} (python)")):
            events.append({"ph": "M", "name": name, "pid": host.pid, "tid": host.tid, "ts": 0, "args": {"name": value}})
        events += host.events
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "displayTimeUnit": "ms"}
    return head | fields | {"traceEvents": events, "traceName": "trace.json"}


def write(path: Path, *hosts: Host, **fields: Any) -> Path:
    """Write a trace; compressed if the name ends in .gz."""
    text = json.dumps(document(*hosts, **fields)).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


_TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER, name TEXT, label TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
    (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
    greenContextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, syncType INTEGER,
    eventId INTEGER, eventSyncId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT (timestamp INTEGER, deviceId INTEGER, contextId INTEGER,
    greenContextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, eventId INTEGER,
    eventSyncId INTEGER, UNIQUE (correlationId));
CREATE TABLE CUDA_CALLCHAINS (id INTEGER, symbol INTEGER, module INTEGER, unresolved INTEGER, originalIP INTEGER,
    stackDepth INTEGER, PRIMARY KEY (id, stackDepth));
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, shortName INTEGER, demangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER);
INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'PAGEABLE', 'Pageable'), (1, 'PINNED', 'Pinned'), (2, 'DEVICE', 'Device');
INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200');
"""


def write_nsight(
    path: Path, *hosts: Host, chains: dict[str, list[tuple[str, str]]] | None = None, numbered_events: bool = True
) -> Path:
    """The same events as an export of Nsight Systems (which has no operators and no Python frames).

    `chains`: for calls of these names, the functions and modules that made them, innermost first. Older exports do not
    number the recordings of an event.
    """
    database = sqlite3.connect(path)
    database.executescript(_TABLES)
    strings: dict[str, int] = {}
    chain_of: dict[str, int] = {}
    for number, (call, frames) in enumerate((chains or {}).items(), 1):
        chain_of[call] = number
        for depth, (symbol, module) in enumerate(frames):
            found = [strings.setdefault(text, len(strings)) for text in (symbol, module)]
            database.execute("INSERT INTO CUDA_CALLCHAINS VALUES (?, ?, ?, 0, 1, ?)", (number, *found, depth))
    for host in hosts:
        process = host.pid << 24
        for event in host.events:
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            name, arguments = event["name"], event["args"]
            text = strings.setdefault(name if "cuda" not in name else f"{name}_v3020", len(strings))
            if event["cat"] == "user_annotation":
                row = (start, end, 59, None, text, process | host.tid)
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
            elif event["cat"] == "cuda_runtime":
                row = (start, end, process | host.tid, arguments["correlation"], text, chain_of.get(name))
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?)", row)
            elif event["cat"] == "cuda_sync":
                record, source = arguments["wait_on_cuda_event_record_corr_id"], arguments["wait_on_stream"]
                kind, number = (1 if name == "Event Sync" else 2), (record if numbered_events else None)
                waits = (start, end, arguments["device"], 1, 0, arguments["stream"], arguments["correlation"], process)
                made = (0, arguments["device"], 1, 0, source, record, process)
                for table, values in (("SYNCHRONIZATION", (*waits, kind)), ("CUDA_EVENT", made)):
                    marks = ", ".join("?" * (len(values) + 2))
                    command = f"INSERT OR IGNORE INTO CUPTI_ACTIVITY_KIND_{table} VALUES ({marks})"
                    database.execute(command, (*values, arguments["wait_on_cuda_event_id"], number))
            elif event["cat"] in ("kernel", "gpu_memcpy"):
                common = (start, end, arguments["device"], arguments["stream"], arguments["correlation"], process)
                if event["cat"] == "kernel":
                    table, more = "KERNEL", (text, text)
                else:
                    up = "HtoD" in name
                    ends = (int("Pinned" in name), 2) if up else (2, int("Pinned" in name))
                    table, more = "MEMCPY", (arguments["bytes"], 1 if up else 2, *ends)
                marks = ", ".join("?" * (len(common) + len(more)))
                database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES ({marks})", common + more)
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, text) for text, i in strings.items()])
    database.commit()
    database.close()
    return path
