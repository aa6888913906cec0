"""The hazards of overlap, one name for each row of the hazard table in design.md, and the error that reports one.

Memory hazards come from the happens-before tracker, through the table at the end of this file; those of the
scheduler's logic come from a monitor of the scheduler. Both raise `HazardError`.
"""

from __future__ import annotations

from enum import StrEnum

from stretto.device.base import Region
from stretto.errors import StrettoError


class Hazard(StrEnum):
    """A way in which overlap goes wrong."""

    raw_plan = "RAW 1: forward reads a plan whose copy has not landed"
    raw_results = "RAW 2: the host reads results that have not landed"
    war_staging = "WAR: a staging buffer is refilled while an earlier copy still reads it"
    war_pages_and_slots = "WAR: pages or a slot change owner while a launched step still uses them"
    state_one_step_late = "a finished request is reported, counted or freed again"
    abort_in_flight = "an aborted request is released while its step runs"
    token_feedback = "a step reads a token that no step has sampled yet"
    eviction = "the prefix cache evicts pages in use"
    finish_judged_late = "a step is judged against counters that a later step has advanced"
    history_one_step_late = "host history lacks the newest token"
    deferred_release_against_preemption = "a request is preempted although pages about to be released cover the need"
    retiring_in_admission_counts = "requests that can produce no more count against admission"
    first_token_kept_waiting = "results that are there wait for the next step to be scheduled"


class Conflict(StrEnum):
    """What is wrong between two uses of one region."""

    read_before_write = "reads, but nothing orders it after the write"
    write_before_read = "writes, but nothing orders it after the read"
    write_before_write = "writes, but nothing orders it after the write"
    never_written = "reads what was never written"
    used_after_release = "uses what was released"
    released_in_flight = "is released, but the host does not know the end of the use"
    released_twice = "is released a second time"
    taken_twice = "is taken while it has an owner"


class HazardError(StrettoError):
    """A hazard was met.

    Attributes:
        hazard: the row of the hazard table; None for a conflict on a region of which the table says nothing.
        region: the region, for a memory hazard.
        conflict: what is wrong between its uses, for a memory hazard.
    """

    def __init__(
        self, hazard: Hazard | None, message: str, *, region: Region | None = None, conflict: Conflict | None = None
    ) -> None:
        title = "unnamed hazard" if hazard is None else f"hazard {hazard.name} ({hazard.value})"
        super().__init__(f"{title}: {message}")
        self.hazard = hazard
        self.region = region
        self.conflict = conflict


def hazard_of(kind: str, conflict: Conflict) -> Hazard | None:
    """The hazard that a conflict on a region of this kind is, None if the table does not know the kind."""
    return _SPECIAL.get((kind, conflict)) or _BY_KIND.get(kind)


_BY_KIND = {
    "staging.host": Hazard.war_staging,
    "staging.device": Hazard.war_staging,
    "results.device": Hazard.raw_results,
    "results.host": Hazard.raw_results,
    "scored.device": Hazard.raw_results,
    "scored.host": Hazard.raw_results,
    "page": Hazard.war_pages_and_slots,
    "row": Hazard.war_pages_and_slots,
    "token": Hazard.token_feedback,
    "history": Hazard.history_one_step_late,
}

_SPECIAL = {
    # A staging buffer before its plan is there is RAW; after that, every conflict is a refill that comes too early.
    ("staging.host", Conflict.never_written): Hazard.raw_plan,
    ("staging.host", Conflict.read_before_write): Hazard.raw_plan,
    ("staging.device", Conflict.never_written): Hazard.raw_plan,
    ("staging.device", Conflict.read_before_write): Hazard.raw_plan,
    # What a plan puts into a slot's row has to land like the plan itself.
    ("row", Conflict.read_before_write): Hazard.raw_plan,
}
