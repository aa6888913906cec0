"""The line between each rank and the leader's host process: a TCP connection with one JSON message a line.

It carries what is rare: who a rank is, what all agree on, progress, heartbeats, failures. When a process dies, however
it dies, its end reads as closed. Turns travel elsewhere (`transport/`); tensors elsewhere again (`group.py`).
"""

from __future__ import annotations

import select
import socket
import threading
from typing import TypeAlias

import msgspec

from stretto.distributed.forks import tell_forked_children
from stretto.distributed.patience import HANG_SECONDS

PROTOCOL = 2
"""Of these messages and of the turns; ranks of different protocols refuse each other."""
LONGEST_LINE = 4 << 20
KERNEL_SECONDS = 1.5
"""How much later than the watching threads the kernel calls a silent host lost."""
SEND_SECONDS = 1.0
"""How long a peer may keep a line from being sent; a peer that long behind is as good as gone."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first line of a follower. Never changes but by new fields, so that unlike versions can tell each other."""

    rank: int
    host: str
    pid: int
    protocol: int
    facts: dict[str, str]
    """Versions and options: what must be equal before anything is loaded."""


class Facts(msgspec.Struct, frozen=True, tag="facts"):
    """A follower got to `stage`: what it found there, for the leader to compare."""

    stage: str
    values: dict[str, str]


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """A follower is loading: `fraction` (0 to 1) of `what` is done."""

    what: str
    fraction: float


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A rank's process runs; what its main thread does, and since when."""

    phase: str = ""
    """For people: `start`, `loading`, `running`, `shutdown`."""
    activity: str = "outside"
    """`receive`, `device` (waits for results), `host` (computes), `outside` (none of the loop's business)."""
    steps: int = 0
    """Steps processed since the start."""
    since_s: float = 0.0
    """Seconds since activity or steps changed."""
    where: str = ""
    """Where in its code a host is that has been computing, or waiting for its device, for long."""
    resting: bool = False
    """Of the leader: it is outside the loop, and nothing is under way."""
    busy_s: float = 0.0
    """Device time of the steps since the start, and the idle time between them, as in `RuntimeStats`."""
    bubble_s: float = 0.0
    receive_s: float = 0.0
    """Host time in which it took in its turns, or waited for them."""


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """Under STRETTO_CHECK: digests of processed steps, in the form of `digest.py`."""

    data: bytes


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """A follower cannot go on, for a reason of its own or because a peer's failure reached it through the group."""

    message: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """A follower has ended in order."""

    steps: int


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """To followers: all ranks got to `stage` and are alike; what the leader adds."""

    stage: str
    values: dict[str, str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """To followers: the engine has failed, and all ranks end. Before the first `Agreed` it refuses a rank."""

    message: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """To followers: the leader's process ends without another turn."""


Message: TypeAlias = Hello | Facts | Loading | Beat | Digest | Broken | Bye | Agreed | Failed | Leave

_decoder = msgspec.json.Decoder(Message)


def _let_the_kernel_watch(end: socket.socket) -> None:
    """Break the connection if the other *host* is silent: that one's kernel answers whatever its processes do.

    A little later than a silent process is given up, which tells more.
    """
    seconds = HANG_SECONDS + KERNEL_SECONDS
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(127, max(1, round(seconds) - 1)))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(min(seconds, 1e6) * 1000))


class Link:
    """One end. Any thread may send; one thread receives. In a forked child it is closed."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.settimeout(SEND_SECONDS)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _let_the_kernel_watch(end)
        self._sending = threading.Lock()
        self._buffer = b""
        self.closed = False
        """The other side is gone, or talks nonsense."""
        tell_forked_children(self._forget)

    def fileno(self) -> int:
        """For polling: readable when there is a message, or when the other side is gone."""
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Say something; nothing happens if the other side is gone. Blocks for at most SEND_SECONDS."""
        data = msgspec.json.encode(message) + b"\n"
        with self._sending:
            if self.closed:
                return
            try:
                self._end.sendall(data)
            except OSError:
                self.closed = True

    def wait(self, seconds: float) -> bool:
        """Whether something can be received within `seconds`."""
        if self.closed:
            return False
        poll = select.poll()  # not select.select, which takes no descriptor above 1023
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def receive(self) -> list[Message]:
        """What is there (blocks for at most SEND_SECONDS); sets `closed` at the end of the line.

        Raises ValueError if the other side is no rank of this protocol; then it is closed.
        """
        try:
            data = self._end.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            if len(self._buffer) > LONGEST_LINE:
                raise ValueError("a line is too long")
            return [_decoder.decode(line) for line in lines if line]
        except ValueError:
            self.closed = True
            raise

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self._end.close()

    def _forget(self) -> None:
        """A child holds no copy of the line: it must not talk on it, nor keep it open when its parent has died."""
        self._sending = threading.Lock()  # another thread may have held it
        self.close()
