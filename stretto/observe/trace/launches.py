"""Which call of which thread launched which activity, and how far ahead of the device the host was.

Owns the pairing by correlation, the correction of the device's clock that the pairs allow, and the streams that a trace
without a device gets from its host threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stretto.observe.trace.model import Activities, DeviceKind, HostKind, Ints, Lane, Trace
from stretto.observe.trace.names import LAUNCH, STEP, WORK, number

_CLOCK_TOLERANCE_NS = 1_000


@dataclass(frozen=True, slots=True)
class Launches:
    """For each activity of a trace, by row."""

    span: Ints
    """The host span that launched it; -1 where none is known."""
    start: Ints
    """When that span began; the activity's own start where none is known."""
    end: Ints
    thread: Ints
    """The launching thread; -1 where not known."""


def pair(trace: Trace) -> tuple[Trace, Launches]:
    """The trace with its device's clock corrected, and who launched what in it."""
    if len(trace.device):
        span = _by_correlation(trace)
        trace = _with_right_clock(trace, span)
    else:
        trace = _with_threads_as_streams(trace)
        span = _by_step(trace)
    # Correcting the clock may have changed the order of rows; the pairing is cheap enough to be made again.
    span = _by_correlation(trace) if (span >= 0).any() and (trace.device.correlation >= 0).any() else span
    known = span >= 0
    index = np.maximum(span, 0)
    if not len(trace.host):
        return trace, Launches(span, trace.device.start.copy(), trace.device.start.copy(), span.copy())
    return trace, Launches(
        span,
        np.where(known, trace.host.start[index], trace.device.start),
        np.where(known, trace.host.end[index], trace.device.start),
        np.where(known, trace.host.thread[index], -1),
    )


def _by_correlation(trace: Trace) -> Ints:
    """The launching call of each activity: the one of the same correlation."""
    host, device = trace.host, trace.device
    calls = np.flatnonzero((host.kind == HostKind.CALL) & (host.correlation >= 0))
    span = np.full(len(device), -1, dtype=np.int64)
    if not len(calls) or not len(device):
        return span
    if len(np.unique(host.correlation[calls])) == len(calls):
        return _match(trace, calls, np.arange(len(device)), span)
    # Processes count on their own, so a device's work is matched with that process which explains most of it.
    process = np.array([hash(thread.process) for thread in trace.threads])[host.thread[calls]]
    devices = np.array(_device_index(trace))[device.lane]
    for one in np.unique(devices):
        rows = np.flatnonzero(devices == one)
        matches = [_match(trace, calls[process == each], rows, span) for each in np.unique(process)]
        span = max(matches, key=lambda match: _plausible(trace, match, rows))
    missing = np.flatnonzero(span < 0)
    return _match(trace, calls, missing, span) if len(missing) else span


def _match(trace: Trace, calls: Ints, rows: Ints, span: Ints) -> Ints:
    """`span` with the launching call of `rows` among `calls`: the same correlation; of several the latest before."""
    host, device = trace.host, trace.device
    calls = calls[np.lexsort((host.start[calls], host.correlation[calls]))]
    keys = host.correlation[calls]
    wanted = device.correlation[rows]
    if len(np.unique(keys)) == len(keys):
        at = np.searchsorted(keys, wanted)
    else:
        at = _latest_before(keys, host.start[calls], wanted, device.start[rows])
    at = np.minimum(at, len(keys) - 1)
    found = (keys[at] == wanted) & (wanted >= 0)
    span = span.copy()
    span[rows[found]] = calls[at[found]]
    return span


def _plausible(trace: Trace, span: Ints, rows: Ints) -> tuple[int, float]:
    """How well launches explain activities: how many come before, and how closely."""
    rows = rows[span[rows] >= 0]
    delay = trace.device.start[rows] - trace.host.start[span[rows]]
    good = delay >= -_CLOCK_TOLERANCE_NS
    return int(good.sum()), -float(np.median(delay[good])) if good.any() else 0.0


def _latest_before(keys: Ints, starts: Ints, wanted: Ints, times: Ints) -> Ints:
    """For each wanted key the last row with that key that starts before the time, else the first with that key."""
    merged = np.concatenate([keys, wanted])
    order = np.lexsort(
        (np.concatenate([np.zeros(len(keys)), np.ones(len(wanted))]), np.concatenate([starts, times]), merged)
    )
    is_row = order < len(keys)
    position = np.cumsum(is_row) - 1
    result = np.zeros(len(merged), dtype=np.int64)
    result[order] = position
    at = np.maximum(result[len(keys) :], 0)
    first = np.searchsorted(keys, wanted)
    return np.where(keys[at] == wanted, at, first)


def _with_right_clock(trace: Trace, span: Ints) -> Trace:
    """Nothing starts before it is launched: where a device's clock says so, it is shifted.

    The shift may vary over the trace (drift): it is what the pairs of each sixteenth of it demand, interpolated.
    """
    device = trace.device
    devices = np.array([int(_device_index(trace)[lane]) for lane in range(len(trace.lanes))])[device.lane]
    known = span >= 0
    shift = np.zeros(len(device), dtype=np.int64)
    warnings = list(trace.warnings)
    for number_ in np.unique(devices):
        rows = np.flatnonzero((devices == number_) & known)
        if not len(rows):
            continue
        early = trace.host.start[span[rows]] - device.start[rows]
        if early.max() <= _CLOCK_TOLERANCE_NS:
            continue
        parts = np.array_split(np.arange(len(rows)), min(16, len(rows)))
        worst = np.array([int(early[part].max()) for part in parts])
        middle = np.array([float(device.start[rows[part]].mean()) for part in parts])
        mine = devices == number_
        moved = np.interp(device.start[mine].astype(np.float64), middle, np.maximum(worst, 0).astype(np.float64))
        shift[mine] = np.ceil(moved).astype(np.int64)
        warnings.append(
            f"the clock of device {trace.lanes[int(device.lane[rows[0]])].device} ran up to "
            f"{early.max() / 1000:.1f} us ahead of the host's; corrected"
        )
    if not shift.any():
        return trace
    start, end = device.start + shift, device.end + shift
    order = np.lexsort((end, start))
    columns = {
        name: getattr(device, name)[order] for name in ("name", "lane", "kind", "correlation", "bytes", "pageable")
    }
    return replace(trace, device=Activities(start[order], end[order], **columns), warnings=tuple(warnings))


def _device_index(trace: Trace) -> list[int]:
    names = sorted({lane.device for lane in trace.lanes})
    return [names.index(lane.device) for lane in trace.lanes]


def _with_threads_as_streams(trace: Trace) -> Trace:
    """A trace without a device: the threads that compute are its streams.

    Work that is annotated as a stream's (`stretto.work`) is that stream's; without such annotations, the outermost
    operators of each thread are its activities.
    """
    host = trace.host
    names = trace.names
    annotated = {i: name for i, name in enumerate(names) if name.startswith(WORK)}
    if annotated:
        rows = np.flatnonzero((host.kind == HostKind.ANNOTATION) & np.isin(host.name, list(annotated)))
        streams = {i: (name.removeprefix(WORK).split() or ["?"])[0] for i, name in annotated.items()}
        keys = [(streams[int(host.name[row])], int(host.thread[row])) for row in rows]
    else:
        rows = _outermost(trace)
        keys = [("", thread) for thread in host.thread[rows].tolist()]
    lanes: dict[tuple[str, int], Lane] = {}
    for stream, thread in keys:
        if (stream, thread) not in lanes:
            name = f"stream {stream}" if stream else trace.threads[thread].name
            lanes[stream, thread] = Lane("cpu", stream or trace.threads[thread].thread, name, thread)
    index = {key: i for i, key in enumerate(lanes)}
    order = np.lexsort((host.end[rows], host.start[rows]))
    rows = rows[order]
    lane = np.array([index[keys[i]] for i in order], dtype=np.int64)
    n = len(rows)
    device = Activities(
        host.start[rows],
        host.end[rows],
        host.name[rows],
        lane,
        np.full(n, DeviceKind.WORK, dtype=np.uint8),
        np.full(n, -1, dtype=np.int64),
        np.full(n, -1, dtype=np.int64),
        np.zeros(n, dtype=np.uint8),
    )
    return replace(trace, device=device, lanes=list(lanes.values()))


def _outermost(trace: Trace) -> Ints:
    """Operators that are in no other operator, of every thread."""
    host = trace.host
    rows = np.flatnonzero(host.kind == HostKind.OPERATOR)
    keep = []
    thread, reach = -1, -1
    for row, owner, start, end in zip(
        rows.tolist(), host.thread[rows].tolist(), host.start[rows].tolist(), host.end[rows].tolist(), strict=True
    ):
        if owner != thread:
            thread, reach = owner, -1
        if start >= reach:
            keep.append(row)
            reach = end
    return np.array(keep, dtype=np.int64)


def _by_step(trace: Trace) -> Ints:
    """Work that names its step was launched in the `stretto.launch` of that step."""
    host = trace.host
    span = np.full(len(trace.device), -1, dtype=np.int64)
    steps = [(int(row), number(trace.names[host.name[row]])) for row in _named(trace, STEP)]
    launches = _named(trace, LAUNCH)
    if not steps or not len(launches):
        return span
    of_step: dict[int | None, int] = {}
    for row, step in steps:
        inside = launches[
            (host.thread[launches] == host.thread[row])
            & (host.start[launches] >= host.start[row])
            & (host.end[launches] <= host.end[row])
        ]
        if len(inside):
            of_step[step] = int(inside[-1])  # of nested ones the innermost
    for i, name in enumerate(trace.device.name.tolist()):
        words = trace.names[name].removeprefix(WORK).split()
        if trace.names[name].startswith(WORK) and len(words) > 1:
            span[i] = of_step.get(number(words[-1]), -1)
    return span


def _named(trace: Trace, prefix: str) -> Ints:
    """Annotations whose name begins with a prefix, in order of time."""
    wanted = [i for i, name in enumerate(trace.names) if name == prefix or name.startswith(prefix + " ")]
    host = trace.host
    rows = np.flatnonzero((host.kind == HostKind.ANNOTATION) & np.isin(host.name, wanted))
    return rows[np.argsort(host.start[rows], kind="stable")]
