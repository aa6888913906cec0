"""Names of Stretto's steps and phases in other tools' traces: torch.profiler's, and NVTX ranges for Nsight Systems.

Nothing has to be switched on for torch.profiler: whoever profiles a program that uses Stretto sees them. NVTX ranges
need STRETTO_NVTX=1. What the names mean is in `trace/names.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import profiler
from torch.profiler import record_function

STEP, REQUEST = "stretto.step", "stretto.request"
_NVTX = os.environ.get("STRETTO_NVTX", "0") not in ("", "0")


def spans_wanted() -> bool:
    """Whether a tool records. hot path"""
    return profiler._is_profiler_enabled or _NVTX


class Span:
    """A named stretch of host time, open from when it is made."""

    __slots__ = ("_nvtx", "_record")

    def __init__(self, name: str) -> None:
        self._record: record_function | None = None
        self._nvtx = _NVTX and torch.cuda.is_available()
        if profiler._is_profiler_enabled:
            self._record = record_function(name)
            self._record.__enter__()  # type: ignore[no-untyped-call]
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Close it; the one opened last first."""
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if self._record is not None:
            self._record.__exit__(None, None, None)


class HostSpans:
    """The spans of one turn of the loop: the step's, and in it one phase after the other."""

    def __init__(self) -> None:
        self._step: Span | None = None
        self._phase: Span | None = None

    def begin_step(self, index: int) -> None:
        """The turn that may launch step `index` begins."""
        self.end_step()
        self._step = Span(f"{STEP} {index}")

    def phase(self, name: str) -> None:
        """The next phase begins; "" none."""
        if self._phase is not None:
            self._phase.end()
        self._phase = Span(name) if name else None

    def end_step(self) -> None:
        """The turn ends."""
        self.phase("")
        if self._step is not None:
            self._step.end()
            self._step = None


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name the host time of the block, if a tool records."""
    if not spans_wanted():
        yield
        return
    opened = Span(name)
    try:
        yield
    finally:
        opened.end()


def mark(name: str) -> None:
    """Name this moment, if a tool records."""
    if spans_wanted():
        Span(name).end()
