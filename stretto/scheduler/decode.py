"""DecodeManager: the requests that take one token a step. Owns their order and nothing else."""

from __future__ import annotations

import bisect

import numpy as np

from stretto.request import Request
from stretto.scheduler.batch import IntArray


class DecodeManager:
    """Running requests whose prompt is computed, in order of arrival within a priority."""

    def __init__(self) -> None:
        self._orders: list[tuple[int, int]] = []
        """Keys of the members, sorted."""
        self._slots: IntArray = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._orders)

    def join(self, request: Request) -> None:
        """`request` decodes from the next step on."""
        at = bisect.bisect_left(self._orders, request.order)
        self._orders.insert(at, request.order)
        self._slots = np.concatenate([self._slots[:at], [request.slot], self._slots[at:]])

    def leave(self, request: Request) -> None:
        """`request` decodes no more. Raises KeyError if it was not decoding."""
        at = bisect.bisect_left(self._orders, request.order)
        if at == len(self._orders) or self._orders[at] != request.order:
            raise KeyError(f"request {request.uid} is not decoding")
        del self._orders[at]
        self._slots = np.concatenate([self._slots[:at], self._slots[at + 1 :]])

    @property
    def slots(self) -> IntArray:
        """Slots of all decoding requests, in order; never changed in place, so a step may keep it. hot path"""
        return self._slots
