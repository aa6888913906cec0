"""Finds the steps of a loop in a trace: by annotations, by graph launches, or by the period of the kernel stream.

Owns the choice of the method and the boundaries. A step is the work of one turn of the program's loop: it begins, for
the host, when its launching begins, and lasts until the next one begins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stretto.observe.trace.launches import Launches
from stretto.observe.trace.model import HostKind, Ints, Trace
from stretto.observe.trace.names import STEP, WORK, family, is_graph_launch, number

_LEAST = 3  # repetitions that make a period
_SHARE = 0.6  # of the launches that steps must contain


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in order; `host_start[i]` to `host_end[i]` is the host's part of step i."""

    method: str
    labels: list[str]
    host_start: Ints
    host_end: Ints
    of_activity: Ints
    """For each given activity the index of its step; -1 for what comes before the first."""
    device_start: Ints
    """First begin of an activity of the step; that of the following step where it has none."""
    device_end: Ints
    """Where the device's part ends: the begin of the next step's, for the last step the end of its last activity."""

    def __len__(self) -> int:
        return len(self.labels)


def find_steps(trace: Trace, launches: Launches, rows: Ints, pattern: str | None = None) -> Steps:
    """The steps of the activities `rows` (of one device).

    `pattern`, a regular expression, names the annotations to use. Raises ValueError if no annotation matches it.
    """
    if pattern is not None:
        marked = _matching(trace, pattern)
        if not len(marked):
            raise ValueError(f"no annotation matches {pattern!r}; found: {', '.join(_families(trace)) or 'none'}")
        return _from_marks(trace, launches, rows, marked, f"annotations that match {pattern!r}")
    for name in (STEP, "ProfilerStep"):
        marked = _matching(trace, rf"^{re.escape(name)}[ #]?\d+$")
        if len(marked) >= 2:
            return _from_marks(trace, launches, rows, marked, f"annotations {name}")
    marked, name = _best_annotation(trace, launches, rows)
    if len(marked):
        return _from_marks(trace, launches, rows, marked, f"annotations {name!r}")
    begins = _graph_launches(trace, launches, rows)
    if len(begins):
        return _from_activities(trace, launches, rows, begins, "graph launches")
    begins = anchors(trace.device.name[rows], _idle_before(trace, rows))
    if len(begins):
        return _from_activities(trace, launches, rows, begins, "the period of the kernels")
    return _from_activities(trace, launches, rows, np.array([0]), "none found: the whole trace is taken as one")


def anchors(names: Ints, idle_before: Ints) -> Ints:
    """Positions at which each repetition of a periodic sequence begins; empty if it has no period.

    A name that occurs once per repetition returns at regular distances. Those that return most seldom mark the longest
    period, that of the step rather than of its layers; among them the one with the most idle time before it is chosen,
    as that is where a loop turns.
    """
    n = len(names)
    order = np.argsort(names, kind="stable")
    bounds = np.flatnonzero(np.append(True, np.diff(names[order]) != 0))
    candidates: dict[int, list[Ints]] = {}
    for a, b in zip(bounds, np.append(bounds[1:], n), strict=True):
        places = order[a:b]
        if len(places) >= _LEAST and _regular(places, n):
            candidates.setdefault(len(places), []).append(places)
    if not candidates:
        return np.array([], dtype=np.int64)
    # One name may recur by chance or for another reason (logging every 100 steps): two of the same count rarely do.
    counts = sorted(count for count in candidates if len(candidates[count]) > 1) or sorted(candidates)
    found = [places for count in (counts[0], counts[0] + 1) for places in candidates.get(count, [])]
    chosen: Ints = max(found, key=lambda places: (float(np.median(idle_before[places])), -int(places[0])))
    return chosen


def _regular(places: Ints, n: int) -> bool:
    distance = np.diff(places)
    middle = float(np.median(distance))
    near = np.abs(distance - middle) <= max(1.0, 0.1 * middle)
    return bool(near.mean() >= 0.7 and (places[-1] - places[0] + middle) / n >= _SHARE)


def _idle_before(trace: Trace, rows: Ints) -> Ints:
    reach = np.maximum.accumulate(trace.device.end[rows])
    return np.append(0, np.maximum(trace.device.start[rows][1:] - reach[:-1], 0))


def _matching(trace: Trace, pattern: str) -> Ints:
    try:
        wanted = [i for i, name in enumerate(trace.names) if re.search(pattern, name)]
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    host = trace.host
    rows = np.flatnonzero((host.kind == HostKind.ANNOTATION) & np.isin(host.name, wanted))
    rows = rows[np.argsort(host.start[rows], kind="stable")]
    if not len(rows):
        return rows
    # Ranks of one process, or several processes, mark the same steps: those of the first thread that does are taken.
    mine: Ints = rows[host.thread[rows] == host.thread[rows[0]]]
    return mine


def _families(trace: Trace) -> list[str]:
    used = np.unique(trace.host.name[trace.host.kind == HostKind.ANNOTATION])
    return sorted({family(trace.names[i]) for i in used.tolist()})[:20]


def _best_annotation(trace: Trace, launches: Launches, rows: Ints) -> tuple[Ints, str]:
    """The seldomest repeated annotation around most launches."""
    host = trace.host
    spans = np.flatnonzero(host.kind == HostKind.ANNOTATION)
    grouped: dict[tuple[str, int], list[int]] = {}
    for span in spans.tolist():
        name = trace.names[host.name[span]]
        if not name.startswith(WORK):
            grouped.setdefault((family(name), int(host.thread[span])), []).append(span)
    times = np.sort(launches.start[rows])
    best: tuple[int, str, Ints] | None = None
    for (name, _), members in grouped.items():
        marked = np.array(members)
        if len(marked) < _LEAST or (host.start[marked][1:] < host.end[marked][:-1]).any():
            continue
        inside = np.searchsorted(times, host.end[marked]) - np.searchsorted(times, host.start[marked])
        share = inside.sum() / max(1, len(times))
        if share >= _SHARE and (inside > 0).mean() >= 0.5 and (best is None or len(marked) < best[0]):
            best = (len(marked), name, marked)
    return (best[2], best[1]) if best else (np.array([], dtype=np.int64), "")


def _graph_launches(trace: Trace, launches: Launches, rows: Ints) -> Ints:
    """Positions in `rows` of the first activities of the graph launches that begin steps."""
    graph_names = [i for i, name in enumerate(trace.names) if is_graph_launch(name)]
    span = launches.span[rows]
    is_graph = (span >= 0) & np.isin(trace.host.name[np.maximum(span, 0)], graph_names)
    places = np.flatnonzero(is_graph)
    if not len(places):
        return places
    calls, first, sizes = np.unique(span[places], return_index=True, return_counts=True)
    if len(calls) < _LEAST:
        return places[:0]
    heads = places[first]
    by_time = np.argsort(trace.host.start[calls], kind="stable")
    heads, sizes = heads[by_time], sizes[by_time]
    # A graph is told by its first kernel and its size; a step may launch several.
    identity = np.unique(np.stack([trace.device.name[rows][heads], sizes]), axis=1, return_inverse=True)[1].reshape(-1)
    found = anchors(identity, _idle_before(trace, rows)[heads])
    if not len(found) or float(np.median(np.diff(found))) <= 1:
        return heads
    return heads[found]


def _from_marks(trace: Trace, launches: Launches, rows: Ints, marked: Ints, method: str) -> Steps:
    host = trace.host
    start = host.start[marked]
    labels = []
    for i, span in enumerate(marked.tolist()):
        found = number(trace.names[host.name[span]])
        labels.append(str(i if found is None else found))
    if len(set(labels)) < len(labels):
        labels = [str(i) for i in range(len(labels))]
    end = np.append(start[1:], max(int(host.end[marked[-1]]), int(start[-1])))
    return _complete(trace, launches, rows, method, labels, start, end)


def _from_activities(trace: Trace, launches: Launches, rows: Ints, begins: Ints, method: str) -> Steps:
    start = np.sort(launches.start[rows][begins])
    reach = max(int(launches.end[rows].max()), int(start[-1])) if len(rows) else int(start[-1])
    labels = [str(i) for i in range(len(start))]
    return _complete(trace, launches, rows, method, labels, start, np.append(start[1:], reach))


def _complete(
    trace: Trace, launches: Launches, rows: Ints, method: str, labels: list[str], start: Ints, end: Ints
) -> Steps:
    of_activity = np.searchsorted(start, launches.start[rows], side="right") - 1
    device = trace.device
    n = len(start)
    far = np.iinfo(np.int64).max
    first = np.full(n, far)
    mine = of_activity >= 0
    np.minimum.at(first, of_activity[mine], device.start[rows][mine])
    reach = int(device.end[rows].max()) if len(rows) else int(end[-1])
    # A step without work, and work that overtakes that of an earlier step, leave no negative lengths.
    first = np.minimum.accumulate(np.append(first, reach)[::-1])[::-1]
    return Steps(method, labels, start, end, of_activity, first[:-1], first[1:])
