"""Call stacks from nested spans: what was a thread doing at a moment, or during an interval?

Owns the nesting. A span belongs to the innermost span of its thread that contains it; small overhangs, which clocks of
different resolution cause, are forgiven. A span that begins inside another and outlives it is no child of that: an
annotation begins within the Python call that opens it.
"""

from __future__ import annotations

import numpy as np

from stretto.observe.trace.model import HostKind, HostSpans, Ints, Trace
from stretto.observe.trace.names import family, frame, is_user_frame

_ANNOTATION, _PYTHON, _OPERATOR = int(HostKind.ANNOTATION), int(HostKind.PYTHON), int(HostKind.OPERATOR)
_OVERHANG_NS = 2_000
_SHARE = 0.5  # a frame explains an interval if it covers this much of it


class Stacks:
    """Nesting of all host spans of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._names = trace.names
        self._host: HostSpans = trace.host
        self.parent = _parents(trace.host)
        # Lists: single values are asked for, and those of arrays are slow to get.
        self._above: list[int] = self.parent.tolist()
        self._kind: list[int] = trace.host.kind.tolist()
        self._name: list[int] = trace.host.name.tolist()
        self._first, self._children = _children(self.parent)
        threads = np.arange(len(trace.threads) + 1)
        self._thread_first = np.searchsorted(trace.host.thread, threads)
        order = np.flatnonzero(self.parent < 0)
        self._roots = [order[(order >= a) & (order < b)] for a, b in zip(*self._bounds(), strict=True)]

    def _bounds(self) -> tuple[list[int], list[int]]:
        first = self._thread_first.tolist()
        return first[:-1], first[1:]

    def ancestors(self, span: int) -> list[int]:
        """The span and what encloses it, innermost first."""
        found = []
        while span >= 0:
            found.append(span)
            span = self._above[span]
        return found

    def at(self, thread: int, time: int) -> int:
        """The innermost span of a thread at a moment; -1 if there is none."""
        a, b = int(self._thread_first[thread]), int(self._thread_first[thread + 1])
        span = a + int(np.searchsorted(self._host.start[a:b], time, side="right")) - 1
        if span < a:
            return -1
        while span >= 0 and self._host.end[span] <= time:
            span = self._above[span]
        return span

    def during(self, thread: int, start: int, end: int) -> int:
        """The innermost span that covers at least half of an interval; -1 if none does."""
        found = -1
        level = self._roots[thread]
        while len(level):
            starts = self._host.start[level]
            a = max(0, int(np.searchsorted(starts, start, side="right")) - 1)
            b = int(np.searchsorted(starts, end, side="left"))
            near = level[a:b]
            if not len(near):
                break
            inside = np.minimum(self._host.end[near], end) - np.maximum(self._host.start[near], start)
            most = np.flatnonzero(inside >= _SHARE * (end - start))
            if not len(most):
                break
            # Two may: an annotation that is opened within a call and outlives it. What is within begins later.
            found = int(near[most[-1]])
            level = self._children[self._first[found] : self._first[found + 1]]
        return found

    def frames(self, span: int) -> list[str]:
        """Names from the innermost to the outermost."""
        return [self.name(i) for i in self.ancestors(span)]

    def name(self, span: int) -> str:
        """The name of a span."""
        return self._names[self._name[span]]

    def kind(self, span: int) -> int:
        """The `HostKind` of a span, as a number."""
        return self._kind[span]

    def location(self, span: int) -> str:
        """Where in somebody's code a span is: the innermost frame of their own, else the innermost name that says
        something; "" for -1.
        """
        python = ""
        other = ""
        annotation = ""
        for i in self.ancestors(span):
            name, kind = self.name(i), self._kind[i]
            if kind == _PYTHON:
                if is_user_frame(name):
                    return name
                if not python and frame(name) is not None:
                    python = name
            elif kind == _ANNOTATION:
                annotation = annotation or family(name).rstrip(" #")
            elif kind == _OPERATOR:
                other = name  # the outermost operator is the one that the program called
        return annotation or python or other


def _parents(host: HostSpans) -> Ints:
    """For every span the index of the one around it, or -1."""
    parent = np.full(len(host), -1, dtype=np.int64)
    stack: list[tuple[int, int]] = []  # (end, span)
    thread = -1
    result = []
    for i, (start, end, owner) in enumerate(
        zip(host.start.tolist(), host.end.tolist(), host.thread.tolist(), strict=True)
    ):
        if owner != thread:
            stack.clear()
            thread = owner
        while stack and stack[-1][0] <= start and not (stack[-1][0] == start == end):
            stack.pop()
        around = -1
        for reach, span in reversed(stack):
            if reach + _OVERHANG_NS >= end and reach > start - (start == end):
                around = span
                break
        result.append(around)
        stack.append((end, i))
    if result:
        parent[:] = result
    return parent


def _children(parent: Ints) -> tuple[Ints, Ints]:
    """Children of span i: `children[first[i] : first[i + 1]]`, by start."""
    owned = np.flatnonzero(parent >= 0)
    children = owned[np.argsort(parent[owned], kind="stable")]
    first = np.searchsorted(parent[children], np.arange(len(parent) + 1))
    return first.astype(np.int64), children.astype(np.int64)
