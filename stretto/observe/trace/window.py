"""How well host and device overlap, step by step: the overlap window, the hidden share of host work, the launch queue.

The overlap window of a step is the time from the end of its launch to the first moment at which the host blocks: the
time in which the host can do its work for free. A wait for an earlier step while this one is queued does not end it; if
nothing does, it ends where the next step is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.observe.trace import intervals
from stretto.observe.trace.blocking import Blocking
from stretto.observe.trace.kinds import Severity
from stretto.observe.trace.launches import Launches
from stretto.observe.trace.model import DeviceKind, Ints, Trace
from stretto.observe.trace.names import is_graph_launch
from stretto.observe.trace.steps import Steps

_LEAST_BLOCK_NS = 2_000


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of the main thread with one device."""

    window_ns: Ints
    """Per step; -1 where the step's launch is not known."""
    hidden_share: float | None
    """Share of the main thread's own work, within the steps, that was done while the device was busy."""
    blocked_ns: int
    """Time of the main thread in blocking calls, within the steps."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The launch queue: what was launched and not yet begun."""

    depth_median: float
    """Launch calls ahead of the device, at each launch."""
    depth_most: int
    ahead_median_ns: float
    """From the end of a launch call to the begin of its first activity."""
    empty_share: float
    """Share of the launches that found the device idle with nothing queued."""


def measure_overlap(
    trace: Trace, launches: Launches, rows: Ints, steps: Steps, blocking: list[Blocking], thread: int
) -> Overlap:
    """The overlap of `thread` with the activities `rows`."""
    window = _windows(trace, launches, rows, steps, blocking, thread)
    busy = intervals.union(trace.device.start[rows], trace.device.end[rows])
    blocks = [one for one in blocking if one.thread == thread]
    blocked = intervals.union(_column([one.start for one in blocks]), _column([one.end for one in blocks]))
    lane_threads = {lane.thread for lane in trace.lanes}
    if not len(steps) or thread < 0 or thread in lane_threads:
        return Overlap(window, None, 0)
    turn = intervals.union(steps.host_start, steps.host_end)
    free = intervals.subtract(*turn, *blocked)
    work = intervals.total(*free)
    hidden = int(intervals.overlap(*busy, *free).sum())
    return Overlap(window, hidden / work if work else None, intervals.total(*turn) - work)


def _windows(trace: Trace, launches: Launches, rows: Ints, steps: Steps, blocking: list[Blocking], thread: int) -> Ints:
    window = np.full(len(steps), -1, dtype=np.int64)
    mine = launches.thread[rows] == thread
    main, starts, ends = _main_launches(trace, launches, rows, steps, mine)
    stops = _column(
        [
            one.start
            for one in blocking
            if one.thread == thread
            and one.severity is not Severity.OUTSIDE
            and (one.is_hidden or (one.drained and not one.ready))
            and one.length >= _LEAST_BLOCK_NS
        ]
    )
    known = [i for i in range(len(steps)) if main[i] >= 0]
    for place, i in enumerate(known):
        following = known[place + 1] if place + 1 < len(known) else -1
        limit = int(main[following]) if following >= 0 else int(steps.host_end[i])
        at = int(np.searchsorted(stops, main[i], side="right"))
        block = int(stops[at]) if at < len(stops) and stops[at] < limit else limit
        last = int(np.searchsorted(starts, block, side="left")) - 1
        if last >= 0:
            window[i] = max(0, block - int(ends[last]))
    return window


def _main_launches(
    trace: Trace, launches: Launches, rows: Ints, steps: Steps, mine: np.typing.NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints]:
    """Begin of each step's main launch (its first graph, else its first kernel; -1: none); launches but uploads."""
    device, names = trace.device, trace.names
    span = launches.span[rows]
    computing = ~np.isin(device.kind[rows], (DeviceKind.COPY_TO_DEVICE, DeviceKind.COPY_TO_HOST, DeviceKind.SET))
    graphs = [i for i, name in enumerate(names) if is_graph_launch(name)]
    is_graph = mine & (span >= 0)
    is_graph[is_graph] = np.isin(trace.host.name[span[is_graph]], graphs)
    main = np.full(len(steps), -1, dtype=np.int64)
    for chosen in (mine & computing & (span >= 0), is_graph):
        first = np.full(len(steps), np.iinfo(np.int64).max)
        inside = chosen & (steps.of_activity >= 0)
        np.minimum.at(first, steps.of_activity[inside], launches.start[rows][inside])
        main = np.where(first < np.iinfo(np.int64).max, first, main)
    # An upload is the begin of the next step's launch, not the end of this one's.
    launching = mine & (span >= 0) & (device.kind[rows] != DeviceKind.COPY_TO_DEVICE)
    _, index = np.unique(span[launching], return_index=True)
    starts, ends = launches.start[rows][launching][index], launches.end[rows][launching][index]
    order = np.argsort(starts, kind="stable")
    return main, starts[order], ends[order]


def measure_queue(trace: Trace, launches: Launches, rows: Ints) -> Queue | None:
    """The launch queue of the activities `rows`; None if no launch is known."""
    device = trace.device
    known = rows[launches.span[rows] >= 0]
    if not len(known):
        return None
    _, index = np.unique(launches.span[known], return_index=True)  # rows are by start: the first of each call
    first = known[index]
    called, returned, begun = launches.start[first], launches.end[first], device.start[first]
    order = np.argsort(called, kind="stable")
    called, returned, begun = called[order], returned[order], begun[order]
    # At each launch: launches made before it, less those whose work has begun.
    depth = np.arange(len(called)) - np.searchsorted(np.sort(begun), called, side="right")
    depth = np.maximum(depth, 0)
    busy = intervals.union(device.start[rows], device.end[rows])
    running = np.searchsorted(busy[0], called, side="right") - 1
    idle = (running < 0) | (busy[1][np.maximum(running, 0)] <= called)
    return Queue(
        float(np.median(depth)),
        int(depth.max()),
        float(np.median(np.maximum(begun - returned, 0))),
        float((idle & (depth == 0)).mean()),
    )


def _column(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
