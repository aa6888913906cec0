"""Did the overlap hold, and if not, what broke it: one judgement from the timeline and the guard."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.observe.step_times import TimelineTotals
from stretto.observe.sync_guard import SyncGuard


@dataclass(frozen=True, slots=True)
class Verdict:
    """`holds`, or why not, worst first: a hidden sync by its line, a late host by its longest phase."""

    reasons: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """The device never waited for the host, and the host never for the device but as planned."""
        return not self.reasons

    def __str__(self) -> str:
        return "the overlap holds" if self.holds else "; ".join(self.reasons)


def judge(totals: TimelineTotals, guard: SyncGuard | None = None, *, most_bubble: float = 0.0) -> Verdict:
    """Judge a run. `most_bubble`: share of bubbles in the device time that is let pass."""
    reasons = [str(finding) for finding in guard.findings()] if guard is not None else []
    if totals.bubble_share > most_bubble:
        reasons.append(_late_host(totals))
    return Verdict(tuple(reasons))


def _late_host(totals: TimelineTotals) -> str:
    phases = {
        "receive": totals.receive_s,
        "schedule": totals.schedule_s,
        "launch": totals.launch_s,
        "process": totals.process_s,
    }
    longest = max(phases, key=lambda name: phases[name])
    each = 1e3 / max(totals.steps, 1)
    return (
        f"the device waited for the host {100 * totals.bubble_share:.2f} % of its time: a step takes it "
        f"{totals.busy_s * each:.3f} ms and the host {totals.host_s * each:.3f} ms, of which {longest} "
        f"{phases[longest] * each:.3f} ms"
    )
