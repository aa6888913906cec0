"""Turns: everything that a turn of the loop takes from outside, as one value, and where one rank's turns come from.

What depends on a clock, on who sends messages when, or on how fast a device is, enters the loop here and nowhere else.
So whoever carries out the same turns makes the same schedule; `stretto.distributed.turns` makes use of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.request import FinishReason, Request, RequestState


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A validated request arrives."""

    request: Request
    deadline: float | None = None
    """Device clock in seconds after which it is ended, wherever it is. Who makes the turns judges it; nobody else."""


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A client aborts, a stop string is complete with the first `num_output` tokens, or the request's time is over."""

    request: Request
    reason: FinishReason
    num_output: int | None = None


Message = AddRequest | EndRequest


class Inbox(Protocol):
    """Where messages come from."""

    def receive(self, block: bool) -> Iterable[Message]:
        """Messages since the last call; with `block`, may wait for one."""


class Launched(Protocol):
    """A step in flight."""

    def is_done(self) -> bool:
        """Whether its results are there. Never blocks."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop is to do, beyond what the scheduler decides by itself."""

    messages: Sequence[Message] = ()
    """In the order in which they take effect."""
    num_ready: int = 0
    """The oldest steps in flight that are processed before anything is scheduled: those that were seen to be done."""
    stop: bool = False
    """The last turn: nothing is launched any more, and every step in flight is ready or waited for."""


class TurnSource(Protocol):
    """Where a loop gets its turns."""

    def next(self, in_flight: Sequence[Launched], block: bool) -> Turn:
        """The next turn. With `block` nothing can be done without a message, and the host may wait for one.

        An exception from outside that comes while it waits loses nothing.
        """


_LEAST_SWEPT = 64


class LocalTurns:
    """Turns from the messages, the clock and the device of this process."""

    def __init__(self, inbox: Inbox, now: Callable[[], float]) -> None:
        """`now`: the clock by which the deadlines in `AddRequest` are meant, in seconds."""
        self._inbox = inbox
        self._now = now
        self._deadlines: list[tuple[float, int, Request]] = []
        """A heap: of requests that have not ended, and of some that have, swept now and then."""
        self._sweep_at = _LEAST_SWEPT
        self._stopping = False

    @property
    def num_watched(self) -> int:
        """Requests that are kept for their deadline: at most about twice as many as have not ended."""
        return len(self._deadlines)

    def stop(self) -> None:
        """Make the next turn the last one."""
        self._stopping = True

    def next(self, in_flight: Sequence[Launched], block: bool) -> Turn:
        """See `TurnSource`. hot path"""
        messages = list(self._inbox.receive(block and not self._stopping))
        for message in messages:
            if isinstance(message, AddRequest) and message.deadline is not None:
                self._watch(message.request, message.deadline)
        if self._deadlines:
            messages += self._expired()
        if self._stopping:
            return Turn(messages, len(in_flight), stop=True)
        num_ready = 0
        for step in in_flight:
            if not step.is_done():
                break
            num_ready += 1
        return Turn(messages, num_ready)

    def _watch(self, request: Request, deadline: float) -> None:
        heapq.heappush(self._deadlines, (deadline, request.uid, request))
        if len(self._deadlines) > self._sweep_at:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not RequestState.FINISHED]
            heapq.heapify(self._deadlines)
            self._sweep_at = max(_LEAST_SWEPT, 2 * len(self._deadlines))

    def _expired(self) -> Iterable[EndRequest]:
        """End requests whose time is over: judged here and nowhere else, and carried out like an abort."""
        while self._deadlines and self._deadlines[0][0] <= self._now():
            request = heapq.heappop(self._deadlines)[2]
            if request.state is not RequestState.FINISHED:
                yield EndRequest(request, FinishReason.TIMEOUT)
