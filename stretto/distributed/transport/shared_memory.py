"""The control plane of one host: a ring in anonymous shared memory, and a pipe to each follower as its bell.

A follower connects once to a socket that has no file, and is handed the memory and its pipe; then the socket is closed.
So nothing is left behind however and whenever the processes end. Later the pipe is the only thing waited on: it rings
when a message came and breaks when the other side dies. Whoever is not asleep is never rung for.
Linux only (anonymous files that can be passed on).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time

from stretto.distributed.transport.base import (
    ConnectFailed,
    FollowerBehind,
    Limits,
    PeerGone,
    TransportEnd,
    TransportError,
    missing,
)
from stretto.distributed.transport.ring import RingReader, RingWriter
from stretto.errors import NotSupported
from stretto.ipc.sockets import is_own, name_without_file

SCHEME = "shm:"
_HELLO = struct.Struct("<8sII")  # what, rank, size
_WHAT = b"strctl-1"
_FRAME = struct.Struct("<QQ")  # number of the message, its length in bytes
_PIECE = 1 << 18
"""A long message is shown to readers in pieces of this many bytes: they copy one while the next is written."""
_SHORT = 1 << 14
"""Messages up to this many bytes are joined with their header: one copy more is cheaper than one slice more."""
SPIN_S = 20e-6
"""How long a follower looks again and again before it sleeps."""
_BELL = b"\1"


def listen(size: int, host: str | None, limits: Limits) -> SharedMemoryLeader:
    """Rank 0's end. Raises NotSupported where the system lacks anonymous files."""
    return SharedMemoryLeader(size, limits)


def connect(
    address: str, rank: int, size: int, timeout_s: float, limits: Limits, host: str | None
) -> SharedMemoryFollower:
    """The end of `rank`. Raises ConnectFailed."""
    return SharedMemoryFollower(address.removeprefix(SCHEME), rank, size, timeout_s, limits)


class SharedMemoryLeader(TransportEnd):
    """Writes each message once; each follower that sleeps costs one write to its pipe, the others nothing."""

    def __init__(self, size: int, limits: Limits) -> None:
        if not hasattr(os, "memfd_create"):
            raise NotSupported("the shared_memory transport needs Linux; choose zeromq or gloo")
        super().__init__()
        self._limits = limits
        self._ring = RingWriter(size, limits.pending_bytes)
        self._bells: dict[int, int] = {}
        self._breaks = select.poll()
        self._rank_of_fd: dict[int, int] = {}
        self._number = 0
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = name_without_file()
        self._listener.bind(_unix(name))
        self._listener.listen(max(size, 16))
        self._address = f"{SCHEME}{name}"

    @property
    def address(self) -> str:
        """`shm:@` and the name of the socket."""
        return self._address

    def wait_for_followers(self, timeout_s: float) -> None:
        """See LeaderTransport."""
        self._usable()
        deadline = time.monotonic() + timeout_s
        while self._listener is not None and len(self._bells) < self._ring.size - 1:
            left = deadline - time.monotonic()
            self._listener.settimeout(max(left, 1e-3))
            try:
                if left < 0:
                    raise TimeoutError
                with self._listener.accept()[0] as peer:
                    peer.settimeout(1.0)  # a follower speaks as soon as it is connected
                    self._admit(peer)
            except TimeoutError:
                raise self._fail(missing(set(range(1, self._ring.size)) - set(self._bells), timeout_s)) from None
        self._stop_listening()
        self.check()

    def publish(self, data: bytes) -> None:
        """See LeaderTransport."""  # hot path
        self.check()
        if len(self._bells) < self._ring.size - 1:
            raise ConnectFailed("publish before wait_for_followers")
        self._limits.check(data)
        header = _FRAME.pack(self._number, len(data))
        self._number += 1
        if len(data) <= _SHORT:
            self._write(memoryview(header + data))
        else:
            self._write(memoryview(header))
            whole = memoryview(data)
            for start in range(0, len(data), _PIECE):
                self._write(whole[start : start + _PIECE])
                self._show()
        self._show()

    def check(self) -> None:
        """See LeaderTransport."""  # hot path
        self._usable()
        for fd, _ in self._breaks.poll(0):
            rank = self._rank_of_fd[fd]
            raise self._fail(PeerGone(rank, self._ring.left(rank)))

    def close(self) -> None:
        """See LeaderTransport. Returns at once: what was published stays in memory as long as a follower has it."""
        self._set_closed()
        if self._ring.fd < 0:
            return
        self._ring.end()
        self._stop_listening()
        for fd in self._bells.values():
            os.close(fd)  # wakes the follower
        self._bells.clear()
        self._ring.close()

    def _admit(self, peer: socket.socket) -> None:
        """Give a process that connected what it needs, if it is one of the followers; tell it why not otherwise."""
        if not is_own(peer):
            return
        try:
            hello = peer.recv(_HELLO.size + 1)
        except OSError:
            hello = b""
        if len(hello) != _HELLO.size:
            return  # it died, hangs, or is something else
        what, rank, size = _HELLO.unpack(hello)
        if what != _WHAT or size != self._ring.size or not 1 <= rank < size:
            refusal = f"rank {rank} of {size} does not belong to a control plane of {self._ring.size} ranks"
        elif rank in self._bells:
            refusal = f"rank {rank} is connected already"
        else:
            ear, bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                socket.send_fds(peer, [_WHAT], [self._ring.fd, ear])
            except OSError:
                os.close(bell)
                return
            finally:
                os.close(ear)
            self._bells[rank], self._rank_of_fd[bell] = bell, rank
            self._breaks.register(bell, 0)  # errors are always reported: the follower's end is closed
            return
        with contextlib.suppress(OSError):
            peer.send(refusal.encode())

    def _write(self, piece: memoryview) -> None:
        """Write all of `piece`, waiting for room where there is none."""  # hot path
        done = self._ring.write(piece)
        if done == len(piece):
            return
        pause, deadline = 20e-6, time.monotonic() + self._limits.patience_s
        while done < len(piece):
            self._show()  # what does not fit at once can only be read away if it is shown
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
            count = self._ring.write(piece[done:])
            if count:
                done, pause, deadline = done + count, 20e-6, time.monotonic() + self._limits.patience_s
            elif time.monotonic() > deadline:
                rank, pending = self._ring.pending()
                raise self._fail(FollowerBehind(rank, pending, self._limits.patience_s))

    def _show(self) -> None:  # hot path
        self._ring.show()
        for rank in self._ring.sleepers():
            try:
                os.write(self._bells[rank], _BELL)
            except BlockingIOError:
                pass  # thousands of bells wait in the pipe: it will hear one
            except BrokenPipeError:
                raise self._fail(PeerGone(rank, self._ring.left(rank))) from None

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class SharedMemoryFollower(TransportEnd):
    """Reads the ring of the leader whose socket is called `name`. `spin_s`: how long to look before sleeping."""

    def __init__(
        self, name: str, rank: int, size: int, timeout_s: float, limits: Limits, spin_s: float = SPIN_S
    ) -> None:
        super().__init__()
        self._limits, self._spin_s = limits, spin_s
        memory, self._ear = _join(name, rank, size, timeout_s)
        try:
            self._ring = RingReader(memory, rank, size)
        except BaseException:
            os.close(self._ear)
            raise
        finally:
            os.close(memory)
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)
        self._number = 0
        self._missing: int | None = None
        """Bytes of the message being read that are still to come; None: its header is to come."""
        self._pieces: list[bytes] = []
        self._seen = 0
        """Bytes that `_take` has left unread because they were not enough; what comes after its look is waited for."""

    def receive(self, timeout_s: float | None) -> bytes | None:
        """See FollowerTransport."""  # hot path
        self._usable()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while (message := self._take()) is None:
                if not self._wait(deadline):
                    return None
        except TransportError as failure:
            self._fail(failure)
            raise
        return message

    def close(self) -> None:
        """See FollowerTransport."""
        if self._ear >= 0:
            self._ring.leave()
            self._ring.close()
            os.close(self._ear)  # breaks the pipe: the leader sees it
            self._ear = -1
            self._set_closed()

    def _take(self) -> bytes | None:
        """The next message if all of it is there; what there is of a longer one is moved out."""  # hot path
        available = self._seen = self._ring.available()
        if self._missing is None:
            if available < _FRAME.size:
                return None
            number, length = _FRAME.unpack(self._ring.read(_FRAME.size))
            if number != self._number or length > self._limits.largest_message:
                raise TransportError(
                    f"message {number} of {length:,} bytes arrived in the place of number {self._number} "
                    f"(at most {self._limits.largest_message:,} bytes)"
                )
            self._missing = length
            available -= _FRAME.size
        count = min(available, self._missing)
        self._seen = available - count
        if count:
            self._pieces.append(self._ring.read(count))
            self._missing -= count
        self._ring.release()
        if self._missing:
            return None
        message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._number, self._missing = self._number + 1, None
        self._pieces.clear()
        return message

    def _wait(self, deadline: float | None) -> bool:
        """Wait until there is more to read (True) or the deadline is over. Raises PeerGone at the end of the stream."""
        seen, now = self._seen, time.monotonic()
        spin_until = now + self._spin_s if deadline is None else min(deadline, now + self._spin_s)
        while True:
            broken = self._listen(0)  # also gives the GIL to whoever waits for it
            if self._ring.available() != seen:
                return True
            if broken:
                return self._end(seen)
            if time.monotonic() >= spin_until:
                break
        if deadline is not None and spin_until >= deadline:
            return False
        self._ring.want_bell(True)
        try:
            if self._ring.available() != seen:
                return True
            broken = self._listen(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            self._ring.want_bell(False)
        if self._ring.available() != seen:
            return True
        return self._end(seen) if broken else deadline is None or time.monotonic() < deadline

    def _listen(self, timeout_s: float | None) -> bool:
        """Wait for a bell; whether the leader's end of the pipe is closed."""
        for _, events in self._poll.poll(None if timeout_s is None else min(timeout_s * 1000, 3_600_000)):
            if events & select.POLLIN:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ear, 4096)
            return not events & select.POLLIN
        return False

    def _end(self, seen: int) -> bool:
        """The leader has ended: True if it wrote something more before that; else raises PeerGone."""
        ended = self._ring.ended()
        if self._ring.available() != seen:
            return True
        raise PeerGone(0, orderly=ended and self._missing is None and not seen)


def _unix(name: str) -> str:
    """The name as the system calls want it, which take what begins with a zero as no path."""
    return name.replace("@", "\0", 1)


def _join(name: str, rank: int, size: int, timeout_s: float) -> tuple[int, int]:
    """Ask the leader for the memory and this rank's pipe: two descriptors that the caller closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(max(timeout_s, 1e-3))
        try:
            line.connect(_unix(name))
            if not is_own(line):
                raise ConnectFailed(f"rank {rank}: who listens at {name} is another user")
            line.send(_HELLO.pack(_WHAT, rank, size))
            answer, fds, _, _ = socket.recv_fds(line, 4096, 2, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise ConnectFailed(f"rank {rank}: the leader did not answer within {timeout_s:g} s at {name}") from None
        except OSError as error:
            raise ConnectFailed(f"rank {rank}: no leader at {name}: {error}") from None
    if answer == _WHAT and len(fds) == 2:
        return fds[0], fds[1]
    for fd in fds:
        os.close(fd)
    reason = answer.decode(errors="replace") or "it ended, or waits for other ranks"
    raise ConnectFailed(f"rank {rank}: the leader at {name} refused: {reason}")
