"""Explains every gap in a device's work: what was the host doing that it did not launch in time?

Owns the attribution. A gap ends with an activity; the thread that launched it is asked what it did between the begin
of the gap and the launch. A hidden sync takes the lead that the host has over the device: all that is launched after it
comes later by its length. So the gaps after it are its own until they add up to its length, or until the host is seen
to be ahead again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stretto.observe.trace import intervals
from stretto.observe.trace.blocking import Blocking
from stretto.observe.trace.kinds import Cause, Severity
from stretto.observe.trace.launches import Launches
from stretto.observe.trace.model import DeviceKind, HostKind, Ints, Trace
from stretto.observe.trace.names import is_graph_launch, is_wait
from stretto.observe.trace.stacks import Stacks

_LEAST_NS = 1_000  # shorter pauses are the device's own
_CLOSE_NS = 2_000  # a wait that ends this near to the gap's begin was in progress
_BUSY_LAUNCHING_NS = 100_000  # a thread that launches again within this is launching all the time
_LONG_LAUNCH_NS = 20_000
_LEAD_NS = 10_000  # a wait of this length shows that the host was ahead
_MOST_STACKS = 20_000  # gaps that are asked for a stack: the longest


@dataclass(frozen=True, slots=True)
class Gap:
    """A piece of time in which the device computed nothing, with one cause."""

    start: int
    end: int
    cause: Cause
    blocking: int
    """Index of the blocking call that caused it; -1 where none did."""
    span: int
    """Host span that covers most of it, for its stack; -1 where none is known."""
    location: str
    next: int
    """The activity that ended it, as a row of `Trace.device`."""

    @property
    def length(self) -> int:
        return self.end - self.start


_BLOCKED = {
    Severity.LOST: Cause.SYNC,
    Severity.SHORTENED: Cause.UPLOAD,
    Severity.PLANNED: Cause.PLANNED_WAIT,
    Severity.OVERLAPPED: Cause.SYNC,
    Severity.OUTSIDE: Cause.SYNC,
}


def explain_gaps(trace: Trace, launches: Launches, stacks: Stacks, rows: Ints, blocking: list[Blocking]) -> list[Gap]:
    """The gaps between the activities `rows` of one device, in order of time, with their causes."""
    return _Explainer(trace, launches, stacks, rows, blocking).gaps()


class _Debt:
    """How much earlier a thread would have launched without its latest hidden sync, less what is accounted for."""

    def __init__(self) -> None:
        self.owner, self.left = -1, 0
        self.next = 0
        """The thread's first blocking call that was not met yet."""

    def meet(self, index: int, one: Blocking) -> None:
        """Take a blocking call that began before the gap into account."""
        if one.is_hidden or (one.severity is Severity.PLANNED and one.drained):
            if one.length >= self.left:
                self.owner, self.left = index, one.length
        elif not one.drained and not one.ready and one.length >= _LEAD_NS:
            self.left = 0  # the host is ahead again: it had to wait although work was queued


class _Explainer:
    def __init__(self, trace: Trace, launches: Launches, stacks: Stacks, rows: Ints, blocking: list[Blocking]) -> None:
        self._trace, self._launches, self._stacks, self._rows = trace, launches, stacks, rows
        self._blocking = blocking
        self._debts: dict[int, _Debt] = {}
        self._of_thread: dict[int, list[int]] = {}
        for i, one in enumerate(blocking):
            self._of_thread.setdefault(one.thread, []).append(i)
        names = trace.names
        self._graphs = {i for i, name in enumerate(names) if is_graph_launch(name)}
        self._waits = {i for i, name in enumerate(names) if is_wait(name)}
        self._previous = _previous_ends(launches, rows)
        self._loop = _loop_thread(trace)

    def gaps(self) -> list[Gap]:
        """All of them, and the copies during which nothing is computed."""
        device = self._trace.device
        start, end = intervals.union(device.start[self._rows], device.end[self._rows])
        gap_start, gap_end = intervals.gaps(start, end)
        long = np.flatnonzero(gap_end - gap_start >= _LEAST_NS)
        following = np.searchsorted(device.start[self._rows], gap_end[long], side="left")
        lengths = (gap_end - gap_start)[long]
        least = np.sort(lengths)[-_MOST_STACKS] if len(lengths) > _MOST_STACKS else 0
        found: list[Gap] = []
        for a, b, place in zip(gap_start[long].tolist(), gap_end[long].tolist(), following.tolist(), strict=True):
            found += self._explain(a, b, place, b - a >= least)
        found += self._copies()
        return sorted(found, key=lambda gap: gap.start)

    def _explain(self, start: int, end: int, place: int, ask: bool) -> list[Gap]:
        row = int(self._rows[place])
        span = int(self._launches.span[row])
        lane = self._trace.lanes[int(self._trace.device.lane[row])]
        if span < 0:
            if lane.thread < 0:
                return [Gap(start, end, Cause.UNKNOWN, -1, -1, "", row)]
            return self._cpu(start, end, row, lane.thread, ask)
        thread = int(self._launches.thread[row])
        launch = int(self._launches.start[row])
        if launch <= start:
            return [Gap(start, end, Cause.DEVICE, -1, -1, "", row)]
        launch = min(launch, end)
        found = self._host_part(start, launch, row, thread, span, int(self._previous[place]), ask)
        if end > launch:
            found.append(self._launching(launch, end, row, span, found))
        return found

    def _cpu(self, start: int, end: int, row: int, thread: int, ask: bool) -> list[Gap]:
        """A gap of a stream that is a thread: work begins when it comes, so the thread that feeds it was late."""
        return self._host_part(start, end, row, thread if self._loop < 0 else self._loop, -1, start, ask)

    def _host_part(self, start: int, end: int, row: int, thread: int, span: int, previous: int, ask: bool) -> list[Gap]:
        """Cut the time until the launch at the blocking calls in it."""
        found: list[Gap] = []
        debt = self._debts.setdefault(thread, _Debt())
        mine = self._of_thread.get(thread, [])
        while debt.next < len(mine) and self._blocking[mine[debt.next]].start <= start + _CLOSE_NS:
            debt.meet(mine[debt.next], self._blocking[mine[debt.next]])
            debt.next += 1
        at = min(end, start + debt.left)
        if at > start:
            found.append(self._blocked(start, at, debt.owner, row))
            debt.left -= at - start
        while debt.next < len(mine) and self._blocking[mine[debt.next]].start < end:
            i = mine[debt.next]
            one = self._blocking[i]
            begin, stop = max(at, one.start), min(end, one.end)
            if stop - begin >= _CLOSE_NS and not one.ready:  # else the call's own time: the host's
                if begin > at:
                    found.append(self._host_late(at, begin, row, thread, span, previous, ask))
                found.append(self._blocked(begin, stop, i, row))
                at = stop
            debt.next += 1
        if end > at:
            found.append(self._host_late(at, end, row, thread, span, previous, ask))
        return found

    def _blocked(self, start: int, end: int, i: int, row: int) -> Gap:
        one = self._blocking[i]
        cause = Cause.ALLOCATION if one.kind == "allocation" else _BLOCKED[one.severity]
        return Gap(start, end, cause, i, one.span, one.location, row)

    def _host_late(self, start: int, end: int, row: int, thread: int, span: int, previous: int, ask: bool) -> Gap:
        is_graph = span >= 0 and int(self._trace.host.name[span]) in self._graphs
        if span >= 0 and not is_graph and end - max(previous, 0) <= _BUSY_LAUNCHING_NS:
            return Gap(start, end, Cause.LAUNCH_BOUND, -1, span, "", row)
        inside = self._stacks.during(thread, start, end) if ask else -1
        location = self._stacks.location(inside)
        cause = Cause.HOST_LATE
        if inside >= 0 and any(int(self._trace.host.name[i]) in self._waits for i in self._stacks.ancestors(inside)):
            cause = Cause.HOST_WAITING
        return Gap(start, end, cause, -1, inside, location, row)

    def _launching(self, start: int, end: int, row: int, span: int, before: list[Gap]) -> Gap:
        """From the launch call's begin to the activity's: part of what came before, unless it is long itself."""
        if before and end - start < _LONG_LAUNCH_NS:
            last = before.pop()
            return replace(last, end=end)
        # A stream that is a thread is woken by the launch: what that takes is its own.
        woken = self._trace.lanes[int(self._trace.device.lane[row])].thread >= 0
        return Gap(start, end, Cause.DEVICE if woken else Cause.LAUNCH_BOUND, -1, span, "", row)

    def _copies(self) -> list[Gap]:
        """Time in which copies between host and device run, and nothing is computed."""
        device, rows = self._trace.device, self._rows
        copying = np.isin(device.kind[rows], (DeviceKind.COPY_TO_DEVICE, DeviceKind.COPY_TO_HOST))
        if not copying.any() or copying.all():
            return []
        computing = intervals.union(device.start[rows][~copying], device.end[rows][~copying])
        alone = intervals.subtract(*intervals.union(device.start[rows][copying], device.end[rows][copying]), *computing)
        copies = rows[copying]
        starts = device.start[copies]
        found = []
        for a, b in zip(alone[0].tolist(), alone[1].tolist(), strict=True):
            row = int(copies[max(0, int(np.searchsorted(starts, a, side="right")) - 1)])
            span = int(self._launches.span[row])
            found.append(Gap(a, b, Cause.COPY, -1, span, self._trace.names[device.name[row]], row))
        return found


def _previous_ends(launches: Launches, rows: Ints) -> Ints:
    """For each of `rows` the end of the launch before its own on the same thread; -1 for the first."""
    span, thread = launches.span[rows], launches.thread[rows]
    calls, index = np.unique(span, return_index=True)
    starts, ends, threads = launches.start[rows][index], launches.end[rows][index], thread[index]
    order = np.lexsort((starts, threads))
    before = np.full(len(calls), -1, dtype=np.int64)
    same = threads[order][1:] == threads[order][:-1]
    before[order[1:]] = np.where(same, ends[order][:-1], -1)
    result: Ints = before[np.searchsorted(calls, span)]
    return result


def _loop_thread(trace: Trace) -> int:
    """The thread that marks the steps; -1 if none does."""
    marks = [i for i, name in enumerate(trace.names) if name.startswith(("stretto.step ", "ProfilerStep#"))]
    rows = np.flatnonzero((trace.host.kind == HostKind.ANNOTATION) & np.isin(trace.host.name, marks))
    return int(trace.host.thread[rows[0]]) if len(rows) else -1
