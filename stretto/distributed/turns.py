"""Where the turns of several ranks come from: the leader publishes each of its own, followers receive them.

Owns the order of the turns and which requests a follower knows. The way of the bytes is a transport's; who watches over
whether ranks live is not here either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stretto.distributed.messages import BadTurn, WireTurn, decode, encode
from stretto.errors import EngineBroken
from stretto.request import Request, RequestState
from stretto.scheduler.turns import AddRequest, Inbox, Launched, LocalTurns, Turn


class LeaderTurns:
    """This process's turns, each published before anything of it is carried out.

    A turn in which nothing can happen (idle, and no message has come) is not published: followers never see it.
    """

    def __init__(self, inbox: Inbox, now: Callable[[], float], publish: Callable[[bytes], None]) -> None:
        """`inbox` and `now` as for `LocalTurns`.

        `publish` hands one message to all followers, in order; what it raises ends the engine.
        """
        self._local = LocalTurns(inbox, now)
        self._publish = publish
        self._whole = True
        self.num_published = 0
        self.publish_s = 0.0
        """Host seconds in which turns were encoded and published."""

    def stop(self) -> None:
        """Make the next turn the last one, on all ranks."""
        self._local.stop()

    def next(self, in_flight: Sequence[Launched], block: bool) -> Turn:
        """See `TurnSource`. Raises EngineBroken once a turn may have reached some ranks only. hot path"""
        if not self._whole:
            raise EngineBroken("publishing a turn was broken off: some ranks may have got it; make a new engine")
        turn = self._local.next(in_flight, block)
        if block and not turn.messages and not turn.stop:
            return turn
        self._whole = False
        begin = time.perf_counter()
        self._publish(encode(WireTurn.of(self.num_published, turn)))
        self.publish_s += time.perf_counter() - begin
        self.num_published += 1
        self._whole = True
        return turn


class FollowerTurns:
    """The leader's turns, with requests of this process's own."""

    def __init__(
        self,
        receive: Callable[[float | None], bytes | None],
        *,
        look_every_s: float | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`receive(timeout_s)` waits for the next message; None: there was none in time.

        While none comes, `look` is called every `look_every_s` seconds (None: never); what it raises ends the wait.
        """
        self._receive = receive
        self._look_every_s = look_every_s
        self._look = look
        self._requests: dict[int, Request] = {}
        """Those that have not ended, and some that have: swept now and then."""
        self._sweep_at = _LEAST_SWEPT
        self._next_uid = 0
        """Above all uids that have arrived."""
        self.num_received = 0

    @property
    def num_known(self) -> int:
        """Requests that are kept: at most about twice as many as have not ended."""
        return len(self._requests)

    def next(self, in_flight: Sequence[Launched], block: bool) -> Turn:
        """See `TurnSource`; always waits for the leader. Raises BadTurn, and what `receive` and `look` raise. hot path

        A step that the leader has seen done need not be done here yet: the loop waits for it when it processes it.
        """
        while (data := self._receive(self._look_every_s)) is None:
            self._look()
        wire = decode(data)
        if wire.index != self.num_received:
            raise BadTurn(f"turn {wire.index} has arrived where turn {self.num_received} was due")
        if wire.num_ready > len(in_flight):
            raise BadTurn(
                f"turn {wire.index} has {wire.num_ready} steps to process, but only {len(in_flight)} are in flight here"
            )
        turn = wire.turn(self._find)
        for message in turn.messages:
            if isinstance(message, AddRequest):
                self._know(message.request)
        self.num_received += 1
        return turn

    def _know(self, request: Request) -> None:
        if request.uid < self._next_uid:
            raise BadTurn(f"request {request.uid} arrives after request {self._next_uid - 1}")
        self._next_uid = request.uid + 1
        self._requests[request.uid] = request
        if len(self._requests) > self._sweep_at:
            alive = {uid: r for uid, r in self._requests.items() if r.state is not RequestState.FINISHED}
            self._requests, self._sweep_at = alive, max(_LEAST_SWEPT, 2 * len(alive))

    def _find(self, uid: int) -> Request | None:
        if uid >= self._next_uid:
            raise BadTurn(f"request {uid} is to end, but it has never arrived")
        return self._requests.get(uid)


_LEAST_SWEPT = 64
