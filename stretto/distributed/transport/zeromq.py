"""The control plane over ZeroMQ: an XPUB socket at the leader, an XSUB socket at each follower; ipc or TCP.

Plain PUB/SUB loses what is published before a subscription arrives, drops what a slow reader does not take, and keeps
silent about who has left. Here (1) a follower's second subscription, to a topic that names it, arrives after its first,
to all data: it proves that nothing will be lost, and its end is the news that the follower has left; (2) followers say
upstream how much they have read, so the leader bounds what waits, in bytes, and never comes to where ZeroMQ would drop;
(3) nobody reconnects: a broken connection ends the control plane; (4) messages are numbered.
PUB rather than a PUSH for each follower: one call hands a message to all of them, without a copy for each.

    leader to all:        DATA, kind, number, limits | the message
    leader to one rank:   its topic | welcome, or why it was refused
    rank to leader:       (subscription) its topic: session, rank, size, nonce;   REPORT, rank, kind, bytes read
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
import struct
import sys
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from stretto.distributed.transport.base import (
    ConnectFailed,
    FollowerBehind,
    Limits,
    PeerGone,
    TransportEnd,
    TransportError,
    missing,
)
from stretto.ipc.sockets import name_without_file

_DATA = b"D"
_HEADER = struct.Struct("<ccQ")  # DATA, kind, number
_MESSAGE, _END = b"m", b"e"
_TOPIC = struct.Struct("<c16sII8s")  # HELLO, session, rank, size, nonce
_HELLO = b"H"
_REPORT = struct.Struct("<c16sIcQ")  # REPORT, session, rank, kind, bytes read so far
_REPORT_FIRST, _READ, _LEFT = b"R", b"r", b"l"
_WELCOME = struct.Struct("<cQQ")  # kind, pending_bytes, largest_message
_WELCOME_KIND, _REFUSED = b"w", b"n"
_OVERHEAD = 64
"""What a message is counted as above its length: empty ones take memory too."""
_BREAKS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_HEARTBEAT_MS = 2000
"""Between hosts: a peer that is silent for three of these is gone, even if its host never says so."""


def listen(size: int, host: str | None, limits: Limits) -> ZeroMQLeader:
    """Rank 0's end: at `host` over TCP; None: on this host only. Raises ConnectFailed."""
    return ZeroMQLeader(size, host, limits)


def connect(address: str, rank: int, size: int, timeout_s: float, limits: Limits, host: str | None) -> ZeroMQFollower:
    """The end of `rank`. Raises ConnectFailed."""
    return ZeroMQFollower(address, rank, size, timeout_s)


def _cost(data: bytes) -> int:
    return len(data) + _OVERHEAD


def _ms(seconds: float) -> int:
    """For poll: rounded up, so that what is waited for is over afterwards."""
    return math.ceil(max(0.0, seconds) * 1000)


def _prepare(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)  # the bound is in bytes, and the leader's
    socket.setsockopt(zmq.RCVHWM, 0)
    # Never reconnect. Not -1: then ZeroMQ throws away what has arrived and was not read yet when a connection breaks.
    socket.setsockopt(zmq.RECONNECT_IVL, 2**31 - 1)
    socket.setsockopt(zmq.LINGER, 0)
    if endpoint.startswith("tcp:"):
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)


class ZeroMQLeader(TransportEnd):
    """Publishes. ZeroMQ's own thread does the sending, so `publish` is only a hand-over."""

    def __init__(self, size: int, host: str | None, limits: Limits) -> None:
        super().__init__()
        self._size, self._limits = size, limits
        self._session = secrets.token_bytes(16)
        self._topics: dict[int, bytes] = {}
        self._read: dict[int, int] = {}
        self._sent = self._number = 0
        self._slowest = 0
        self._said_goodbye: set[int] = set()
        self._closed = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        endpoint = _own_endpoint(host)
        _prepare(self._socket, endpoint)
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)  # should a bound of ZeroMQ's own be met: an error, no silence
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1024)
        if endpoint.startswith("ipc:"):
            self._socket.setsockopt(zmq.IPC_FILTER_UID, ctypes.c_int32(os.geteuid()).value)  # an int in libzmq
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectFailed(f"the control plane cannot listen at {endpoint}: {error}") from None
        self._address = f"zmq+{self._socket.getsockopt_string(zmq.LAST_ENDPOINT)}#{self._session.hex()}"

    @property
    def address(self) -> str:
        """`zmq+tcp://HOST:PORT#SESSION` or `zmq+ipc://@NAME#SESSION`."""
        return self._address

    def wait_for_followers(self, timeout_s: float) -> None:
        """See LeaderTransport."""
        deadline = time.monotonic() + timeout_s
        while len(self._topics) < self._size - 1:
            self.check()
            left = deadline - time.monotonic()
            if len(self._topics) < self._size - 1 and not self._socket.poll(_ms(min(left, 1.0))) and left <= 0:
                raise self._fail(missing(set(range(1, self._size)) - set(self._topics), timeout_s))
        # Unbinding would cut the followers off too. A second process for a rank is refused.
        self.check()

    def publish(self, data: bytes) -> None:
        """See LeaderTransport."""  # hot path
        self.check()
        if len(self._topics) < self._size - 1:
            raise ConnectFailed("publish before wait_for_followers")
        self._limits.check(data)
        cost = _cost(data)
        if self._sent - self._slowest > self._limits.room(cost):
            self._wait_for_room(cost)
        self._send(_MESSAGE, data)
        self._sent += cost

    def check(self) -> None:
        """See LeaderTransport."""  # hot path
        self._usable()
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._hear(self._socket.recv(zmq.NOBLOCK))

    def close(self) -> None:
        """See LeaderTransport. Blocks until ZeroMQ's thread has handed to the kernel what was published."""
        if self._closed:
            return
        self._closed = True
        linger = round(self._limits.linger_s * 1000) if self._topics else 0
        with contextlib.suppress(zmq.ZMQError):
            self._send(_END, b"")
        self._set_closed()
        self._socket.close(linger)
        self._context.term()

    def _send(self, kind: bytes, data: bytes) -> None:
        self._socket.send(_HEADER.pack(_DATA, kind, self._number), zmq.SNDMORE | zmq.NOBLOCK)
        self._socket.send(data, zmq.NOBLOCK)
        self._number += 1

    def _hear(self, message: bytes) -> None:
        """A follower arrives, leaves, or tells how much it has read. Strangers are not listened to."""
        if message[:1] in (b"\0", b"\1"):
            topic = message[1:]
            if len(topic) == _TOPIC.size and topic[:1] == _HELLO:
                if message[0]:
                    self._admit(topic)
                else:
                    self._lose(topic)
        elif len(message) == _REPORT.size:
            first, session, rank, kind, count = _REPORT.unpack(message)
            if first != _REPORT_FIRST or session != self._session or rank not in self._topics:
                return
            if kind == _LEFT:
                self._said_goodbye.add(rank)
            elif self._read[rank] <= count <= self._sent:
                self._read[rank] = count
            else:
                raise self._fail(TransportError(f"rank {rank} says it has read {count} bytes of {self._sent}"))

    def _admit(self, topic: bytes) -> None:
        _, session, rank, size, _ = _TOPIC.unpack(topic)
        if session != self._session:
            refusal = "this is another engine's control plane"
        elif size != self._size or not 1 <= rank < size:
            refusal = f"rank {rank} of {size} does not belong to a control plane of {self._size} ranks"
        elif rank in self._topics:
            refusal = f"rank {rank} is connected already"
        else:
            self._topics[rank], self._read[rank] = topic, self._sent
            answer = _WELCOME.pack(_WELCOME_KIND, self._limits.pending_bytes, self._limits.largest_message)
            self._socket.send_multipart([topic, answer], zmq.NOBLOCK)
            return
        self._socket.send_multipart([topic, _REFUSED + refusal.encode()], zmq.NOBLOCK)

    def _lose(self, topic: bytes) -> None:
        for rank, known in self._topics.items():
            if known == topic:
                raise self._fail(PeerGone(rank, orderly=rank in self._said_goodbye))

    def _wait_for_room(self, cost: int) -> None:
        """Wait until the slowest follower has read enough."""
        deadline = time.monotonic() + self._limits.patience_s
        while True:
            self.check()
            slowest = min(self._read.values())
            if slowest > self._slowest:
                self._slowest, deadline = slowest, time.monotonic() + self._limits.patience_s
            pending = self._sent - slowest
            if pending <= self._limits.room(cost):
                return
            left = deadline - time.monotonic()
            if not self._socket.poll(_ms(left)) and left <= 0:
                rank = min(self._read, key=lambda rank: self._read[rank])
                raise self._fail(FollowerBehind(rank, pending, self._limits.patience_s))


class ZeroMQFollower(TransportEnd):
    """Subscribes. A monitor of the connection tells when the leader is gone."""

    def __init__(self, address: str, rank: int, size: int, timeout_s: float) -> None:
        endpoint, sharp, session = address.removeprefix("zmq+").rpartition("#")
        if not sharp or len(session) != 32 or set(session) - set("0123456789abcdef"):
            raise ValueError(f"not the address of a ZeroMQ control plane: {address!r}")
        super().__init__()
        self._rank, self._session = rank, bytes.fromhex(session)
        self._number = self._read = self._reported = 0
        self._broken = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XSUB)
        _prepare(self._socket, endpoint)
        self._monitor = self._socket.get_monitor_socket(_BREAKS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            pending, self._largest = self._join(endpoint, rank, size, timeout_s)
        except BaseException:
            self.close()
            raise
        self._report_every = pending // 8

    def receive(self, timeout_s: float | None) -> bytes | None:
        """See FollowerTransport."""  # hot path
        self._usable()
        try:
            frames = self._next(timeout_s)
            return None if frames is None else self._open(frames)
        except TransportError as failure:
            self._fail(failure)
            raise

    def close(self) -> None:
        """See FollowerTransport."""
        if self._context.closed:
            return
        leader_gone = isinstance(self._failure, PeerGone)
        self._set_closed()
        with contextlib.suppress(zmq.ZMQError):
            self._report(_LEFT)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0 if leader_gone else 200)  # milliseconds for the goodbye
        self._context.term()

    def _join(self, endpoint: str, rank: int, size: int, timeout_s: float) -> tuple[int, int]:
        """Subscribe, and wait for the leader's welcome: its pending_bytes and largest_message."""
        topic = _TOPIC.pack(_HELLO, self._session, rank, size, secrets.token_bytes(8))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConnectFailed(f"rank {rank}: not an address to connect to: {endpoint}: {error}") from None
        self._socket.send(b"\1" + _DATA)
        self._socket.send(b"\1" + topic)
        try:
            frames = self._next(timeout_s)
        except PeerGone:
            raise ConnectFailed(f"rank {rank}: no leader at {endpoint}, or it ended") from None
        if frames is None:
            raise ConnectFailed(f"rank {rank}: the leader did not answer within {timeout_s:g} s at {endpoint}")
        if len(frames) == 2 and frames[0] == topic:
            if frames[1][:1] == _REFUSED:
                raise ConnectFailed(f"rank {rank}: the leader at {endpoint} refused: {frames[1][1:].decode()}")
            if len(frames[1]) == _WELCOME.size:
                _, pending, largest = _WELCOME.unpack(frames[1])
                return pending, largest
        raise ConnectFailed(f"rank {rank}: what answers at {endpoint} is no leader of a control plane")

    def _next(self, timeout_s: float | None) -> list[bytes] | None:
        """The frames of the next message, or None in time. Raises PeerGone after the last one."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                pass
            if self._broken:
                raise PeerGone(0, orderly=False)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(None if left is None else _ms(left)))
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                self._broken = True  # but first what came before it
            elif not ready and left is not None:
                return None

    def _open(self, frames: list[bytes]) -> bytes:
        """The message in these frames. Raises at the end, or if they are not what comes next."""
        if len(frames) != 2 or len(frames[0]) != _HEADER.size or len(frames[1]) > self._largest:
            raise TransportError(f"what arrived is not a message of a leader: {len(frames)} frames")
        _, kind, number = _HEADER.unpack(frames[0])
        if number != self._number:
            raise TransportError(f"message {number} arrived in the place of number {self._number}")
        if kind == _END:
            raise PeerGone(0, orderly=True)
        self._number += 1
        self._read += _cost(frames[1])
        if self._read - self._reported >= self._report_every:
            self._report(_READ)
            self._reported = self._read
        return frames[1]

    def _report(self, kind: bytes) -> None:
        self._socket.send(_REPORT.pack(_REPORT_FIRST, self._session, self._rank, kind, self._read), zmq.NOBLOCK)


def _own_endpoint(host: str | None) -> str:
    """Where to listen; over TCP at any free port. On one host no file is needed, which could be left behind."""
    if host is None:
        return f"ipc://{name_without_file()}" if sys.platform == "linux" else "tcp://127.0.0.1:*"
    return f"tcp://[{host}]:*" if ":" in str(host) else f"tcp://{host}:*"
