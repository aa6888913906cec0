"""Arithmetic on sets of time intervals: union, gaps, overlap. All times are int64, all functions are vectorised."""

from __future__ import annotations

import numpy as np

from stretto.observe.trace.model import Ints


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The intervals merged where they touch or overlap, in order. The input may be in any order."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.append(True, start[1:] > reach[:-1])
    last = np.append(first[1:], True)
    return start[first], reach[last]


def total(start: Ints, end: Ints) -> int:
    """The summed length of disjoint intervals."""
    return int((end - start).sum())


def covered(start: Ints, end: Ints, points: Ints) -> Ints:
    """How much of the disjoint, sorted intervals lies before each point."""
    if not len(start):
        return np.zeros(len(points), dtype=np.int64)
    before = np.append(0, np.cumsum(end - start))
    index = np.searchsorted(start, points, side="right")
    last = np.maximum(index - 1, 0)
    inside = np.where(index > 0, np.maximum(end[last] - points, 0), 0)
    result: Ints = before[index] - np.minimum(inside, np.where(index > 0, end[last] - start[last], 0))
    return result


def overlap(start: Ints, end: Ints, begin: Ints, stop: Ints) -> Ints:
    """How much of the disjoint, sorted intervals lies in each window [begin, stop)."""
    return covered(start, end, stop) - covered(start, end, begin)


def gaps(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """What lies between disjoint, sorted intervals."""
    return end[:-1], start[1:]


def subtract(start: Ints, end: Ints, cut_start: Ints, cut_end: Ints) -> tuple[Ints, Ints]:
    """The first set without the second; both disjoint and sorted."""
    if not len(start) or not len(cut_start):
        return start, end
    edges = np.unique(np.concatenate([start, end, cut_start, cut_end]))
    begin, stop = edges[:-1], edges[1:]
    keep = _inside(start, end, begin) & ~_inside(cut_start, cut_end, begin)
    return union(begin[keep], stop[keep])


def _inside(start: Ints, end: Ints, points: Ints) -> np.typing.NDArray[np.bool_]:
    index = np.searchsorted(start, points, side="right") - 1
    result: np.typing.NDArray[np.bool_] = (index >= 0) & (points < end[np.maximum(index, 0)])
    return result


def concurrency(start: Ints, end: Ints) -> tuple[int, int]:
    """(time in which at least one is running, time in which at least two are)."""
    if not len(start):
        return 0, 0
    times = np.concatenate([start, end])
    change = np.concatenate([np.ones(len(start), dtype=np.int64), -np.ones(len(end), dtype=np.int64)])
    order = np.lexsort((change, times))
    depth, lengths = np.cumsum(change[order])[:-1], np.diff(times[order])
    return int(lengths[depth >= 1].sum()), int(lengths[depth >= 2].sum())
