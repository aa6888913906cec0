"""Holds Ctrl-C back while the engine is in the middle of something, and delivers it at a safe point. And keeps it away
from child processes, which leave signals for the whole group to their parent.

Owns the SIGINT handler only inside `held_interrupts()`. A KeyboardInterrupt between two statements of the scheduler
would leave pages without an owner; between two steps it is an ordinary exception.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptGate:
    """Remembers a Ctrl-C until `check`. A second one is delivered at once, for a loop that does not come back."""

    def __init__(self) -> None:
        self._pending: tuple[int, FrameType | None] | None = None
        self._previous = signal.getsignal(signal.SIGINT)
        # Only the main thread gets signals, and a handler that is not Python's cannot be called from Python.
        self.active = threading.current_thread() is threading.main_thread() and callable(self._previous)

    def open(self) -> None:
        if self.active:
            signal.signal(signal.SIGINT, self._on_signal)

    def close(self) -> None:
        if self.active:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Deliver a Ctrl-C that came since the last check: the previous handler runs, which mostly raises."""
        if self._pending is not None and callable(self._previous):
            (signum, frame), self._pending = self._pending, None
            self._previous(signum, frame)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            self.check()
        else:
            self._pending = (signum, frame)


@contextmanager
def held_interrupts() -> Iterator[InterruptGate]:
    """Hold Ctrl-C back in this block; it is delivered by `check` or at the end of the block."""
    gate = InterruptGate()
    gate.open()
    try:
        yield gate
    finally:
        gate.close()
        gate.check()


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Ctrl-C does nothing in this block. Only the main thread can see to that; in others the block just runs."""
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before is not None  # None: no handler of Python's
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def starting_children() -> Iterator[None]:
    """Processes that are started in this block get no SIGINT and SIGTERM until they call `leave_signals_to_parent`.

    Importing what a child needs takes it seconds, in which it could not ignore a Ctrl-C by itself. Any thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """First thing in a child process: Ctrl-C and SIGTERM, which often go to a whole group, are the parent's affair."""
    for sig in _GROUP_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
