"""Which rank runs but gets nowhere, from what all of them say they do. Pure; owns the rules.

A step may take long: then all ranks wait for their devices, and nobody is stuck. A rank is stuck if it holds up the
others: its host does not come back to the loop, it waits for turns that the leader has sent long ago, or it waits for
a step that others have behind them.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.distributed.link import Beat
from stretto.distributed.patience import HANG_SECONDS

LEADER = 0


def find_stuck(beats: Mapping[int, Beat], limit: float = HANG_SECONDS) -> tuple[int, str] | None:
    """The rank that is stuck, and how (the rest of a sentence that begins with the rank); None if none is."""
    for rank, beat in beats.items():
        if beat.activity == "host" and beat.since_s > limit:
            cause = f"its host has not come back to the loop for {beat.since_s:.0f} s"
            return rank, f"is stuck: {cause}{_where('it', beat)}"
    leader = beats[LEADER]
    for rank, beat in beats.items():
        waits_long = beat.since_s > limit
        if rank != LEADER and beat.activity == "receive" and waits_long and _waits_for_device(leader, limit):
            return rank, f"is stuck: it has not got the leader's turns for {beat.since_s:.0f} s"
        if beat.activity == "device" and waits_long and any(_is_past(other, beat, limit) for other in beats.values()):
            # Or the host has not come to see that it has: a handler of a signal may have come in between.
            cause = f"its device has not finished step {beat.steps} for {beat.since_s:.0f} s, which others have"
            return rank, f"is stuck: {cause}{_where('its host', beat)}"
    return None


def _where(who: str, beat: Beat) -> str:
    return f"; {who} is in {beat.where}" if beat.where else ""


def _waits_for_device(beat: Beat, limit: float) -> bool:
    return beat.activity == "device" and beat.since_s > limit


def _is_past(other: Beat, beat: Beat, limit: float) -> bool:
    """Whether `other` has processed the step that `beat` waits for, long ago."""
    return other.steps > beat.steps and other.activity != "device" and other.since_s > limit
