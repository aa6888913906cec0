"""Which uses of shared regions are ordered: vector clocks over the host and the streams.

Owns no device and runs nothing: a checking device tells it what the host enqueues, records, waits for and learns. It
keeps, for each region, the last write and the reads since, and checks each new use against them.

The order (Lamport 1978; the bookkeeping follows FastTrack, Flanagan and Freund 2009: one (actor, count) per use and a
clock per actor, so one comparison decides whether a use is ordered before what an actor does now):

* the host's actions follow each other, and so do the works of one stream;
* a work follows what the host did before enqueueing it;
* a work enqueued after a wait follows what the event had seen when it was recorded;
* the host, once it has synchronised with an event or seen it done, follows what the event had seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FrameType

from stretto.device.base import Access, Region
from stretto.device.faults import work_name
from stretto.device.hazards import Conflict, HazardError, hazard_of

Point = tuple[int, ...]
"""What a recorded event has seen: one count per actor."""

HOST = 0


class HappensBefore:
    """Checks every declared use of a region.

    Args:
        raising: raise a HazardError where the hazard is met; otherwise only keep it in `hazards` and go on, so that
            its effect on the results can be seen as well.
    """

    def __init__(self, *, raising: bool = True) -> None:
        self.hazards: list[HazardError] = []
        self._raising = raising
        self._names = ["host"]
        self._clocks = [[1]]
        self._states: dict[Region, _State] = {}

    def actor(self, stream: str) -> int:
        """Add a stream; returns its number."""
        self._names.append(stream)
        for clock in self._clocks:
            clock.append(0)
        self._clocks.append([0] * len(self._names))
        return len(self._names) - 1

    def launch(self, actor: int, work: Callable[..., None], access: Access, frame: FrameType) -> None:
        """The host enqueues `work` in stream `actor`; `frame` is the caller to name in reports. hot path"""
        clock = self._clocks[actor]
        _join(clock, self._clocks[HOST])
        clock[actor] += 1
        self._use(_Use(actor, clock[actor], work, frame), clock, access.reads, access.writes)

    def host_access(self, reads: Iterable[Region], writes: Iterable[Region], frame: FrameType) -> None:
        """The host itself uses regions. hot path"""
        clock = self._clocks[HOST]
        clock[HOST] += 1
        self._use(_Use(HOST, clock[HOST], None, frame), clock, reads, writes)

    def point(self, actor: int) -> Point:
        """What an event recorded in stream `actor` now will have seen."""
        return tuple(self._clocks[actor])

    def wait(self, actor: int, point: Point) -> None:
        """Works enqueued in stream `actor` from now on follow `point`."""
        _join(self._clocks[actor], point)

    def host_knows(self, point: Point) -> None:
        """The host has learnt that `point` is done."""
        _join(self._clocks[HOST], point)

    def take(self, regions: Iterable[Region], frame: FrameType) -> None:
        """The regions get an owner; what was in them counts as not written."""
        for region in regions:
            state = self._states.get(region)
            use = _Use(HOST, 0, None, frame)
            if state is None:
                state = self._states[region] = _State()
            elif state.owned:
                self._report(region, Conflict.taken_twice, use, state.changed)
            state.owned, state.released, state.written = True, False, False
            state.changed = use

    def release(self, regions: Iterable[Region], frame: FrameType) -> None:
        """The regions lose their owner; every use so far must be done and known to be (I2)."""
        now = self._clocks[HOST]
        for region in regions:
            use = _Use(HOST, 0, None, frame)
            state = self._states.get(region)
            if state is None:
                state = self._states[region] = _State()
            elif state.released:
                self._report(region, Conflict.released_twice, use, state.changed)
            else:
                for earlier in (state.write, *state.reads.values()):
                    if earlier is not None and now[earlier.actor] < earlier.count:
                        self._report(region, Conflict.released_in_flight, use, earlier)
                        break
            state.released, state.owned = True, False
            state.changed = use

    def _use(self, use: _Use, clock: list[int], reads: Iterable[Region], writes: Iterable[Region]) -> None:
        states = self._states
        actor = use.actor
        for region in reads:
            state = states.get(region)
            if state is None:
                state = states[region] = _State()
            if state.released:
                self._report(region, Conflict.used_after_release, use, state.changed)
            write = state.write
            if write is None or not state.written:
                self._report(region, Conflict.never_written, use, state.changed)
            elif clock[write.actor] < write.count:
                self._report(region, Conflict.read_before_write, use, write)
            state.reads[actor] = use
        for region in writes:
            state = states.get(region)
            if state is None:
                state = states[region] = _State()
            if state.released:
                self._report(region, Conflict.used_after_release, use, state.changed)
            write = state.write
            if write is not None and clock[write.actor] < write.count:
                self._report(region, Conflict.write_before_write, use, write)
            if state.reads:
                for read in state.reads.values():
                    if clock[read.actor] < read.count:
                        self._report(region, Conflict.write_before_read, use, read)
                        break
                # From here on the write stands for the reads: who is ordered after it is ordered after them.
                state.reads.clear()
            state.write = use
            state.written = True

    def _report(self, region: Region, conflict: Conflict, use: _Use, other: _Use | None) -> None:
        message = f"region {region}: {self._describe(use)} {conflict.value}"
        if other is not None:
            message += f"; the other: {self._describe(other)}"
        error = HazardError(hazard_of(region[0], conflict), message, region=region, conflict=conflict)
        self.hazards.append(error)
        if self._raising:
            raise error

    def _describe(self, use: _Use) -> str:
        who = "the host" if use.work is None else f"work {work_name(use.work)!r} on stream {self._names[use.actor]!r}"
        verb = "at" if use.work is None else "enqueued at"
        return f"{who} ({verb} {use.file}:{use.line})"


class _Use:
    """One access to regions: by whom, its count on that actor's clock, and where the host asked for it."""

    __slots__ = ("actor", "count", "file", "line", "work")

    def __init__(self, actor: int, count: int, work: Callable[..., None] | None, frame: FrameType) -> None:
        self.actor = actor
        self.count = count
        self.work = work
        self.file = frame.f_code.co_filename
        self.line = frame.f_lineno


class _State:
    """What is known of one region: its last write, each actor's last read since, and whether it has an owner."""

    __slots__ = ("changed", "owned", "reads", "released", "write", "written")

    def __init__(self) -> None:
        self.write: _Use | None = None
        self.written = False  # by the present owner; `write` may be an earlier owner's and still orders what follows
        self.reads: dict[int, _Use] = {}
        self.owned = False
        self.released = False
        self.changed: _Use | None = None  # where it was last taken or released


def _join(into: list[int], other: Iterable[int]) -> None:
    # A point may be shorter than a clock: streams made after it are at count 0 there.
    for actor, count in enumerate(other):
        if count > into[actor]:
            into[actor] = count
