"""What a guard has found: places in a program where the host waits for the device, counted and told.

Owns the tally, and which frame of a stack is the program's own.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from stretto.errors import StrettoError
from stretto.observe.trace.kinds import BLOCKING_WORDS, Severity

_LOG = logging.getLogger("stretto.observe")
_TORCH = str(Path(torch.__file__).parent)
_OWN = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("sync_guard", "sync_findings", "host_reads", "cuda_syncs", "watched_stream")
)
_UPLOADS = ("pageable-upload", "upload")
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class SyncFinding:
    """One place in the program where the host waits for the device."""

    kind: str
    """As in `stretto trace analyze`: `item`, `truth-value`, `to-host`, `pageable-upload`...; `sync` if unknown."""
    call: str
    """The torch call."""
    file: str
    line: int
    function: str
    severity: Severity
    """`lost`: a read from the device, nothing overlaps any more; `shortened`: only the launch comes later."""
    count: int
    """Calls that were seen."""
    blocked_s: float
    """Time that the host spent in those calls that were timed."""
    timed: int
    """How many of them were timed."""

    @property
    def location(self) -> str:
        """file:line in the program's own code."""
        return f"{self.file}:{self.line}"

    @property
    def remedy(self) -> str:
        """What to write instead."""
        words = BLOCKING_WORDS.get(self.kind)
        return words.remedy if words else "Look at this line: something in it waits for the device."

    def __str__(self) -> str:
        times = f"{self.count} times" if self.count != 1 else "once"
        blocked = f", blocked {1e3 * self.blocked_s:.3f} ms in {self.timed} of them" if self.timed else ""
        return (
            f"{self.location} in {self.function}: {self.call} ({self.kind}), {times}{blocked}; overlap {self.severity}"
        )


class HiddenSync(StrettoError):
    """Watched code was about to wait for the device, and the guard raises.

    Attributes:
        finding: what and where.
    """

    def __init__(self, finding: SyncFinding) -> None:
        super().__init__(f"hidden sync: {finding.location} in {finding.function}: {finding.call}. {finding.remedy}")
        self.finding = finding


class _Place:
    """Counts of one line and kind."""

    __slots__ = ("blocked_s", "call", "count", "function", "timed")

    def __init__(self, call: str, function: str) -> None:
        self.call = call
        self.function = function
        self.count = 0
        self.blocked_s = 0.0
        self.timed = 0


class SyncTally:
    """Counts hidden syncs by kind and line, from any thread. Each new one is logged once, with its remedy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[_Key, _Place] = {}

    def note(self, kind: str, call: str, frame: FrameType, blocked_s: float | None = None) -> SyncFinding:
        """One more at the line of `frame`; what is known of this line now."""
        key = kind, frame.f_code.co_filename, frame.f_lineno
        with self._lock:
            place = self._places.get(key)
            is_new = place is None
            if place is None:
                place = self._places[key] = _Place(call, frame.f_code.co_qualname)
            place.count += 1
            if blocked_s is not None:
                place.blocked_s += blocked_s
                place.timed += 1
            found = _finding(key, place)
        if is_new:
            _LOG.info("hidden sync: %s in %s: %s (%s). %s", found.location, found.function, call, kind, found.remedy)
        return found

    def findings(self) -> list[SyncFinding]:
        """Lost before shortened, then by blocked time and count."""
        with self._lock:
            found = [_finding(key, place) for key, place in self._places.items()]
        return sorted(found, key=lambda one: (one.severity is not Severity.LOST, -one.blocked_s, -one.count))

    @property
    def count(self) -> int:
        """Of all places together."""
        return sum(place.count for place in tuple(self._places.values()))

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._places.clear()


def _finding(key: _Key, place: _Place) -> SyncFinding:
    kind, file, line = key
    severity = Severity.SHORTENED if kind in _UPLOADS else Severity.LOST
    return SyncFinding(
        kind, place.call, file, line, place.function, severity, place.count, place.blocked_s, place.timed
    )


def place_of(frame: FrameType) -> str:
    """For a trace, which knows no lines: what `trace/names.py` reads back."""
    return f" at {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is neither torch's, nor the standard library's warnings, nor the guard's own."""
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if not file.startswith(_TORCH) and file not in _OWN and not file.endswith(("/warnings.py", "/contextlib.py")):
            return found
        found = found.f_back
    return frame
