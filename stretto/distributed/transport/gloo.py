"""The control plane over Gloo: broadcasts on a group of its own, apart from any group that carries tensors; TCP.

The leader starts broadcasts and does not wait for them: Gloo's threads finish them when every follower takes part. A
message is one broadcast of a fixed frame (kind, number, length, and the message itself if it is short), and a second
one of the bytes if it is long. Gloo can neither end a broadcast nor tell who broke it, so who closes says so in the
store, and everybody who has waited for long looks there. This module imports torch; the other transports do not.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections import deque
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists none of its stores
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

from stretto.distributed.forks import keep_for_good, let_go
from stretto.distributed.transport.base import (
    ConnectFailed,
    FollowerBehind,
    Limits,
    PeerGone,
    TransportEnd,
    TransportError,
    missing,
)

_HEADER = struct.Struct("<QQQ")  # kind, number, length
_INLINE, _LONG, _END = 1, 2, 3
FRAME_BYTES = 1024
_SHORT = FRAME_BYTES - _HEADER.size
_OVERHEAD = FRAME_BYTES
_FOR_EVER = timedelta(days=3650)
_LOOK_S = 0.5
"""How often somebody who waits looks into the store for who has closed."""
_SETTLE_S = 1.0
"""How long `close` waits for broadcasts to ranks that have left."""
_LEFT, _SESSION, _SIZE = "left", "session", "size"


def listen(size: int, host: str | None, limits: Limits) -> GlooLeader:
    """Rank 0's end, with the store at `host` (None: 127.0.0.1). Raises ConnectFailed."""
    return GlooLeader(size, host or "127.0.0.1", limits)


def connect(address: str, rank: int, size: int, timeout_s: float, limits: Limits, host: str | None) -> GlooFollower:
    """The end of `rank`; returns when all ranks are there. Raises ConnectFailed."""
    return GlooFollower(address, rank, size, timeout_s, limits, host)


class _Group:
    """A Gloo group for broadcasts from rank 0, and the store that it was made from.

    The destructor of the group waits for its broadcasts, holding the GIL: that must never happen, not even when the
    interpreter ends, and at either end one is nearly always under way. So it is kept until it is closed.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout_s: float) -> None:
        self.store, self.rank, self.size = store, rank, size
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()  # the public way is by network interface, not by address
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=max(timeout_s, 1e-3))
        self._group: Any = gloo(PrefixStore("gloo", store), rank, size, options)
        keep_for_good(self._group)
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        self._options.timeout = _FOR_EVER

    def broadcast(self, buffer: bytearray) -> Any:
        """Start a broadcast of `buffer` (not empty, kept alive by the result); returns its work."""
        return self._group.broadcast([torch.frombuffer(buffer, dtype=torch.uint8)], self._options)

    def gone(self, error: Exception) -> PeerGone:
        """The error for a broadcast that failed."""
        return self.left() or PeerGone(1 - self.rank if self.size == 2 else None, False, str(error).splitlines()[0])

    def left(self) -> PeerGone | None:
        """Who has said in the store that it left; not to be asked for each message. Blocks for a round trip."""
        try:
            if not self.store.check([_LEFT]):
                return None
            rank = int(self.store.get(_LEFT))
        except RuntimeError:
            return None if self.rank == 0 else PeerGone(0, False)
        return None if rank == self.rank else PeerGone(rank, True)

    def leave(self) -> None:
        """Tell the others."""
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(_LEFT, "", str(self.rank))

    def close(self, busy: bool) -> None:
        """End the connections. Once. `busy`: a broadcast has not ended; then they stay until this process ends."""
        if not busy:
            let_go(self._group)
        self._group = None


class GlooLeader(TransportEnd):
    """Starts a broadcast, or two, for each message and keeps them until they have ended."""

    def __init__(self, size: int, host: str, limits: Limits) -> None:
        super().__init__()
        self._size, self._host, self._limits = size, host, limits
        self._running: deque[tuple[Any, int]] = deque()
        """Broadcasts that have not ended when last looked at, oldest first, and what each is counted as."""
        self._pending = self._number = 0
        self._looked = 0.0
        self._group: _Group | None = None
        self._closed = False
        session = secrets.token_hex(16)
        try:
            # Bound here, because a store that is told a port listens at all addresses of the host.
            family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listener:
                listener.bind(where)
                listener.listen(max(size, 16))
                port = listener.getsockname()[1]
                server = TCPStore(
                    host, port, None, True, timedelta(seconds=30), False, master_listen_fd=listener.detach()
                )
        except (OSError, RuntimeError) as error:
            raise ConnectFailed(f"the control plane cannot listen at {host}: {error}") from None
        self._store: Store | None = PrefixStore(session, server)
        self._store.set(_SIZE, str(size))
        server.set(_SESSION, session)
        self._address = f"gloo://{f'[{host}]' if ':' in host else host}:{port}#{session}"

    @property
    def address(self) -> str:
        """`gloo://HOST:PORT#SESSION` of the store."""
        return self._address

    def wait_for_followers(self, timeout_s: float) -> None:
        """See LeaderTransport."""
        self._usable()
        store = self._store
        if self._group is not None or store is None:
            return
        deadline = time.monotonic() + timeout_s
        waiting = set(range(1, self._size))
        while waiting := {rank for rank in waiting if not store.check([_claim(rank)])}:
            self._usable()  # another thread may have closed it
            if time.monotonic() > deadline:
                raise self._fail(missing(waiting, timeout_s))
            time.sleep(0.005)
        left = max(deadline - time.monotonic(), 1.0)
        try:
            self._group = _Group(store, 0, self._size, self._host, left)
        except RuntimeError as error:
            raise self._fail(ConnectFailed(f"a rank ended, or cannot be reached, at its start: {error}")) from None

    def publish(self, data: bytes) -> None:
        """See LeaderTransport."""  # hot path
        self.check()
        if self._group is None:
            raise ConnectFailed("publish before wait_for_followers")
        self._limits.check(data)
        cost = len(data) + _OVERHEAD
        room = self._limits.room(cost)
        if self._pending > room:
            self._wait_for_room(room)
        long = len(data) > _SHORT
        self._start(_frame(_LONG if long else _INLINE, self._number, len(data), b"" if long else data), _OVERHEAD)
        if long:
            self._start(bytearray(data), len(data))
        self._number += 1

    def check(self) -> None:
        """See LeaderTransport."""  # hot path
        self._usable()
        if not self._running:
            return
        self._reap()
        if self._running and (now := time.monotonic()) - self._looked > _LOOK_S:
            self._looked = now
            if self._group is not None and (gone := self._group.left()) is not None:
                raise self._fail(gone)

    def close(self) -> None:
        """See LeaderTransport."""
        if self._closed:
            return
        self._closed = True
        if self._group is not None:
            with contextlib.suppress(TransportError, RuntimeError):
                if self._failure is None:
                    self._start(_frame(_END, self._number, 0, b""), _OVERHEAD)
                deadline = time.monotonic() + self._limits.linger_s
                while self._running and (left := deadline - time.monotonic()) > 0 and self._group.left() is None:
                    _wait(self._running[0][0], min(left, _LOOK_S / 5))
                    self._reap()
            self._group.leave()
            # Who has left takes its connections along, and what waited for it ends soon.
            deadline = time.monotonic() + _SETTLE_S
            while self._is_busy() and time.monotonic() < deadline:
                time.sleep(_LOOK_S / 5)
            self._group.close(busy=self._is_busy())
        self._set_closed()
        self._running.clear()
        self._group = self._store = None

    def _is_busy(self) -> bool:
        return any(not work.is_completed() for work, _ in self._running)

    def _start(self, buffer: bytearray, cost: int) -> None:
        assert self._group is not None
        try:
            work = self._group.broadcast(buffer)
        except RuntimeError as error:
            raise self._fail(self._group.gone(error)) from None
        self._running.append((work, cost))
        self._pending += cost

    def _reap(self) -> None:
        """Forget broadcasts that have ended. Raises PeerGone if one failed."""
        assert self._group is not None
        while self._running and self._running[0][0].is_completed():
            work, cost = self._running.popleft()
            self._pending -= cost
            try:
                work.wait()
            except RuntimeError as error:
                raise self._fail(self._group.gone(error)) from None

    def _wait_for_room(self, room: int) -> None:
        deadline, before = time.monotonic() + self._limits.patience_s, self._pending
        while self._pending > room:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._fail(FollowerBehind(None, self._pending, self._limits.patience_s))
            _wait(self._running[0][0], min(left, _LOOK_S))
            self.check()
            if self._pending < before:
                deadline, before = time.monotonic() + self._limits.patience_s, self._pending


class GlooFollower(TransportEnd):
    """Takes part in the leader's broadcasts, one at a time."""

    def __init__(self, address: str, rank: int, size: int, timeout_s: float, limits: Limits, host: str | None) -> None:
        super().__init__()
        self._limits = limits
        self._number = 0
        self._frame = bytearray(FRAME_BYTES)
        self._data: bytearray | None = None
        """Where the bytes of a long message go; None: a frame is to come."""
        self._work: Any = None
        self._group: _Group | None = _join(address, rank, size, timeout_s, host)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """See FollowerTransport."""  # hot path
        self._usable()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                if not self._ended(self._frame if self._data is None else self._data, deadline):
                    return None
                self._work = None
                message = self._open_frame() if self._data is None else bytes(self._data)
                if message is not None:
                    self._data, self._number = None, self._number + 1
                    return message
        except TransportError as failure:
            self._fail(failure)
            raise

    def close(self) -> None:
        """See FollowerTransport."""
        if self._group is None:
            return
        self._set_closed()
        self._group.leave()
        self._group.close(busy=self._work is not None and not self._work.is_completed())
        self._work = self._group = None

    def _ended(self, buffer: bytearray, deadline: float | None) -> bool:
        """Take part in the next broadcast, into `buffer`; whether it ended in time."""
        assert self._group is not None
        try:
            if self._work is None:
                self._work = self._group.broadcast(buffer)
            while not self._work.is_completed():
                left = _LOOK_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                _wait(self._work, min(left, _LOOK_S))
                if left >= _LOOK_S and not self._work.is_completed() and (gone := self._group.left()) is not None:
                    raise gone
            self._work.wait()
        except RuntimeError as error:
            raise self._group.gone(error) from None
        return True

    def _open_frame(self) -> bytes | None:
        """The message in the frame; None if its bytes come in a broadcast of their own. Raises at the end."""
        kind, number, length = _HEADER.unpack_from(self._frame)
        longest = _SHORT if kind == _INLINE else self._limits.largest_message
        if kind not in (_INLINE, _LONG, _END) or number != self._number or length > longest:
            raise TransportError(
                f"message {number} of {length:,} bytes and kind {kind} arrived in the place of number {self._number}"
            )
        if kind == _END:
            raise PeerGone(0, orderly=True)
        if kind == _LONG:
            self._data = bytearray(length)
            return None
        return bytes(self._frame[_HEADER.size : _HEADER.size + length])


def _claim(rank: int) -> str:
    return f"rank {rank}"


def _frame(kind: int, number: int, length: int, data: bytes) -> bytearray:
    return bytearray((_HEADER.pack(kind, number, length) + data).ljust(FRAME_BYTES, b"\0"))


def _wait(work: Any, timeout_s: float) -> None:
    """Wait until `work` has ended or the time is over; an error of the work itself is raised by its own `wait()`."""
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=max(timeout_s, 1e-3)))  # 0 would mean: without end


def _join(address: str, rank: int, size: int, timeout_s: float, host: str | None) -> _Group:
    parts = urlsplit(address)
    if not parts.hostname or not parts.port or len(parts.fragment) != 32:
        raise ValueError(f"not the address of a Gloo control plane: {address!r}")
    deadline = time.monotonic() + timeout_s
    try:
        server = TCPStore(
            parts.hostname, parts.port, None, False, timedelta(seconds=max(timeout_s, 1e-3)), wait_for_workers=False
        )
        if not server.check([_SESSION]) or server.get(_SESSION).decode() != parts.fragment:
            raise ConnectFailed(f"rank {rank}: the leader at {address} refused: this is another engine's control plane")
        store = PrefixStore(parts.fragment, server)
        if (ranks := int(store.get(_SIZE))) != size:
            raise ConnectFailed(
                f"rank {rank}: the leader at {address} refused: rank {rank} of {size} does not belong to a control "
                f"plane of {ranks} ranks"
            )
        if store.add(_claim(rank), 1) > 1:
            raise ConnectFailed(f"rank {rank}: the leader at {address} refused: rank {rank} is connected already")
        return _Group(store, rank, size, host or _own_address(parts.hostname, parts.port), deadline - time.monotonic())
    except (OSError, RuntimeError) as error:
        raise ConnectFailed(f"rank {rank}: no leader at {address}, or a rank is missing: {error}") from None


def _own_address(host: str, port: int) -> str:
    """The address of this host on its way to the leader's. Sends nothing."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
