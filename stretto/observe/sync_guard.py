"""SyncGuard: finds hidden syncs, the calls in which the host waits for the device without a plan, and says where.

Owns the findings and who is being watched; how such a call is recognised is in `host_reads.py` and `cuda_syncs.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any, Literal, Self, get_args

import torch

from stretto.errors import InvalidRequest
from stretto.observe.annotations import mark, span, spans_wanted
from stretto.observe.cuda_syncs import CudaSyncs
from stretto.observe.host_reads import Calls, Operators
from stretto.observe.sync_findings import HiddenSync, SyncFinding, SyncTally, place_of, user_frame

__all__ = ["GuardMode", "HiddenSync", "SyncFinding", "SyncGuard"]

GuardMode = Literal["off", "count", "raise"]


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.watches = 0
        self.inspects = 0
        self.allowed: list[str] = []
        self.inside = 0
        """In a call that is already known to wait: what it does inside is not counted again."""
        self.late: tuple[FrameType, int] | None = None
        """Where the last such call was made. Torch keeps an operator's warnings until the call from Python that it is
        part of returns, so CUDA's reports of it may come after it, from the same line."""
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
        self._tally = SyncTally()
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
                state.late = None

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
        return self._tally.findings()

    @property
    def num_syncs(self) -> int:
        """Hidden syncs seen so far."""
        return self._tally.count

    @property
    def allowed(self) -> dict[str, int]:
        """How many waits each reason of `allow` let through."""
        return dict(self._allowed)

    def clear(self) -> None:
        """Forget what was found."""
        self._tally.clear()
        with self._lock:
            self._allowed.clear()

    def _seen(self, kind: str, call: str, run: Callable[[], Any]) -> Any:
        """A call that waits is about to run."""
        state = self._state
        if state.inside:
            return run()
        frame = user_frame(sys._getframe(1))
        if state.allowed:
            self._let_through(state.allowed[-1])
            state.inside += 1
            try:
                return run()
            finally:
                state.inside -= 1
                state.late = frame, frame.f_lineno
        if self.mode == "raise":
            raise HiddenSync(self._tally.note(kind, call, frame))
        state.inside += 1
        began = time.perf_counter()
        try:
            with span(f"stretto.sync {kind}{place_of(frame)}" if spans_wanted() else ""):
                return run()
        finally:
            state.inside -= 1
            state.late = frame, frame.f_lineno
            self._tally.note(kind, call, frame, time.perf_counter() - began)

    def _let_through(self, reason: str) -> None:
        with self._lock:
            self._allowed[reason] = self._allowed.get(reason, 0) + 1

    def _heard(self) -> None:
        """CUDA's debug mode reports a synchronisation that has just happened."""
        state = self._state
        if not state.watches or state.inside:
            return
        frame = user_frame(sys._getframe(1))
        if state.late == (frame, frame.f_lineno):
            return
        state.late = None
        if state.allowed:
            self._let_through(state.allowed[-1])
            return
        self._heard_at = self._step
        if spans_wanted():
            mark(f"stretto.synced{place_of(frame)}")
        found = self._tally.note("sync", "a synchronising CUDA call", frame)
        if self.mode == "raise":
            raise HiddenSync(found)

    def _synchronize(self, run: Callable[[], None]) -> None:
        """`torch.cuda.synchronize` was called."""
        self.call("device-sync", "torch.cuda.synchronize", run)
