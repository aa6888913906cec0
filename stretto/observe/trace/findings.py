"""What costs time, worst first: gaps and blocking calls grouped by cause and place, with what each would gain.

Owns the grouping and the order. A hidden sync is listed even if it costs nothing now: it will, on a faster host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.observe.trace.blocking import Blocking
from stretto.observe.trace.gaps import Gap
from stretto.observe.trace.kinds import BLOCKING_WORDS, CAUSE_REMEDIES, CAUSE_WORDS, Cause, Severity
from stretto.observe.trace.replay import Replay, Without
from stretto.observe.trace.source_lines import Guess

_LEAST_SHARE = 0.005
_MOST_REPLAYS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to fix."""

    cause: Cause
    title: str
    location: str
    """The innermost frame of the program's own code; else the operator, annotation or copy; "" if nothing is known."""
    remedy: str
    severity: Severity | None
    kind: str
    """Kind of the blocking call; "" for other causes."""
    count: int
    idle_ns: int
    """Time in which the device computed nothing because of it."""
    blocked_ns: int
    """Time in which the host was blocked in it."""
    worst: Gap | None
    """Its longest gap."""
    stack: tuple[str, ...]
    """Around the longest gap, or the first blocking call; innermost first."""
    gain_ns: int = 0
    """What the replay without it is shorter, over the whole trace."""
    span: int = -1
    """A host span that shows it."""
    exact_line: bool = False
    """`location` has the line of the call; else the line at which its function begins."""
    guesses: tuple[Guess, ...] = ()
    """Lines of that function that can be meant, from its source."""

    @property
    def is_hidden_sync(self) -> bool:
        """A blocking call that hurts and that nobody planned."""
        return self.severity in (Severity.LOST, Severity.SHORTENED)


def find_findings(
    blocking: list[Blocking], gaps: list[Gap], replay: Replay | None, length: int, stacks_of: list[str] | None = None
) -> list[Finding]:
    """Findings by gain, then by idle time. Causes of less than 0.5 % of `length` are left out, hidden syncs never."""
    gaps_by_key: dict[tuple[str, str, str, str], list[Gap]] = {}
    for gap in gaps:
        one = blocking[gap.blocking] if gap.blocking >= 0 else None
        key = _key(gap.cause, one.kind, one.severity, one.location) if one else _key(gap.cause, "", None, gap.location)
        gaps_by_key.setdefault(key, []).append(gap)
    calls_by_key: dict[tuple[str, str, str, str], list[int]] = {}
    for i, one in enumerate(blocking):
        calls_by_key.setdefault(_key(_cause(one), one.kind, one.severity, one.location), []).append(i)
    found: list[tuple[Finding, Without]] = []
    for key in sorted(set(gaps_by_key) | set(calls_by_key)):
        finding = _finding(key, gaps_by_key.get(key, []), [blocking[i] for i in calls_by_key.get(key, [])])
        if finding.is_hidden_sync or finding.idle_ns >= _LEAST_SHARE * length:
            found.append((finding, Without(frozenset(calls_by_key.get(key, [])), tuple(gaps_by_key.get(key, [])))))
    found.sort(key=lambda pair: -pair[0].idle_ns)
    with_gain = [
        replace(finding, gain_ns=replay.gain(without)) if replay is not None and i < _MOST_REPLAYS else finding
        for i, (finding, without) in enumerate(found)
    ]
    return sorted(with_gain, key=lambda finding: (-max(finding.gain_ns, 0), -finding.idle_ns, finding.title))


def _key(cause: Cause, kind: str, severity: Severity | None, location: str) -> tuple[str, str, str, str]:
    return (cause.value, kind, severity.value if severity else "", location)


def _cause(one: Blocking) -> Cause:
    if one.kind == "allocation":
        return Cause.ALLOCATION
    if one.severity is Severity.PLANNED:
        return Cause.PLANNED_WAIT
    return Cause.UPLOAD if one.severity is Severity.SHORTENED else Cause.SYNC


def _finding(key: tuple[str, str, str, str], gaps: list[Gap], calls: list[Blocking]) -> Finding:
    cause, kind, severity, location = Cause(key[0]), key[1], Severity(key[2]) if key[2] else None, key[3]
    words = BLOCKING_WORDS.get(kind)
    title, remedy = CAUSE_WORDS[cause], CAUSE_REMEDIES.get(cause, "")
    if words is not None and cause is not Cause.PLANNED_WAIT:
        title, remedy = words.title, words.remedy
    elif kind and cause is not Cause.PLANNED_WAIT:
        title, remedy = f"{CAUSE_WORDS[cause]}: {kind}", BLOCKING_WORDS["event-sync"].remedy
    worst = max(gaps, key=lambda gap: gap.length, default=None)
    span = calls[0].span if calls else worst.span if worst else -1
    return Finding(
        cause,
        title,
        location,
        remedy,
        severity,
        kind,
        len(calls) or len(gaps),
        sum(gap.length for gap in gaps),
        sum(one.end - one.start for one in calls),
        worst,
        (),
        span=span,
        exact_line=bool(calls) and calls[0].exact_line,
    )
