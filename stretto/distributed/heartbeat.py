"""What a rank tells the others about its loop, in every heartbeat."""

from __future__ import annotations

from stretto.distributed.link import Beat
from stretto.observe.timeline import LAUNCH, OTHER, PROCESS, RECEIVE, SCHEDULE, WAIT, Timeline
from stretto.observe.whereabouts import whereabouts

_ACTIVITIES = {OTHER: "outside", RECEIVE: "receive", WAIT: "device"} | dict.fromkeys(
    (SCHEDULE, LAUNCH, PROCESS), "host"
)
_LONG_S = 1.0
"""From then on a host that does not wait for a turn is asked where it is."""


def beat_of(phase: str, timeline: Timeline, thread: int | None) -> Beat:
    """What the loop of `timeline` does, in this phase of the rank's life; `thread`: the one a turn is under way in."""
    loop_phase, since_s = timeline.phase()
    activity = "outside" if thread is None else _ACTIVITIES[loop_phase]
    sums = timeline.totals()
    return Beat(
        phase,
        activity,
        sums.steps,
        since_s,
        where="" if thread is None or activity == "receive" or since_s < _LONG_S else whereabouts(thread),
        busy_s=sums.busy_s,
        bubble_s=sums.bubble_s,
        receive_s=sums.receive_s,
    )
