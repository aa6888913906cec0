"""Which waits for events belong to a loop that overlaps: judged by what it would gain without them.

An event wait is how a good loop takes the results of an earlier step, and how a bad one waits for the step that it has
just launched. Where the device had nothing left afterwards, the replay decides: a wait without which nothing would be
faster is harmless.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.observe.trace.blocking import Blocking
from stretto.observe.trace.kinds import Severity
from stretto.observe.trace.replay import Replay, Without

LEAST_SHARE = 0.005
"""Of the trace: what gains less costs nothing."""
_MOST_REPLAYS = 8


def settle_event_waits(blocking: list[Blocking], replay: Replay) -> list[Blocking]:
    """`blocking` with the event waits that gain nothing as OVERLAPPED; place by place, the longest first."""
    places: dict[tuple[int, str], list[int]] = {}
    for i, one in enumerate(blocking):
        if one.kind == "event-sync" and one.severity is Severity.LOST:
            places.setdefault((one.thread, one.location), []).append(i)
    longest = sorted(places.values(), key=lambda found: -sum(blocking[i].length for i in found))
    settled = list(blocking)
    for found in longest[:_MOST_REPLAYS]:
        if replay.gain(Without(frozenset(found))) < LEAST_SHARE * replay.recorded:
            for i in found:
                settled[i] = replace(blocking[i], severity=Severity.OVERLAPPED)
    return settled
