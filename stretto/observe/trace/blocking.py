"""Finds the calls in which the host waits for the device: what kind, how bad, where in the program.

Owns their recognition and the two severities of a hidden sync. A read of results inside a step is `lost`; waiting for
an upload only delays the next launch and is `shortened`. A wait that leaves work queued on the device is as it should
be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.observe.trace import names as words
from stretto.observe.trace.kinds import Severity
from stretto.observe.trace.known_waits import KnownWaits
from stretto.observe.trace.launches import Launches
from stretto.observe.trace.model import DeviceKind, HostKind, Ints, Trace
from stretto.observe.trace.stacks import Stacks

_DRAINED_NS = 2_000
_LONG_CALL_NS = 20_000
_OPERATORS = {
    "aten::is_nonzero": "truth-value",
    "aten::nonzero": "nonzero",
    "aten::nonzero_numpy": "nonzero",
    "aten::masked_select": "nonzero",
    "aten::_unique2": "nonzero",
    "aten::unique_dim": "nonzero",
    "aten::unique_consecutive": "nonzero",
    "aten::argwhere": "nonzero",
    "aten::equal": "compare",
    "aten::allclose": "compare",
    "aten::repeat_interleave": "repeat-interleave",
    "aten::item": "item",
    "aten::_local_scalar_dense": "item",
}
_RANKS = {name: rank for rank, name in enumerate(_OPERATORS)}  # of nested ones, the first here says most
_OPERATOR, _PYTHON_FRAME = int(HostKind.OPERATOR), int(HostKind.PYTHON)
_PYTHON = {
    "tolist": "tolist",
    "item": "item",
    "cpu": "to-host",
    "numpy": "to-host",
    "nonzero": "nonzero",
    "__bool__": "truth-value",
}
_NATIVE = {
    "THPVariable_bool": "truth-value",
    "is_nonzero": "truth-value",
    "THPVariable_tolist": "tolist",
    "tensor_to_list": "tolist",
    "masked_select": "nonzero",
    "nonzero": "nonzero",
    "THPVariable_equal": "compare",
    "repeat_interleave": "repeat-interleave",
    "THPVariable_item": "item",
    "_local_scalar_dense": "item",
}
"""Parts of the names of PyTorch's own functions in a call chain; of nested ones, the first here says most."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """One call in which the host waited, or could have."""

    span: int
    """The host span of the waiting call."""
    start: int
    """Where the operation that waits began; for a copy that is followed by its sync, the copy's begin."""
    end: int
    thread: int
    kind: str
    severity: Severity
    call: str
    location: str
    bytes: int
    awaited: int
    """The activity whose end ended the wait, as a row of `Trace.device`; -1 if there is none."""
    drained: bool
    """Nothing was left for the device to do when the wait was over."""
    exact_line: bool = False
    """`location` has the line of the call, not that at which its function begins."""
    ready: bool = False
    """An event that had happened before it was waited for: the call took no more than its own time."""

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_hidden(self) -> bool:
        """It hurts, and nobody planned it."""
        return self.severity in (Severity.LOST, Severity.SHORTENED)


def find_blocking(trace: Trace, launches: Launches, stacks: Stacks, rows: Ints) -> list[Blocking]:
    """All blocking calls that concern the activities `rows` of one device, in order of time."""
    finder = _Finder(trace, launches, stacks, rows)
    found = finder.calls() + finder.annotated()
    return sorted(found, key=lambda blocking: (blocking.start, blocking.end))


class _Finder:
    def __init__(self, trace: Trace, launches: Launches, stacks: Stacks, rows: Ints) -> None:
        self._trace, self._host, self._stacks = trace, trace.host, stacks
        self._launches = launches
        device = trace.device
        order = rows[np.argsort(launches.start[rows], kind="stable")]
        self._launched = launches.start[order]
        self._reach = np.maximum.accumulate(device.end[order]) if len(order) else device.end[:0]
        by_end = rows[np.argsort(device.end[rows], kind="stable")]
        self._ends, self._by_end = device.end[by_end], by_end
        self._last_start = int(device.start[rows].max()) if len(rows) else 0
        self._threads = set(launches.thread[rows].tolist()) - {-1}
        copies = rows[np.isin(device.kind[rows], (DeviceKind.COPY_TO_DEVICE, DeviceKind.COPY_TO_HOST))]
        self._known = KnownWaits(trace, rows)
        self._copy_of_span = {int(span): int(row) for span, row in zip(launches.span[copies], copies, strict=True)}

    def calls(self) -> list[Blocking]:
        """Runtime calls that wait."""
        found: list[Blocking] = []
        host, names = self._host, self._trace.names
        kind_of_name = {i: _call_class(name) for i, name in enumerate(names)}
        wanted = [i for i, kind in kind_of_name.items() if kind]
        rows = np.flatnonzero((host.kind == HostKind.CALL) & np.isin(host.name, wanted))
        latest_copy: dict[int, int] = {}  # thread -> span of its last copy
        for span in rows.tolist():
            thread, kind = int(host.thread[span]), kind_of_name[int(host.name[span])]
            if self._threads and thread not in self._threads:
                continue  # it launches nothing here: the thread of another device, or of another process
            start, end = int(host.start[span]), int(host.end[span])
            if self._stacks.parent[span] >= 0 and host.kind[self._stacks.parent[span]] == HostKind.CALL:
                continue  # the driver's half of a runtime call
            if kind == "copy":
                latest_copy[thread] = span
                row = self._copy_of_span.get(span, -1)
                if row >= 0 and self._trace.device.pageable[row] and end - start >= _LONG_CALL_NS // 4:
                    found.append(self._copy(span, span, row))
                continue
            copy = latest_copy.get(thread, -1)
            if kind == "sync" and copy >= 0 and self._belongs(copy, span):
                latest_copy.pop(thread)
                if found and found[-1].span == copy:
                    found.pop()
                found.append(self._copy(copy, span, self._copy_of_span.get(copy, -1)))
            elif kind == "blocking-copy":
                found.append(self._copy(span, span, self._copy_of_span.get(span, -1)))
            elif kind == "sync":
                what = words.waits_for(names[host.name[span]])
                found.append(self._plain(span, start, end, self._named(span, f"{what}-sync")))
            elif kind == "allocation" and (end - start >= _LONG_CALL_NS):
                found.append(self._plain(span, start, end, "allocation"))
        return found

    def annotated(self) -> list[Blocking]:
        """Waits that Stretto annotated, where no runtime call inside tells more."""
        host, names = self._host, self._trace.names
        wanted = [i for i, name in enumerate(names) if name == words.WAIT or name.startswith(words.SYNC)]
        found = []
        for span in np.flatnonzero((host.kind == HostKind.ANNOTATION) & np.isin(host.name, wanted)).tolist():
            name = names[host.name[span]]
            start, end = int(host.start[span]), int(host.end[span])
            if self._has_call(span):
                continue
            kind = "event-sync" if name == words.WAIT else words.sync_kind(name)
            found.append(self._plain(span, start, end, kind))
        return found

    def _has_call(self, span: int) -> bool:
        host = self._host
        a = span + 1
        while a < len(host) and host.thread[a] == host.thread[span] and host.start[a] < host.end[span]:
            if host.kind[a] == HostKind.CALL and _call_class(self._trace.names[host.name[a]]):
                return True
            a += 1
        return False

    def _belongs(self, copy: int, span: int) -> bool:
        """A sync that waits for the copy just issued: in the same operator, or right behind it."""
        host = self._host
        if not 0 <= host.start[span] - host.end[copy] <= 50_000:
            return False
        if words.waits_for(self._trace.names[host.name[span]]) == "event":
            return False
        same = self._stacks.parent[copy] == self._stacks.parent[span]
        operator = self._stacks.parent[span]
        if operator >= 0 and host.kind[operator] == HostKind.OPERATOR:
            return bool(same)
        return bool(same and host.start[span] - host.end[copy] <= 10_000)

    def _copy(self, copy: int, span: int, row: int) -> Blocking:
        device, host = self._trace.device, self._host
        direction = DeviceKind(device.kind[row]) if row >= 0 else _direction(self._trace.names[host.name[copy]])
        if direction is DeviceKind.COPY_TO_DEVICE:
            kind = "pageable-upload" if row < 0 or device.pageable[row] else "upload"
        else:
            kind = self._named(span, "to-host")
        size = int(device.bytes[row]) if row >= 0 else -1
        return self._plain(span, int(host.start[copy]), int(host.end[span]), kind, size)

    def _named(self, span: int, otherwise: str) -> str:
        """The kind by the operator or the Python method around a call."""
        kind, rank, native = "", len(_OPERATORS), len(_NATIVE)
        for around in self._stacks.ancestors(span):
            name, what = self._stacks.name(around), self._stacks.kind(around)
            if what == _OPERATOR:
                place = _RANKS.get(name, rank)
                if place < rank:
                    kind, rank = _OPERATORS[name], place
            elif what == _PYTHON_FRAME:
                if name.startswith("<built-in method ") and not kind:
                    kind = _PYTHON.get(name.split()[2], "")
                if words.is_user_frame(name):
                    break
                if name.endswith("]"):
                    native = min([native, *(i for i, part in enumerate(_NATIVE) if part in name)])
        return kind or (list(_NATIVE.values())[native] if native < len(_NATIVE) else otherwise)

    def _plain(self, span: int, start: int, end: int, kind: str, size: int = -1) -> Blocking:
        waiting_from = int(self._host.start[span])
        before = int(np.searchsorted(self._launched, waiting_from, side="right"))
        reach = int(self._reach[before - 1]) if before else 0
        last = int(np.searchsorted(self._ends, end + _DRAINED_NS, side="right")) - 1
        awaited = int(self._by_end[last]) if last >= 0 and self._ends[last] >= waiting_from else -1
        ready = False
        if kind == "event-sync":
            awaited, ready = self._awaited(span, awaited)
        stack = self._stacks.ancestors(span)
        names = self._trace.names
        drained = reach <= end + _DRAINED_NS
        if any(self._stacks.name(i) == words.WAIT for i in stack):
            severity = Severity.PLANNED
        elif end >= self._last_start or not before:
            severity = Severity.OUTSIDE
        elif kind in ("pageable-upload", "upload"):
            severity = Severity.SHORTENED
        elif not drained or ready:
            severity = Severity.OVERLAPPED
        else:
            severity = Severity.SHORTENED if kind == "allocation" else Severity.LOST
        return Blocking(
            span,
            start,
            end,
            int(self._host.thread[span]),
            kind,
            severity,
            names[self._host.name[span]],
            self._stacks.location(span),
            size,
            awaited,
            drained,
            ready=ready,
        )

    def _awaited(self, span: int, by_time: int) -> tuple[int, bool]:
        """The activity that an event wait is for, and whether it was over before the wait began.

        Known for sure in some recordings. Else `by_time`, the last that ended within the wait; if none did, the event
        had happened.
        """
        correlation = int(self._host.correlation[span])
        known = self._known.awaited(correlation) if correlation >= 0 else None
        if known is None:
            return by_time, by_time < 0
        return known, known < 0 or bool(self._trace.device.end[known] <= self._host.start[span])


def _call_class(name: str) -> str:
    if words.is_synchronize(name):
        return "sync"
    if words.is_blocking_copy(name):
        return "blocking-copy" if words.is_copy(name) else ""
    if words.is_copy(name):
        return "copy"
    return "allocation" if words.is_allocation(name) else ""


def _direction(call: str) -> DeviceKind:
    return DeviceKind.COPY_TO_DEVICE if "HtoD" in call else DeviceKind.COPY_TO_HOST
