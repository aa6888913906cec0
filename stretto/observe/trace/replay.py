"""Plays a trace again without one of its causes: what would have been gained?

Owns a small simulation. Host threads keep their own work between calls; a launch makes its work available to its
stream; a stream runs its work in order; a blocking call ends when the activity that it awaited ends. Played unchanged,
it must give the recorded length: `Replay.error` says how far it is off, and gains are differences between replays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.observe.trace.blocking import Blocking
from stretto.observe.trace.gaps import Gap
from stretto.observe.trace.kinds import Cause, Severity
from stretto.observe.trace.known_waits import KnownWaits
from stretto.observe.trace.launches import Launches
from stretto.observe.trace.model import Ints, Trace

_NEAR_NS = 5_000
_LAUNCH = 0
_BY_HOST = (Cause.HOST_LATE, Cause.HOST_WAITING, Cause.LAUNCH_BOUND)


@dataclass(frozen=True, slots=True)
class Without:
    """What to leave out: waits, by their index, and time of the host, of launch latency or of copies, by gaps."""

    blocking: frozenset[int] = frozenset()
    gaps: tuple[Gap, ...] = ()


class Replay:
    """A trace of one device, ready to be played."""

    def __init__(self, trace: Trace, launches: Launches, rows: Ints, blocking: list[Blocking]) -> None:
        self._blocking = blocking
        self._runs(trace, launches, rows)
        self._calls(trace, launches)
        self.begin = min(int(self._run_start[0]), int(self._call_start.min()) if len(self._call_start) else 1 << 62)
        self.recorded = int(self._run_end.max()) - self.begin
        self.unchanged = self.play(Without())

    @property
    def error(self) -> float:
        """How far the unchanged replay is off the recording, as a share of it."""
        return abs(self.unchanged - self.recorded) / max(1, self.recorded)

    def gain(self, without: Without) -> int:
        """Nanoseconds that the whole trace would be shorter."""
        return max(0, self.unchanged - self.play(without))

    def _runs(self, trace: Trace, launches: Launches, rows: Ints) -> None:
        """Activities of one call that follow each other in one stream are played as one run."""
        device = trace.device
        order = rows[np.lexsort((device.start[rows], device.lane[rows]))]
        lane, span = device.lane[order], launches.span[order]
        new = np.append(True, (lane[1:] != lane[:-1]) | (span[1:] != span[:-1]) | (span[1:] < 0))
        first = np.flatnonzero(new)
        start, end = device.start[order[first]], np.maximum.reduceat(device.end[order], first)
        by_start = np.argsort(start, kind="stable")
        run = np.empty(len(order), dtype=np.int64)
        rank = np.empty(len(first), dtype=np.int64)
        rank[by_start] = np.arange(len(first))
        run[:] = rank[np.cumsum(new) - 1]
        self._run_of_row = dict(zip(order.tolist(), run.tolist(), strict=True))
        self._run_start, self._run_end = start[by_start], end[by_start]
        self._run_lane, self._run_span = lane[first][by_start], span[first][by_start]
        self._run_launch = launches.start[order[first]][by_start]
        self._run_thread = launches.thread[order[first]][by_start]
        self._constraints(KnownWaits(trace, rows))

    def _constraints(self, known_waits: KnownWaits) -> None:
        """For each run: latency after its launch, pause after its predecessor, and what else it waited for."""
        lanes: dict[int, int] = {}
        n = len(self._run_start)
        before = np.full(n, -1, dtype=np.int64)
        for i, lane in enumerate(self._run_lane.tolist()):
            before[i] = lanes.get(lane, -1)
            lanes[lane] = i
        start = self._run_start
        previous_end = np.where(before >= 0, self._run_end[np.maximum(before, 0)], -(1 << 60))
        latency = start - self._run_launch
        launched_late = self._run_launch > previous_end
        known = self._run_span >= 0
        seen = latency[known & launched_late & (latency >= 0)]
        usual = int(np.quantile(seen, 0.1)) if len(seen) else 4_000
        pause = start - previous_end
        self._latency = np.where(launched_late, latency, np.minimum(usual, np.maximum(latency, 0)))
        self._pause = np.where(launched_late & known, np.minimum(np.maximum(pause, 0), 1_000), np.maximum(pause, 0))
        self._pause[before < 0] = 0
        self._before, self._usual = before, usual
        self._depends = np.full(n, -1, dtype=np.int64)
        # A run that begins just after work of another stream ends, long after its own turn came, waited for that.
        by_end = np.argsort(self._run_end, kind="stable")
        at = np.searchsorted(self._run_end[by_end], start, side="right") - 1
        nearest = by_end[np.maximum(at, 0)]
        ready = np.maximum(previous_end, self._run_launch + usual)
        waited = (
            (at >= 0)
            & known
            & (self._run_lane[nearest] != self._run_lane)
            & (start - self._run_end[nearest] <= _NEAR_NS)
            & (start - ready > _NEAR_NS)
        )
        self._depends[waited] = nearest[waited]
        if known_waits.tell_of_streams:
            waited = self._known_waits(known_waits, ready)
        self._latency[waited] = np.minimum(self._latency[waited], usual)
        self._pause[waited] = np.minimum(self._pause[waited], 1_000)

    def _known_waits(self, known_waits: KnownWaits, ready: Ints) -> npt.NDArray[np.bool_]:
        """Take the waits between streams from the recording; which runs began later because of one."""
        self._depends[:] = -1
        held = np.zeros(len(ready), dtype=np.bool_)
        for consumer, producer in known_waits.between_streams():
            run, other = self._run_of_row[consumer], self._run_of_row[producer]
            previous = int(self._depends[run])
            if other != run and (previous < 0 or self._run_end[other] > self._run_end[previous]):
                self._depends[run] = other
                held[run] = bool(self._run_end[other] > ready[run])
        return held

    def _calls(self, trace: Trace, launches: Launches) -> None:
        """The launches and waits of every thread, in order of time."""
        host = trace.host
        spans = np.unique(self._run_span[self._run_span >= 0])
        self._runs_of_span: dict[int, list[int]] = {}
        for run, span in enumerate(self._run_span.tolist()):
            if span >= 0:
                self._runs_of_span.setdefault(span, []).append(run)
        waits = [i for i, one in enumerate(self._blocking) if one.severity is not Severity.OUTSIDE]
        blocks = np.array([self._blocking[i].span for i in waits], dtype=np.int64)
        every = np.concatenate([spans, blocks])
        self._call_start = host.start[every] if len(every) else np.array([], dtype=np.int64)
        what = np.concatenate([np.zeros(len(spans), dtype=np.int64), np.ones(len(blocks), dtype=np.int64)])
        key = np.concatenate([spans, np.array(waits, dtype=np.int64)])
        order = np.lexsort((what, self._call_start))
        # A copy that is launched by the very call that waits takes no time of its own: the wait does.
        end = host.end[every] if len(every) else self._call_start
        both = np.isin(every, blocks) & (what == _LAUNCH)
        end = np.where(both, self._call_start, end)
        self._call_start, self._call_end = self._call_start[order], end[order]
        self._call_what, self._call_key = what[order], key[order]
        self._call_thread = host.thread[every][order] if len(every) else self._call_start
        self._own_work()

    def _own_work(self) -> None:
        """Time of a thread between the end of its previous call and the begin of each."""
        reach: dict[int, int] = {}
        since = []
        for thread, start, end in zip(
            self._call_thread.tolist(), self._call_start.tolist(), self._call_end.tolist(), strict=True
        ):
            since.append(min(start, reach.get(thread, start)))
            reach[thread] = max(end, reach.get(thread, end))
        self._work_start = np.array(since, dtype=np.int64)

    def play(self, without: Without) -> int:
        """The length of the trace, in ns, without what is given."""
        work = self._call_start - self._work_start
        length = np.maximum(self._call_end - np.maximum(self._call_start, self._work_start), 0)
        latency, pause, run_length = self._latency.copy(), self._pause.copy(), self._run_end - self._run_start
        self._leave_out(without.gaps, work, length, latency, pause, run_length)
        threads: dict[int, int] = {}
        lane_end: dict[int, int] = {}
        end = [0] * len(self._run_start)
        latencies, pauses, lengths = latency.tolist(), pause.tolist(), run_length.tolist()
        lanes, depends, ends = self._run_lane.tolist(), self._depends.tolist(), self._run_end.tolist()
        loose = iter(np.flatnonzero(self._run_span < 0).tolist())
        for run in loose:  # work of unknown launch follows its predecessor
            lane = lanes[run]
            begin = lane_end[lane] + pauses[run] if lane in lane_end else int(self._run_start[run])
            end[run] = lane_end[lane] = begin + lengths[run]
        for what, key, thread, start, own, call in zip(
            self._call_what.tolist(),
            self._call_key.tolist(),
            self._call_thread.tolist(),
            self._call_start.tolist(),
            work.tolist(),
            length.tolist(),
            strict=True,
        ):
            now = threads[thread] + own if thread in threads else start
            if what == _LAUNCH:
                for run in self._runs_of_span[key]:
                    lane = lanes[run]
                    begin = now + latencies[run]
                    if lane in lane_end:
                        begin = max(begin, lane_end[lane] + pauses[run])
                    other = depends[run]
                    if other >= 0:
                        begin = max(begin, end[other])
                    end[run] = lane_end[lane] = begin + lengths[run]
                now += call
            elif key not in without.blocking:
                one = self._blocking[key]
                awaited = self._run_of_row.get(one.awaited, -1)
                if awaited >= 0:
                    now = max(now, end[awaited]) + max(0, one.end - max(start, ends[awaited]))
                else:
                    now += call
            threads[thread] = now
        return max(end) - self.begin

    def _leave_out(
        self, gaps: tuple[Gap, ...], work: Ints, length: Ints, latency: Ints, pause: Ints, run_length: Ints
    ) -> None:
        """Shorten what the gaps say: the launching thread's work, the launch, the pause before a run, or the copy."""
        by_thread: dict[int, list[Gap]] = {}
        for gap in gaps:
            run = self._run_of_row[gap.next]
            if gap.cause is Cause.COPY:
                run_length[run] = max(0, int(run_length[run]) - gap.length)
            elif gap.cause is Cause.DEVICE or self._run_span[run] < 0:
                pause[run] = max(0, int(pause[run]) - gap.length)
            elif gap.cause in _BY_HOST:
                by_thread.setdefault(int(self._run_thread[run]), []).append(gap)
                if gap.cause is Cause.LAUNCH_BOUND:
                    late = min(int(latency[run]), gap.end - max(gap.start, int(self._run_launch[run])))
                    latency[run] = max(min(self._usual, int(latency[run])), int(latency[run]) - max(0, late))
        for thread, its_gaps in by_thread.items():
            mine = np.flatnonzero(self._call_thread == thread)
            starts, middles, ends = self._work_start[mine], self._call_start[mine], self._call_end[mine]
            for gap in its_gaps:
                i = int(np.searchsorted(ends, gap.start, side="right"))
                while i < len(mine) and starts[i] < gap.end:
                    call = mine[i]
                    work[call] -= max(0, min(gap.end, int(middles[i])) - max(gap.start, int(starts[i])))
                    if self._call_what[call] == _LAUNCH:
                        length[call] -= max(0, min(gap.end, int(ends[i])) - max(gap.start, int(middles[i])))
                    i += 1
        np.maximum(work, 0, out=work)
        np.maximum(length, 0, out=length)
