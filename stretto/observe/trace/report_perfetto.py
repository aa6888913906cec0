"""Writes a trace for ui.perfetto.dev (Trace Event Format): the recorded lanes, and above them what the analysis found.

Owns the layout of processes and tracks. Works for every source, so it also turns Nsight exports into something that
Perfetto opens.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stretto.observe.trace.analysis import Analysis, DeviceReport
from stretto.observe.trace.kinds import CAUSE_WORDS

_FOUND = 1_000_000  # process ids of our own tracks; above those of Linux's default limit they collide with nothing here
_COLOURS = {
    "sync": "terrible",
    "planned-wait": "bad",
    "upload": "bad",
    "allocation": "bad",
    "host-late": "vsync_highlight_color",
    "launch-bound": "rail_load",
}


def write_perfetto(analysis: Analysis, path: Path) -> None:
    """Write the trace; compressed if the name ends in .gz."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for i, event in enumerate(_events(analysis)):
            file.write(("," if i else "") + json.dumps(event, separators=(",", ":")) + "\n")
        file.write("]}\n")


def _events(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for i, report in enumerate(analysis.devices):
        yield from _found(analysis, report, _FOUND + i)
    yield from _host(analysis)
    yield from _device(analysis)


def _span(pid: int, tid: int, name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start / 1000, "dur": (end - start) / 1000} | more


def _named(pid: int, tid: int | None, name: str, order: int) -> Iterator[dict[str, Any]]:
    what = "process" if tid is None else "thread"
    common = {"ph": "M", "pid": pid} | ({} if tid is None else {"tid": tid})
    yield common | {"name": f"{what}_name", "args": {"name": name}}
    yield common | {"name": f"{what}_sort_index", "args": {"sort_index": order}}


def _found(analysis: Analysis, report: DeviceReport, pid: int) -> Iterator[dict[str, Any]]:
    yield from _named(pid, None, f"Stretto: device {report.device} {report.name}".strip(), -10)
    for tid, name in enumerate(("steps", "gaps, by cause", "blocking calls"), 1):
        yield from _named(pid, tid, name, tid)
    steps = report.steps
    for label, start, end in zip(steps.labels, steps.device_start.tolist(), steps.device_end.tolist(), strict=True):
        if end > start:
            yield _span(pid, 1, f"step {label}", start, end)
    for gap in report.gaps:
        colour = {"cname": _COLOURS[gap.cause.value]} if gap.cause.value in _COLOURS else {}
        arguments = {"cause": gap.cause.value, "at": gap.location}
        yield _span(pid, 2, CAUSE_WORDS[gap.cause], gap.start, gap.end, args=arguments, **colour)
    for one in report.blocking:
        arguments = {"severity": one.severity.value, "call": one.call, "at": one.location}
        yield _span(pid, 3, f"{one.severity}: {one.kind}", one.start, one.end, args=arguments)
    yield from _queue(analysis, report, pid)


def _queue(analysis: Analysis, report: DeviceReport, pid: int) -> Iterator[dict[str, Any]]:
    """The depth of the launch queue as a counter."""
    known = report.rows[analysis.launches.span[report.rows] >= 0]
    _, index = np.unique(analysis.launches.span[known], return_index=True)
    first = known[index]
    times = np.concatenate([analysis.launches.start[first], analysis.trace.device.start[first]])
    change = np.concatenate([np.ones(len(first), dtype=np.int64), -np.ones(len(first), dtype=np.int64)])
    order = np.lexsort((-change, times))
    for time, depth in zip(times[order].tolist(), np.cumsum(change[order]).tolist(), strict=True):
        yield {"ph": "C", "pid": pid, "name": "launch queue", "ts": time / 1000, "args": {"launches": max(0, depth)}}


def _host(analysis: Analysis) -> Iterator[dict[str, Any]]:
    trace = analysis.trace
    for i, thread in enumerate(trace.threads):
        pid = int(thread.process) if thread.process.isdigit() else 1
        yield from _named(pid, i, thread.name, i)
    pids = [int(thread.process) if thread.process.isdigit() else 1 for thread in trace.threads]
    host = trace.host
    for start, end, name, thread_id, correlation in zip(
        host.start.tolist(),
        host.end.tolist(),
        host.name.tolist(),
        host.thread.tolist(),
        host.correlation.tolist(),
        strict=True,
    ):
        yield _span(pids[thread_id], thread_id, trace.names[name], start, end)
        if correlation >= 0:
            flow = {"ph": "s", "id": correlation, "cat": "launch", "name": "launch", "ts": start / 1000}
            yield flow | {"pid": pids[thread_id], "tid": thread_id}


def _device(analysis: Analysis) -> Iterator[dict[str, Any]]:
    trace = analysis.trace
    devices = sorted({lane.device for lane in trace.lanes})
    for i, lane in enumerate(trace.lanes):
        pid = _FOUND + 1000 + devices.index(lane.device)
        yield from _named(pid, None, f"device {lane.device}", devices.index(lane.device))
        yield from _named(pid, i, lane.name, i)
    device = trace.device
    for start, end, name, lane_id, correlation in zip(
        device.start.tolist(),
        device.end.tolist(),
        device.name.tolist(),
        device.lane.tolist(),
        device.correlation.tolist(),
        strict=True,
    ):
        pid = _FOUND + 1000 + devices.index(trace.lanes[lane_id].device)
        yield _span(pid, lane_id, trace.names[name], start, end)
        if correlation >= 0:
            flow = {"ph": "f", "bp": "e", "id": correlation, "cat": "launch", "name": "launch", "ts": start / 1000}
            yield flow | {"pid": pid, "tid": lane_id}
