"""Which line a blocking call is in: what the guard wrote into the trace, in place of the function alone.

A profiler's Python frames know the line at which a function begins. A guard that watches while a tool records
(`stretto trace record`, `profile()`, `STRETTO_NVTX=1`) knows the line of the call, and says it in two ways: the call is
inside an annotation `stretto.sync KIND at FILE:LINE FUNCTION`, or an annotation `stretto.synced at ...` follows it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from stretto.observe.trace import names as words
from stretto.observe.trace.blocking import Blocking
from stretto.observe.trace.model import HostKind, Trace
from stretto.observe.trace.stacks import Stacks

_NEAR_NS = 5_000_000


def with_places(trace: Trace, stacks: Stacks, blocking: list[Blocking]) -> list[Blocking]:
    """`blocking` with the exact places that the trace has; those of the same function and kind lend theirs."""
    places: dict[int, str] = {}
    for i, one in enumerate(blocking):
        for span in stacks.ancestors(one.span):
            place = words.place(stacks.name(span))
            if place and stacks.name(span).startswith(words.SYNC):
                places[i] = _as_frame(place, one.location)
                break
    places |= _heard(trace, stacks, blocking, places)
    lent: dict[tuple[str, str], set[str]] = {}
    for i, known_place in places.items():
        lent.setdefault((blocking[i].location, blocking[i].kind), set()).add(known_place)
    for i, one in enumerate(blocking):
        known = lent.get((one.location, one.kind), set())
        if i not in places and len(known) == 1:
            places[i] = next(iter(known))
    return [replace(one, location=places[i], exact_line=True) if i in places else one for i, one in enumerate(blocking)]


def _heard(trace: Trace, stacks: Stacks, blocking: list[Blocking], places: dict[int, str]) -> dict[int, str]:
    """The places that follow their calls: each belongs to the latest call before it in the same function."""
    found: dict[int, str] = {}
    ends: dict[int, list[tuple[int, int]]] = {}
    for i, one in enumerate(blocking):
        if i not in places:
            ends.setdefault(one.thread, []).append((one.end, i))
    for calls in ends.values():
        calls.sort()
    marks = [i for i, name in enumerate(trace.names) if name.startswith(words.SYNCED)]
    host = trace.host
    for span in np.flatnonzero((host.kind == HostKind.ANNOTATION) & np.isin(host.name, marks)).tolist():
        place = words.place(stacks.name(span))
        start, calls = int(host.start[span]), ends.get(int(host.thread[span]), [])
        at = bisect_right(calls, (start, len(blocking))) - 1
        while place and at >= 0 and calls[at][0] >= start - _NEAR_NS:
            i = calls[at][1]
            if i not in found and _same_function(blocking[i].location, place):
                found[i] = _as_frame(place, blocking[i].location)
                break
            at -= 1
    return found


def _same_function(location: str, place: tuple[str, int, str] | None) -> bool:
    """Whether a place may be in the function of a frame; where frames are missing, anything may."""
    frame = words.frame(location)
    return place is not None and (frame is None or frame[2] == place[2].split(".")[-1])


def _as_frame(place: tuple[str, int, str], location: str) -> str:
    """A place as the trace spells frames: its file as in `location`, if that is the same function."""
    frame = words.frame(location)
    file, line, function = place
    if frame is not None and file.endswith(frame[0]) and frame[2] == function.split(".")[-1]:
        file, function = frame[0], frame[2]
    return f"{file}({line}): {function}"
