"""Packs a trace for the HTML page: columns of numbers, compressed, in text that needs no escaping.

Owns the binary layout, which `page/data.js` unpacks: for each row of a lane the begins (as differences), lengths, names
and marks of its spans, 32-bit little endian, in ticks.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np

from stretto.observe.trace.analysis import Analysis, DeviceReport
from stretto.observe.trace.kinds import CAUSE_WORDS, Severity
from stretto.observe.trace.model import HostKind, Ints
from stretto.observe.trace.report_json import step_rows
from stretto.observe.trace.report_text import duration, verdict, where

MOST_SPANS = 600_000
_MOST_FINDINGS = 12
_SEVERITIES = list(Severity)


class _Columns:
    """The numbers of the page, one 32-bit column behind another."""

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self._parts: list[bytes] = []
        self._length = 0

    def add(self, values: Ints) -> int:
        """Append a column; returns the index of its first number."""
        first = self._length
        self._parts.append(values.astype("<i4").tobytes())
        self._length += len(values)
        return first

    def row(self, start: Ints, end: Ints, name: Ints, mark: Ints, identity: Ints) -> dict[str, int]:
        """Append spans that do not overlap, in order."""
        begin = start // self.tick
        length = np.maximum(end // self.tick - begin, 0)
        return {
            "n": len(start),
            "start": self.add(np.diff(begin, prepend=0)),
            "length": self.add(length),
            "name": self.add(name),
            "mark": self.add(mark),
            "id": self.add(identity),
        }

    def text(self) -> str:
        return base64.b64encode(gzip.compress(b"".join(self._parts), 6, mtime=0)).decode()


def pack(analysis: Analysis) -> tuple[str, str]:
    """(meta as JSON, columns as text) of the page."""
    trace = analysis.trace
    columns = _Columns(max(1, -(-trace.length_ns // (2**31 - 1))))
    blocking = [one for report in analysis.devices for one in report.blocking]
    mark_of_span = {one.span: 1 + _SEVERITIES.index(one.severity) for one in blocking}
    host, dropped = _shown(analysis, set(mark_of_span))
    meta: dict[str, Any] = {
        "title": trace.path.replace("\\", "/").rsplit("/", 1)[-1],
        "source": trace.source,
        "rank": trace.rank,
        "warnings": list(trace.warnings)
        + ([f"{dropped} of the shortest operators and frames are left out of the picture"] if dropped else []),
        "tick": columns.tick,
        "length": trace.length_ns,
        "names": trace.names,
        "causes": [[cause.value, words] for cause, words in CAUSE_WORDS.items()],
        "severities": [severity.value for severity in _SEVERITIES],
        "devices": [_device(analysis, report, columns) for report in analysis.devices],
        "threads": _threads(analysis, host, mark_of_span, columns),
        "launches": _launches(analysis, columns),
        "parent": None,
    }
    parent = np.full(len(trace.host), -1, dtype=np.int64)
    parent[host] = analysis.stacks.parent[host]
    meta["parents"] = {"n": len(host), "id": columns.add(host), "parent": columns.add(parent[host])}
    meta["hostNames"] = columns.add(trace.host.name[host])
    return json.dumps(meta, separators=(",", ":"), ensure_ascii=True), columns.text()


def _shown(analysis: Analysis, always: set[int]) -> tuple[Ints, int]:
    """The host spans of the page: all, or all but the shortest operators and Python frames."""
    host = analysis.trace.host
    if len(host) <= MOST_SPANS:
        return np.arange(len(host)), 0
    small = np.isin(host.kind, (HostKind.OPERATOR, HostKind.PYTHON))
    small[list(always)] = False
    candidates = np.flatnonzero(small)
    drop = min(len(candidates), len(host) - MOST_SPANS)
    length = (host.end - host.start)[candidates]
    keep = np.ones(len(host), dtype=np.bool_)
    keep[candidates[np.argsort(length, kind="stable")[:drop]]] = False
    return np.flatnonzero(keep), drop


def _device(analysis: Analysis, report: DeviceReport, columns: _Columns) -> dict[str, Any]:
    trace, steps = analysis.trace, report.steps
    causes = list(CAUSE_WORDS)
    gaps = sorted(report.gaps, key=lambda gap: gap.start)
    none = np.zeros(len(gaps), dtype=np.int64)
    gap_row = columns.row(
        _column([gap.start for gap in gaps]),
        _column([gap.end for gap in gaps]),
        none,
        _column([causes.index(gap.cause) for gap in gaps]),
        _column([gap.span for gap in gaps]),
    )
    lanes = []
    device = trace.device
    for index, lane in enumerate(trace.lanes):
        rows = report.rows[device.lane[report.rows] == index]
        if lane.device == report.device and len(rows):
            # A device does not start the next before the last is done; clocks of low resolution say it does.
            end = np.minimum(device.end[rows], np.append(device.start[rows][1:], np.iinfo(np.int64).max))
            row = columns.row(device.start[rows], end, device.name[rows], device.kind[rows].astype(np.int64), rows)
            lanes.append({"name": lane.name, "rows": [row]})
    return {
        "name": report.name or ("CPU" if report.device == "cpu" else f"device {report.device}"),
        "verdict": verdict(report),
        "thread": report.thread,
        "begin": report.begin,
        "end": report.end,
        "busy": report.busy_ns,
        "compute": report.compute_ns,
        "idle": [[causes.index(cause), length] for cause, length in report.idle_by_cause.items()],
        "gaps": gap_row,
        "lanes": lanes,
        "steps": {
            "method": steps.method,
            "labels": steps.labels,
            "start": columns.add(np.diff(steps.device_start // columns.tick, prepend=0)),
            "host": columns.add(np.diff(steps.host_start // columns.tick, prepend=0)),
            "rows": _step_rows(analysis, report),
        },
        "figures": _figures(report),
        "findings": [
            {
                "cause": causes.index(finding.cause),
                "severity": finding.severity.value if finding.severity is not None and finding.is_hidden_sync else "",
                "title": finding.title,
                "location": finding.location,
                "line": where(finding),
                "remedy": finding.remedy,
                "stack": list(finding.stack),
                "count": finding.count,
                "idle": finding.idle_ns,
                "blocked": finding.blocked_ns,
                "gain": finding.gain_ns,
                "at": [finding.worst.start, finding.worst.end] if finding.worst else _span(analysis, finding.span),
            }
            for finding in report.findings[:_MOST_FINDINGS]
        ],
    }


def _span(analysis: Analysis, span: int) -> list[int] | None:
    host = analysis.trace.host
    return [int(host.start[span]), int(host.end[span])] if span >= 0 else None


def _step_rows(analysis: Analysis, report: DeviceReport) -> list[list[Any]]:
    """[length us, busy us, window us or -1, [[cause, us], ...]] for each step."""
    causes = {cause.value: i for i, cause in enumerate(CAUSE_WORDS)}
    return [
        [
            row["length_us"],
            row["busy_us"],
            -1 if row["overlap_window_us"] is None else row["overlap_window_us"],
            [[causes[cause], lost] for cause, lost in row["lost_us"].items()],
        ]
        for row in step_rows(analysis, report)
    ]


def _figures(report: DeviceReport) -> list[list[str]]:
    """[label, value, explanation] of the cards on top."""
    whole = max(1, report.length_ns)
    cards = [
        ["device busy", f"{100 * report.busy_ns / whole:.1f} %", f"of {duration(whole)}"],
        ["step", duration(report.step_ns), f"median of {len(report.steps):,}"],
    ]
    if report.window_ns is not None:
        share = 100 * report.window_ns / max(1.0, report.step_ns)
        cards.append(["overlap window", duration(report.window_ns), f"{share:.0f} % of a step"])
    if report.overlap.hidden_share is not None:
        cards.append(["host work hidden", f"{100 * report.overlap.hidden_share:.0f} %", "beside device work"])
    hidden = [finding for finding in report.findings if finding.is_hidden_sync]
    lost = sum(finding.severity is Severity.LOST for finding in hidden)
    cards.append(["hidden syncs", str(len(hidden)), f"{lost} lost, {len(hidden) - lost} shortened"])
    if report.queue is not None:
        ahead = duration(report.queue.ahead_median_ns)
        cards.append(["launch queue", f"{report.queue.depth_median:.0f} deep", f"{ahead} ahead"])
    if report.several_streams_share >= 0.001:
        cards.append(["streams at once", f"{100 * report.several_streams_share:.1f} %", "of busy time"])
    return [[text.replace(" us", " µs") for text in card] for card in cards]  # as the rest of the page writes it


def _threads(analysis: Analysis, shown: Ints, mark_of_span: dict[int, int], columns: _Columns) -> list[dict[str, Any]]:
    """Host threads, those that launch first; each with its spans by depth."""
    trace, host = analysis.trace, analysis.trace.host
    depth = _depths(analysis, shown)
    main = [report.thread for report in analysis.devices]
    busy = np.bincount(host.thread[shown], minlength=len(trace.threads))
    order = sorted(range(len(trace.threads)), key=lambda thread: (thread not in main, -int(busy[thread])))
    marks = np.zeros(len(host), dtype=np.int64)
    marks[list(mark_of_span)] = list(mark_of_span.values())
    threads = []
    for thread in order:
        mine = shown[host.thread[shown] == thread]
        if not len(mine):
            continue
        rows = []
        its_depth = depth[host.thread[shown] == thread]
        for level in range(int(its_depth.max()) + 1):
            at = mine[its_depth == level]
            # Mark: kind in the low bits, severity of a blocking call above.
            mark = host.kind[at].astype(np.int64) | (marks[at] << 4)
            end = np.minimum(host.end[at], np.append(host.start[at][1:], np.iinfo(np.int64).max))
            rows.append(columns.row(host.start[at], np.maximum(end, host.start[at]), host.name[at], mark, at))
        name = trace.threads[thread].name
        threads.append({"name": name, "process": trace.threads[thread].process, "thread": thread, "rows": rows})
    return threads


def _depths(analysis: Analysis, shown: Ints) -> Ints:
    """Nesting depth of the shown spans, counted among them."""
    parent = analysis.stacks.parent
    is_shown = np.zeros(len(parent), dtype=np.bool_)
    is_shown[shown] = True
    depth = np.zeros(len(parent), dtype=np.int64)
    for span, above in enumerate(parent.tolist()):  # parents come before their children
        if above >= 0:
            depth[span] = depth[above] + int(is_shown[above])
    result: Ints = depth[shown]
    return result


def _launches(analysis: Analysis, columns: _Columns) -> dict[str, int]:
    """Pairs of (activity, host span that launched it), for the arrows."""
    known = np.flatnonzero(analysis.launches.span >= 0)
    return {"n": len(known), "activity": columns.add(known), "span": columns.add(analysis.launches.span[known])}


def _column(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
