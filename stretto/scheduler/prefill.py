"""PrefillManager: who waits for a slot, and whose prompt is being computed in chunks. Owns both queues."""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass
from operator import attrgetter

from stretto.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of a request's prompt."""

    request: Request
    num_tokens: int


_order = attrgetter("order")


class PrefillManager:
    """First come, first served within a priority; a preempted request comes back to its old place."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Request]] = []
        self._num_waiting = 0
        self.num_waiting_tokens = 0
        """Tokens that the waiting requests bring."""
        self.running: list[Request] = []
        """Requests with a slot whose prompt is not wholly launched, in order."""

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return self._num_waiting

    def wait(self, request: Request) -> None:
        """`request` waits for a slot."""
        heapq.heappush(self._waiting, (*request.order, request))
        self._num_waiting += 1
        self.num_waiting_tokens += len(request.token_ids)

    def forget(self, request: Request) -> None:
        """`request` ended while it waited (its state says so already)."""
        self._num_waiting -= 1
        self.num_waiting_tokens -= len(request.token_ids)

    def first(self) -> Request | None:
        """The request to admit next, or None."""
        while self._waiting and self._waiting[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def admit(self, request: Request) -> None:
        """Move the first waiting request, which has a slot now, to those being computed."""
        if self.first() is not request:
            raise RuntimeError(f"request {request.uid} is admitted out of turn")
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        self.num_waiting_tokens -= len(request.token_ids)
        request.state = RequestState.PREFILL
        bisect.insort(self.running, request, key=_order)

    def leave(self, request: Request) -> None:
        """`request`'s prompt is wholly launched, or it gives up its slot."""
        self.running.remove(request)
