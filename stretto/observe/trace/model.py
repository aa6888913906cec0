"""A trace in memory: columns of host spans and device activities, whatever profiler wrote them.

Owns the columns and their order. Times are int64 nanoseconds since the trace's first event. Knows no file format and
draws no conclusion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Kinds = npt.NDArray[np.uint8]


class HostKind(IntEnum):
    """What a host span is. Where two spans have the same times, the smaller kind is around the larger."""

    ANNOTATION = 0
    PYTHON = 1
    OPERATOR = 2
    CALL = 3
    """A call into the device's runtime or driver."""
    SYSTEM_WAIT = 4
    """A call of the operating system that may wait (poll, futex, read)."""


class DeviceKind(IntEnum):
    """What a device activity is."""

    KERNEL = 0
    COPY_TO_DEVICE = 1
    COPY_TO_HOST = 2
    COPY_ON_DEVICE = 3
    SET = 4
    WORK = 5
    """Work on a stream of the CPU device, or an operator in a trace without a device."""

    @property
    def is_copy(self) -> bool:
        """Between host and device; a copy on the device is work like any other."""
        return self in (DeviceKind.COPY_TO_DEVICE, DeviceKind.COPY_TO_HOST)


@dataclass(frozen=True, slots=True)
class Thread:
    """A host thread."""

    process: str
    thread: str
    name: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream of a device. `thread` is the host thread that is the stream, where the CPU is the device."""

    device: str
    stream: str
    name: str
    thread: int = -1


@dataclass(frozen=True, slots=True)
class HostSpans:
    """Rows sorted by (thread, start, longest first, kind).

    `name` indexes `Trace.names`, `thread` indexes `Trace.threads`.
    """

    start: Ints
    end: Ints
    name: Ints
    thread: Ints
    kind: Kinds
    correlation: Ints
    """Ties a runtime call to the activities that it caused; -1 where there is none."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Activities:
    """Rows sorted by (start, end). `lane` indexes `Trace.lanes`."""

    start: Ints
    end: Ints
    name: Ints
    lane: Ints
    kind: Kinds
    correlation: Ints
    bytes: Ints
    """Of a copy; -1 where not known."""
    pageable: Kinds
    """1 where the host side of a copy is pageable memory."""

    def __len__(self) -> int:
        return len(self.start)


class SyncKind(IntEnum):
    """What waits for what; the numbers are CUPTI's."""

    EVENT = 1
    """The host for an event."""
    STREAM_WAIT = 2
    """A stream for an event."""
    STREAM = 3
    """The host for a stream."""
    CONTEXT = 4
    """The host for everything."""


@dataclass(frozen=True, slots=True)
class Sync:
    """What some recordings know for sure about a wait. The times are those of its call."""

    kind: SyncKind
    correlation: int
    """Of the call that waits, or that makes a stream wait."""
    lane: int
    """The stream that is waited for, as the index of a lane; -1 if it is not known or does nothing."""
    waiter: int
    """The stream that waits; -1 for the host."""
    record: int
    """Correlation of the call that recorded the event; -1 if it is not known."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One file, read. `origin_ns` is what was subtracted from every time."""

    path: str
    source: str
    names: list[str]
    threads: list[Thread]
    lanes: list[Lane]
    host: HostSpans
    device: Activities
    origin_ns: int
    device_names: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    warnings: tuple[str, ...] = ()
    syncs: tuple[Sync, ...] = ()

    @property
    def length_ns(self) -> int:
        """From the first event to the end of the last."""
        ends = [int(part.end.max()) for part in (self.host, self.device) if len(part)]
        return max(ends, default=0)


class TraceBuilder:
    """Takes events one by one in any order; `finish` sorts them and makes the columns."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.device_names: dict[str, str] = {}
        self.rank: int | None = None
        self.warnings: list[str] = []
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._thread_names: dict[tuple[str, str], str] = {}
        self._process_names: dict[str, str] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._lane_index: dict[tuple[str, str], int] = {}
        self._host: list[tuple[int, int, int, int, int, int]] = []
        self._device: list[tuple[int, int, int, int, int, int, int, int]] = []
        self._syncs: list[tuple[SyncKind, int, tuple[str, str], tuple[str, str], int]] = []

    def __len__(self) -> int:
        return len(self._host) + len(self._device)

    def name_id(self, name: str) -> int:
        """The index of an interned name."""
        return self._names.setdefault(name, len(self._names))

    def thread_id(self, process: str, thread: str) -> int:
        """The index of a host thread."""
        return self._threads.setdefault((process, thread), len(self._threads))

    def lane_id(self, device: str, stream: str) -> int:
        """The index of a stream."""
        key = (device, stream)
        index = self._lane_index.get(key)
        if index is None:
            index = self._lane_index[key] = len(self._lane_index)
            self._lanes[key] = Lane(device, stream, f"stream {stream}")
        return index

    def name_thread(self, process: str, thread: str, name: str) -> None:
        """Give a thread its name, before or after its first span."""
        self._thread_names[process, thread] = name

    def name_process(self, process: str, name: str) -> None:
        """Give a process its name."""
        self._process_names[process] = name

    def add_host(self, start: int, end: int, name: int, thread: int, kind: HostKind, correlation: int = -1) -> None:
        """A span of a host thread; times in ns on the file's own clock."""
        self._host.append((start, max(start, end), name, thread, kind, correlation))

    def add_device(
        self,
        start: int,
        end: int,
        name: int,
        lane: int,
        kind: DeviceKind,
        correlation: int = -1,
        size: int = -1,
        pageable: bool = False,
    ) -> None:
        """An activity of a stream; times in ns on the file's own clock."""
        self._device.append((start, max(start, end), name, lane, kind, correlation, size, pageable))

    def add_sync(
        self,
        kind: SyncKind,
        correlation: int,
        device: str,
        *,
        stream: int | None = None,
        waiter: int | None = None,
        record: int = -1,
    ) -> None:
        """What a wait is for; streams by their numbers on the device. Makes no lane for a stream without work."""
        self._syncs.append((kind, correlation, (device, str(stream)), (device, str(waiter)), record))

    def finish(self) -> Trace:
        """The trace. Rows are sorted, times are counted from the first event."""
        host = np.array(self._host, dtype=np.int64).reshape(-1, 6)
        device = np.array(self._device, dtype=np.int64).reshape(-1, 8)
        self._host, self._device = [], []
        origin = min((int(part[:, 0].min()) for part in (host, device) if len(part)), default=0)
        for part in (host, device):
            part[:, :2] -= origin
        host = host[np.lexsort((host[:, 4], -host[:, 1], host[:, 0], host[:, 3]))]
        device = device[np.lexsort((device[:, 1], device[:, 0]))]
        threads = [
            Thread(process, thread, self._thread_names.get((process, thread), f"thread {thread}"))
            for process, thread in self._threads
        ]
        return Trace(
            self.path,
            self.source,
            list(self._names),
            threads,
            list(self._lanes.values()),
            HostSpans(*_columns(host, 4)),
            Activities(*_columns(device, 4, 7)),
            origin,
            self.device_names,
            self.rank,
            tuple(self.warnings),
            tuple(
                Sync(kind, correlation, self._lane_index.get(lane, -1), self._lane_index.get(waiter, -1), record)
                for kind, correlation, lane, waiter, record in self._syncs
            ),
        )


def _columns(table: Ints, *small: int) -> list[Any]:
    """The columns of a table, each on its own memory; those of `small` as bytes."""
    return [
        np.ascontiguousarray(table[:, i], dtype=np.uint8 if i in small else np.int64) for i in range(table.shape[1])
    ]
