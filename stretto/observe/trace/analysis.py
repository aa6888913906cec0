"""The whole analysis of one trace: read, pair, find steps, explain gaps, replay. Puts together, decides nothing."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stretto.observe.trace import intervals
from stretto.observe.trace.blocking import Blocking, find_blocking
from stretto.observe.trace.errors import TraceError
from stretto.observe.trace.event_waits import settle_event_waits
from stretto.observe.trace.findings import Finding, find_findings
from stretto.observe.trace.gaps import Gap, explain_gaps
from stretto.observe.trace.kinds import Cause
from stretto.observe.trace.launches import Launches, pair
from stretto.observe.trace.model import DeviceKind, Ints, Trace
from stretto.observe.trace.places import with_places
from stretto.observe.trace.read import read_trace
from stretto.observe.trace.replay import Replay
from stretto.observe.trace.source_lines import probable_lines
from stretto.observe.trace.stacks import Stacks
from stretto.observe.trace.steps import Steps, find_steps
from stretto.observe.trace.window import Overlap, Queue, measure_overlap, measure_queue

_REPLAY_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What was found out about one device. Times in ns since the begin of the trace."""

    device: str
    name: str
    rows: Ints
    """Its activities, as rows of `Trace.device`."""
    thread: int
    """The host thread that launches most of its work; -1 if none is known."""
    begin: int
    end: int
    busy_ns: int
    compute_ns: int
    idle_by_cause: dict[Cause, int]
    several_streams_share: float
    """Share of the busy time in which two or more streams worked."""
    pageable_copies: int
    pageable_bytes: int
    steps: Steps
    overlap: Overlap
    queue: Queue | None
    blocking: list[Blocking]
    gaps: list[Gap]
    findings: list[Finding]
    replay_error: float | None
    """How far a replay of the unchanged trace is off; None if it was too far off to say what would be gained."""

    @property
    def length_ns(self) -> int:
        """From the first activity to the end of the last."""
        return self.end - self.begin

    @property
    def step_ns(self) -> float:
        """Median step, as the device sees it: from begin to begin."""
        lengths = self.steps.device_end - self.steps.device_start
        return float(np.median(lengths)) if len(lengths) else float(self.length_ns)

    @property
    def window_ns(self) -> float | None:
        """Median overlap window."""
        known = self.overlap.window_ns[self.overlap.window_ns >= 0]
        return float(np.median(known)) if len(known) else None


@dataclass(frozen=True, slots=True)
class Analysis:
    """A trace and what was found out, device by device, the busiest first."""

    trace: Trace
    launches: Launches
    stacks: Stacks
    devices: list[DeviceReport]


def analyze(path: str | Path, *, step_pattern: str | None = None) -> Analysis:
    """Analyse a trace file. Raises TraceError for files that are no whole trace.

    `step_pattern` is a regular expression for the annotations that mark steps, if those found by themselves are wrong.
    """
    return analyze_trace(read_trace(path), step_pattern=step_pattern)


def analyze_trace(trace: Trace, *, step_pattern: str | None = None) -> Analysis:
    """Analyse a trace that was read already."""
    trace, launches = pair(trace)
    if not len(trace.device):
        raise TraceError(
            f"{trace.path} holds no work: neither kernels nor operators; profile with activities CPU and CUDA"
        )
    stacks = Stacks(trace)
    devices = []
    for device in sorted({lane.device for lane in trace.lanes}):
        lanes = [i for i, lane in enumerate(trace.lanes) if lane.device == device]
        rows = np.flatnonzero(np.isin(trace.device.lane, lanes)).astype(np.int64)
        if len(rows):
            devices.append(_analyze_device(trace, launches, stacks, device, rows, step_pattern))
    devices.sort(key=lambda report: -report.busy_ns)
    return Analysis(trace, launches, stacks, devices)


def _analyze_device(
    trace: Trace, launches: Launches, stacks: Stacks, device: str, rows: Ints, pattern: str | None
) -> DeviceReport:
    try:
        steps = find_steps(trace, launches, rows, pattern)
    except ValueError as error:
        raise TraceError(f"{trace.path}: {error}") from None
    activities = trace.device
    begin, end = int(activities.start[rows].min()), int(activities.end[rows].max())
    blocking = with_places(trace, stacks, find_blocking(trace, launches, stacks, rows))
    replay = Replay(trace, launches, rows, blocking)
    usable = replay.error <= _REPLAY_ERROR
    if usable:
        blocking = settle_event_waits(blocking, replay)
    gaps = explain_gaps(trace, launches, stacks, rows, blocking)
    findings = find_findings(blocking, gaps, replay if usable else None, end - begin)
    roots = (Path(trace.path).parent, Path(), *(Path(entry) for entry in sys.path))
    findings = [
        replace(
            finding,
            stack=tuple(stacks.frames(finding.span)),
            guesses=() if finding.exact_line else probable_lines(finding.location, finding.kind, roots),
        )
        for finding in findings
    ]
    thread = _main_thread(trace, launches, rows)
    busy = intervals.union(activities.start[rows], activities.end[rows])
    copies = np.isin(activities.kind[rows], (DeviceKind.COPY_TO_DEVICE, DeviceKind.COPY_TO_HOST))
    computing = intervals.union(activities.start[rows][~copies], activities.end[rows][~copies])
    pageable = rows[activities.pageable[rows] > 0]
    return DeviceReport(
        device,
        trace.device_names.get(device, ""),
        rows,
        thread,
        begin,
        end,
        intervals.total(*busy),
        intervals.total(*computing),
        _idle_by_cause(gaps, end - begin - intervals.total(*busy)),
        _several_streams(trace, rows),
        len(pageable),
        int(np.maximum(activities.bytes[pageable], 0).sum()),
        steps,
        measure_overlap(trace, launches, rows, steps, blocking, thread),
        measure_queue(trace, launches, rows),
        blocking,
        gaps,
        findings,
        replay.error if usable else None,
    )


def _idle_by_cause(gaps: list[Gap], idle: int) -> dict[Cause, int]:
    """Summed gaps of each cause, largest first; pauses too short to be asked for a cause are the device's own."""
    sums: Counter[Cause] = Counter()
    for gap in gaps:
        sums[gap.cause] += gap.length
    explained = sum(length for cause, length in sums.items() if cause is not Cause.COPY)
    sums[Cause.DEVICE] += max(0, idle - explained)
    return {cause: length for cause, length in sums.most_common() if length}


def _several_streams(trace: Trace, rows: Ints) -> float:
    start, end, lane = trace.device.start[rows], trace.device.end[rows], trace.device.lane[rows]
    parts = [intervals.union(start[lane == one], end[lane == one]) for one in np.unique(lane)]
    busy, several = intervals.concurrency(
        np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    )
    return several / busy if busy else 0.0


def _main_thread(trace: Trace, launches: Launches, rows: Ints) -> int:
    """The thread that launches most; without launches, the thread that marks steps, else the stream's own."""
    known = launches.thread[rows][launches.thread[rows] >= 0]
    if len(known):
        return int(np.bincount(known).argmax())
    marks = [i for i, name in enumerate(trace.names) if name.startswith(("stretto.step ", "ProfilerStep#"))]
    marked = np.flatnonzero(np.isin(trace.host.name, marks))
    if len(marked):
        return int(trace.host.thread[marked[0]])
    return trace.lanes[int(trace.device.lane[rows[0]])].thread
