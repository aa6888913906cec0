"""DecodeManager: the requests that take one token a step. Owns their order and nothing else."""

from __future__ import annotations

import bisect

import numpy as np

from stretto.request import Request
from stretto.scheduler.batch import IntArray


class DecodeManager:
    """Running requests whose prompt is computed, in order of arrival within a priority.

    `slots` and the arrays beside it are rebuilt only when a request joins or leaves.
    """

    def __init__(self) -> None:
        self._members: list[tuple[int, int, int]] = []
        self._slots: IntArray | None = None

    def __len__(self) -> int:
        return len(self._members)

    def join(self, request: Request) -> None:
        """`request` decodes from the next step on."""
        bisect.insort(self._members, (*request.order, request.slot))
        self._slots = None

    def leave(self, request: Request) -> None:
        """`request` decodes no more. Raises KeyError if it was not decoding."""
        member = (*request.order, request.slot)
        at = bisect.bisect_left(self._members, member)
        if at == len(self._members) or self._members[at] != member:
            raise KeyError(f"request {request.uid} is not decoding")
        del self._members[at]
        self._slots = None

    @property
    def slots(self) -> IntArray:
        """Slots of all decoding requests, in order; the same array object until somebody joins or leaves. hot path"""
        if self._slots is None:
            self._slots = np.array([slot for _, _, slot in self._members], np.int64)
        return self._slots
