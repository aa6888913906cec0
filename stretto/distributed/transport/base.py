"""How the leader's bytes reach every follower: the interface, its errors and limits, and how an end fails.

Owns no socket and no memory; each transport is a module beside this one, and `choice.py` picks one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stretto.errors import StrettoError


class TransportError(StrettoError):
    """The control plane cannot go on; the transport must be closed. Says which rank and why."""


class PeerGone(TransportError):
    """A rank has ended. `orderly`: it closed its transport; else its process died or the connection broke.

    `rank` is None where the transport cannot tell which one (Gloo with three ranks or more).
    """

    def __init__(self, rank: int | None, orderly: bool, detail: str = "") -> None:
        self.rank, self.orderly = rank, orderly
        who = {None: "another rank", 0: "the leader (rank 0)"}.get(rank, f"rank {rank}")
        how = "closed the control plane" if orderly else "is gone: it died, or its connection broke"
        super().__init__(f"{who} {how}" + (f" ({detail})" if detail else ""))


class FollowerBehind(TransportError):
    """A follower has not read for so long that what waits for it would exceed the limit."""

    def __init__(self, rank: int | None, pending_bytes: int, patience_s: float) -> None:
        self.rank = rank
        who = "a rank" if rank is None else f"rank {rank}"
        super().__init__(
            f"{who} has not read its messages: {pending_bytes:,} bytes wait for it, and {patience_s:g} s brought "
            "no room for more; it hangs or is far too slow"
        )


class ConnectFailed(TransportError):
    """Not every rank connected in time, or who connected does not belong to this leader."""


def missing(ranks: Iterable[int], timeout_s: float) -> ConnectFailed:
    """The error for followers that did not connect in time."""
    names = ", ".join(map(str, sorted(ranks)))
    return ConnectFailed(f"these ranks did not connect to the control plane within {timeout_s:g} s: {names}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one control plane; the same on all ranks (a follower is told the leader's where it matters)."""

    largest_message: int = 256 * 2**20
    """Bytes; a longer message is refused by `publish` (ValueError) and is an error where it arrives."""
    pending_bytes: int = 16 * 2**20
    """What may wait for a follower that does not read. A very long message passes in pieces, or when half is free."""
    patience_s: float = 10.0
    """How long `publish` waits for room before it raises FollowerBehind."""
    linger_s: float = 2.0
    """How long `close` of the leader waits for followers to take what was published."""

    def __post_init__(self) -> None:
        if not 0 < self.largest_message < 2**32:
            raise ValueError(f"largest_message is {self.largest_message}; it must be between 1 and 2**32 - 1 bytes")
        if self.pending_bytes < 64:
            raise ValueError(f"pending_bytes is {self.pending_bytes}; it must be at least 64")
        if self.patience_s < 0 or self.linger_s < 0:
            raise ValueError(f"times must not be negative: {self}")

    def check(self, data: bytes) -> None:
        """Raises ValueError if a message is longer than allowed."""
        if len(data) > self.largest_message:
            raise ValueError(f"a message of {len(data):,} bytes; at most {self.largest_message:,} are allowed")

    def room(self, cost: int) -> int:
        """What may wait before a message that counts `cost` bytes; a very long one goes when half is free."""
        return self.pending_bytes - min(cost, self.pending_bytes // 2)


class TransportEnd:
    """What each end of each transport has: the error that ended it, which every call but `close` raises again."""

    def __init__(self) -> None:
        self._failure: TransportError | None = None

    def _usable(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: TransportError) -> TransportError:
        """Remember `failure`, for the caller to raise."""
        self._failure = failure
        return failure

    def _set_closed(self) -> None:
        if self._failure is None:
            self._failure = TransportError("this end of the control plane is closed")


class LeaderTransport(Protocol):
    """Rank 0's end. Made listening: pass `address` to the followers, then `wait_for_followers`, then publish.

    One thread at a time may call it. After any TransportError only `close` is allowed; other calls raise again.
    """

    @property
    def address(self) -> str:
        """What a follower needs besides rank and size. No blanks: fit for a command line or a store."""

    def wait_for_followers(self, timeout_s: float) -> None:
        """Wait until all ranks are connected; each gets everything from the first message on. Blocks the host.

        Raises ConnectFailed, naming the missing ranks, after `timeout_s`; PeerGone if one connected and then ended.
        """

    def publish(self, data: bytes) -> None:
        """Hand one message to all followers, in order, exactly once each. Never waits for a device.

        Returns before the followers have read, as long as the limit on pending bytes allows; else it waits for room, at
        most `patience_s`. Raises FollowerBehind after that, PeerGone if a follower has ended, ValueError if the message
        is too long (then nothing was sent).
        """

    def check(self) -> None:
        """Raise PeerGone if a follower is known to have ended; sends nothing, never blocks.

        Gloo knows it only once something was published after the follower's end.
        """

    def close(self) -> None:
        """End it: followers read what was published, then get PeerGone(orderly). Blocks for at most `linger_s`.

        Safe to call twice, at any time and after any error; raises nothing.
        """


class FollowerTransport(Protocol):
    """The end of one of the ranks 1 to size - 1. Made connected. One thread at a time may call it."""

    def receive(self, timeout_s: float | None) -> bytes | None:
        """The next message. Waits at most `timeout_s` (None: for ever; 0: only looks), then returns None.

        Raises PeerGone once the leader has ended and everything that arrived has been read; TransportError if what
        arrives is not what a leader sends. Never returns a part of a message. Waiting leaves core and GIL free.
        """

    def close(self) -> None:
        """End it: the leader's next `publish` raises PeerGone(orderly). Safe to call twice; raises nothing."""
