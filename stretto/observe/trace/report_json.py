"""The analysis as plain data, for `--json` and for comparing traces. Times are microseconds unless named otherwise.

Owns the format. It is stable: fields are added, not changed; "format" counts what breaks readers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.observe.trace import intervals
from stretto.observe.trace.analysis import Analysis, DeviceReport
from stretto.observe.trace.findings import Finding
from stretto.observe.trace.report_text import verdict

FORMAT = 1
_MOST_KERNELS = 50


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Everything that the reports say, as JSON types."""
    trace = analysis.trace
    return {
        "format": FORMAT,
        "trace": trace.path,
        "source": trace.source,
        "rank": trace.rank,
        "length_us": _us(trace.length_ns),
        "warnings": list(trace.warnings),
        "devices": [_device(analysis, report) for report in analysis.devices],
    }


def _device(analysis: Analysis, report: DeviceReport) -> dict[str, Any]:
    steps, overlap, whole = report.steps, report.overlap, max(1, report.length_ns)
    queue = report.queue
    return {
        "device": report.device,
        "name": report.name,
        "verdict": verdict(report),
        "length_us": _us(report.length_ns),
        "busy_share": report.busy_ns / whole,
        "compute_share": report.compute_ns / whole,
        "idle_us": _us(report.length_ns - report.busy_ns),
        "idle_by_cause_us": {cause.value: _us(length) for cause, length in report.idle_by_cause.items()},
        "several_streams_share": report.several_streams_share,
        "pageable_copies": report.pageable_copies,
        "pageable_bytes": report.pageable_bytes,
        "overlap_window_us": None if report.window_ns is None else _us(report.window_ns),
        "host_work_hidden_share": overlap.hidden_share,
        "host_blocked_us": _us(overlap.blocked_ns),
        "launch_queue": None
        if queue is None
        else {
            "depth_median": queue.depth_median,
            "depth_most": queue.depth_most,
            "ahead_median_us": _us(queue.ahead_median_ns),
            "empty_share": queue.empty_share,
        },
        "replay_error": report.replay_error,
        "steps_found_by": steps.method,
        "step_us": _us(report.step_ns),
        "steps": step_rows(analysis, report),
        "findings": [_finding(report, finding) for finding in report.findings],
        "blocking": [
            {
                "kind": one.kind,
                "severity": one.severity.value,
                "call": one.call,
                "location": one.location,
                "start_us": _us(one.start),
                "length_us": _us(one.length),
                "device_drained": one.drained,
            }
            for one in report.blocking
        ],
        "kernels": kernels(analysis, report),
    }


def step_rows(analysis: Analysis, report: DeviceReport) -> list[dict[str, Any]]:
    """One row per step: when, how long, how busy, what it lost to which cause first, its overlap window."""
    steps, device = report.steps, analysis.trace.device
    start, end = steps.device_start, steps.device_end
    busy = intervals.union(device.start[report.rows], device.end[report.rows])
    busy_in = intervals.overlap(*busy, start, end)
    lost: list[dict[str, int]] = [{} for _ in range(len(steps))]
    place = np.searchsorted(start, [gap.start for gap in report.gaps], side="right") - 1
    for gap, i in zip(report.gaps, place.tolist(), strict=True):
        if i >= 0:
            lost[i][gap.cause.value] = lost[i].get(gap.cause.value, 0) + gap.length
    rows = []
    for i, label in enumerate(steps.labels):
        window = int(report.overlap.window_ns[i])
        rows.append(
            {
                "step": label,
                "start_us": _us(int(start[i])),
                "length_us": _us(int(end[i] - start[i])),
                "host_start_us": _us(int(steps.host_start[i])),
                "busy_us": _us(int(busy_in[i])),
                "overlap_window_us": _us(window) if window >= 0 else None,
                "lost_us": {cause: _us(length) for cause, length in sorted(lost[i].items(), key=lambda item: -item[1])},
            }
        )
    return rows


def kernels(analysis: Analysis, report: DeviceReport) -> list[dict[str, Any]]:
    """Device time by name, the most costly first."""
    device = analysis.trace.device
    names = device.name[report.rows]
    length = (device.end - device.start)[report.rows].astype(np.float64)
    sums = np.bincount(names, weights=length, minlength=1)
    counts = np.bincount(names, minlength=1)
    best = np.argsort(-sums, kind="stable")[:_MOST_KERNELS]
    return [
        {"name": analysis.trace.names[i], "count": int(counts[i]), "total_us": _us(float(sums[i]))}
        for i in best.tolist()
        if counts[i]
    ]


def _finding(report: DeviceReport, finding: Finding) -> dict[str, Any]:
    gap = finding.worst
    return {
        "cause": finding.cause.value,
        "kind": finding.kind,
        "severity": finding.severity.value if finding.severity is not None else None,
        "hidden_sync": finding.is_hidden_sync,
        "title": finding.title,
        "location": finding.location,
        "exact_line": finding.exact_line,
        "probable_lines": [{"line": guess.line, "what": guess.what} for guess in finding.guesses],
        "remedy": finding.remedy,
        "count": finding.count,
        "idle_us": _us(finding.idle_ns),
        "blocked_us": _us(finding.blocked_ns),
        "gain_us": None if report.replay_error is None else _us(finding.gain_ns),
        "stack": list(finding.stack),
        "worst": None if gap is None else {"start_us": _us(gap.start), "length_us": _us(gap.length)},
    }


def _us(ns: float) -> float:
    return round(ns / 1000, 3)
