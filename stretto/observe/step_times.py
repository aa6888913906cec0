"""What the timeline tells: the times of recent steps, and sums since the start. Owns what each figure means."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

COLUMNS = (
    "index",
    "receive_begin",
    "schedule_begin",
    "launch_begin",
    "launch_end",
    "block_begin",
    "block_end",
    "process_end",
    "device_begin",
    "device_end",
    "bubble_s",
    "window_s",
    "lead_s",
    "launching_s",
)
"""What is kept of a step. Times are seconds on the clock of the device interface (`Device.now`).

receive, schedule, launch: in the turn that launched the step. block: the planned wait for its results. process_end: its
results are used. device: from its first work to the landing of its results; the device's own clock, put on the host's
so that no step begins before its launch or ends after the host has seen it.
"""


@dataclass(frozen=True, slots=True)
class TimelineTotals:
    """Sums since the start, in seconds."""

    steps: int
    busy_s: float
    bubble_s: float
    """Between two steps, while a request was runnable: the device had nothing to do and should have had."""
    runnable_s: float = 0.0
    """Wall time while anything was runnable: from the turn that took the first request in to the end of its last
    step on the device."""
    window_s: float = 0.0
    """Sum of the overlap windows: from the end of a launch to the first block after which nothing would be queued, to
    the next launch or to the step's end on the device, whichever comes first. In it the host works for free."""
    lead_s: float = 0.0
    """Sum of the times that launched steps lay queued before the device came to them: the margin before a bubble."""
    launching_s: float = 0.0
    """Busy time of steps that the host was still launching. A step that is launched kernel by kernel may have had
    nothing to do in it but wait for the next kernel, which no event tells: an upper bound of such waits."""
    receive_s: float = 0.0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    blocked_s: float = 0.0
    """In the planned wait."""
    process_s: float = 0.0

    def since(self, before: TimelineTotals) -> TimelineTotals:
        """The sums from `before`, an earlier state, to this one."""
        return TimelineTotals(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def bubble_share(self) -> float:
        """Share of bubbles in the device time while something was runnable; 0 before the first step."""
        total = self.busy_s + self.bubble_s
        return self.bubble_s / total if total else 0.0

    @property
    def launching_share(self) -> float:
        """Share of `launching_s` in the device time while something was runnable; 0 before the first step."""
        total = self.busy_s + self.bubble_s
        return self.launching_s / total if total else 0.0

    @property
    def occupancy(self) -> float:
        """Device busy / wall time while anything was runnable; 0 before the first step."""
        return min(1.0, self.busy_s / self.runnable_s) if self.runnable_s else 0.0

    @property
    def overlap_window_s(self) -> float:
        """Mean overlap window of a step."""
        return self.window_s / self.steps if self.steps else 0.0

    @property
    def host_s(self) -> float:
        """Host time of the loop's own work, waiting not counted."""
        return self.receive_s + self.schedule_s + self.launch_s + self.process_s


@dataclass(frozen=True, slots=True)
class RecentSteps:
    """Times of some steps in a row, oldest first."""

    table: Floats
    """[steps, COLUMNS]"""

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> Floats:
        """One of COLUMNS, an entry for each step. Raises ValueError for another name."""
        return self.table[:, COLUMNS.index(name)]

    @property
    def bubble_share(self) -> float:
        """Share of bubbles in the device time of these steps."""
        busy = float((self.column("device_end") - self.column("device_begin")).sum())
        bubble = float(self.column("bubble_s").sum())
        return bubble / (busy + bubble) if busy + bubble else 0.0
