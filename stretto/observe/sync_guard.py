"""SyncGuard: finds hidden syncs, the calls in which the host waits for the device without a plan, and says where.

Owns the findings and who is being watched; how such a call is recognised is in `host_reads.py` and `cuda_syncs.py`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self, get_args

import torch

from stretto.errors import InvalidRequest, StrettoError
from stretto.observe.annotations import mark, span, spans_wanted
from stretto.observe.cuda_syncs import CudaSyncs
from stretto.observe.host_reads import Calls, Operators
from stretto.observe.trace.kinds import BLOCKING_WORDS, Severity

_LOG = logging.getLogger("stretto.observe")

GuardMode = Literal["off", "count", "raise"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = tuple(
    str(Path(__file__).with_name(f"{name}.py")) for name in ("sync_guard", "host_reads", "cuda_syncs", "watched_stream")
)
_UPLOADS = ("pageable-upload", "upload")


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


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.watches = 0
        self.inspects = 0
        self.allowed: list[str] = []
        self.inside = 0
        """In a call that is already known to wait: what it does inside is not counted again."""
        self.scopes: list[ExitStack] = []


class SyncGuard:
    """Watches code for hidden syncs: `with SyncGuard("raise"): ...` in any program, or as an engine's `sync_guard`.

    Args:
        mode: `off` sees nothing; `count` lets the program go on and keeps findings; `raise` raises HiddenSync before
            the call waits (on CUDA, for the few calls that are only heard of afterwards, right after it).
        every: with `count`, an engine has every call looked at in one of so many steps only. On CUDA all other steps
            are watched too, by means that cost nothing (`cuda_syncs.py`), and a step after a sync is looked at again.
        cpu_as_device: take tensors in host memory for device tensors. None: where torch has no GPU.

    One guard may watch several threads. Raises InvalidRequest for another mode.
    """

    def __init__(self, mode: GuardMode = "count", *, every: int = 128, cpu_as_device: bool | None = None) -> None:
        if mode not in get_args(GuardMode):
            raise InvalidRequest(f"sync_guard is {mode!r}; allowed: {', '.join(get_args(GuardMode))}")
        if every < 1:
            raise InvalidRequest(f"every is {every}; allowed: at least 1")
        has_cuda = torch.cuda.is_available()
        self.mode: GuardMode = mode
        self._every = every
        self._cpu_as_device = not has_cuda if cpu_as_device is None else cpu_as_device
        self._lock = threading.Lock()
        self._places: dict[tuple[str, str, int], _Place] = {}
        self._allowed: dict[str, int] = {}
        self._state = _ThreadState()
        self._cuda = CudaSyncs(self._heard, self._synchronize) if has_cuda and not self._cpu_as_device else None
        self._heard_at = -every
        self._step = 0

    # -- watching -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Watch this thread, every call, until the end of the block."""
        scope = ExitStack()
        scope.enter_context(self.watch())
        self._state.scopes.append(scope)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.scopes.pop().__exit__(kind, error, trace)
        if not self._state.scopes:
            self.close()

    @contextmanager
    def watch(self, *, inspect: bool = True) -> Iterator[None]:
        """Watch this thread; `inspect`: look at every call, else only hear of CUDA's synchronisations. Nests."""
        state = self._state
        if self.mode == "off":
            yield
            return
        listens = self._cuda is not None and not state.watches
        with ExitStack() as modes:
            if inspect and not state.inspects:
                modes.enter_context(Calls(self._seen, self._cpu_as_device))
                modes.enter_context(Operators(self._seen, self._cpu_as_device))
            state.watches += 1
            state.inspects += inspect
            if listens and self._cuda is not None:
                self._cuda.install()
                self._cuda.begin()
            try:
                yield
            finally:
                if listens and self._cuda is not None:
                    self._cuda.end()
                state.inspects -= inspect
                state.watches -= 1

    def inspects(self, step: int) -> bool:
        """Whether every call of an engine's step is to be looked at. hot path"""
        self._step = step
        return self.mode == "raise" or step % self._every == 0 or step - self._heard_at == 1

    @contextmanager
    def allow(self, reason: str) -> Iterator[None]:
        """Let this thread wait for the device inside the block, and say why. The only way through."""
        if not reason.strip():
            raise InvalidRequest("allow needs a reason: say why this wait is right")
        self._state.allowed.append(reason)
        try:
            yield
        finally:
            self._state.allowed.pop()

    def close(self) -> None:
        """Stop listening; findings stay. Idempotent."""
        if self._cuda is not None:
            self._cuda.uninstall()

    def call(self, kind: str, name: str, run: Callable[[], None]) -> None:
        """Call `run`, which waits for a device: a hidden sync if this thread is watched and it is not allowed."""
        if self._state.watches:
            self._seen(kind, name, run)
        else:
            run()

    # -- findings -----------------------------------------------------------------------------------------------------

    def findings(self) -> list[SyncFinding]:
        """What was found so far: lost before shortened, then by blocked time and count."""
        with self._lock:
            found = [_finding(key, place) for key, place in self._places.items()]
        return sorted(found, key=lambda one: (one.severity is not Severity.LOST, -one.blocked_s, -one.count))

    @property
    def num_syncs(self) -> int:
        """Hidden syncs seen so far."""
        return sum(place.count for place in tuple(self._places.values()))

    @property
    def allowed(self) -> dict[str, int]:
        """How many waits each reason of `allow` let through."""
        return dict(self._allowed)

    def clear(self) -> None:
        """Forget what was found."""
        with self._lock:
            self._places.clear()
            self._allowed.clear()

    def _seen(self, kind: str, call: str, run: Callable[[], Any]) -> Any:
        """A call that waits is about to run."""
        state = self._state
        if state.inside:
            return run()
        if state.allowed:
            with self._lock:
                self._allowed[state.allowed[-1]] = self._allowed.get(state.allowed[-1], 0) + 1
            state.inside += 1
            try:
                return run()
            finally:
                state.inside -= 1
        frame = _user_frame(sys._getframe(1))
        if self.mode == "raise":
            self._note(kind, call, frame, None)
            raise HiddenSync(_finding(_key(kind, frame), self._places[_key(kind, frame)]))
        state.inside += 1
        began = time.perf_counter()
        try:
            with span(f"stretto.sync {kind}{_place(frame)}" if spans_wanted() else ""):
                return run()
        finally:
            state.inside -= 1
            self._note(kind, call, frame, time.perf_counter() - began)

    def _heard(self) -> None:
        """CUDA's debug mode reports a synchronisation that has just happened."""
        state = self._state
        if not state.watches or state.inside:
            return
        if state.allowed:
            with self._lock:
                self._allowed[state.allowed[-1]] = self._allowed.get(state.allowed[-1], 0) + 1
            return
        frame = _user_frame(sys._getframe(1))
        self._heard_at = self._step
        if spans_wanted():
            mark(f"stretto.synced{_place(frame)}")
        self._note("sync", "a synchronising CUDA call", frame, None)
        if self.mode == "raise":
            raise HiddenSync(_finding(_key("sync", frame), self._places[_key("sync", frame)]))

    def _synchronize(self, run: Callable[[], None]) -> None:
        """`torch.cuda.synchronize` was called."""
        self.call("device-sync", "torch.cuda.synchronize", run)

    def _note(self, kind: str, call: str, frame: FrameType, blocked_s: float | None) -> None:
        key = _key(kind, frame)
        with self._lock:
            place = self._places.get(key)
            is_new = place is None
            if place is None:
                place = self._places[key] = _Place(call, frame.f_code.co_qualname)
            place.count += 1
            if blocked_s is not None:
                place.blocked_s += blocked_s
                place.timed += 1
        if is_new:
            found = _finding(key, place)
            _LOG.info("hidden sync: %s in %s: %s (%s). %s", found.location, found.function, call, kind, found.remedy)


def _key(kind: str, frame: FrameType) -> tuple[str, str, int]:
    return kind, frame.f_code.co_filename, frame.f_lineno


def _place(frame: FrameType) -> str:
    """For a trace, which knows no lines: what `trace/names.py` reads back."""
    return f" at {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def _finding(key: tuple[str, str, int], place: _Place) -> SyncFinding:
    kind, file, line = key
    severity = Severity.SHORTENED if kind in _UPLOADS else Severity.LOST
    return SyncFinding(
        kind, place.call, file, line, place.function, severity, place.count, place.blocked_s, place.timed
    )


def _user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is neither torch's, nor the standard library's warnings, nor the guard's own."""
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if not file.startswith(_TORCH) and file not in _OWN and not file.endswith(("/warnings.py", "/contextlib.py")):
            return found
        found = found.f_back
    return frame
