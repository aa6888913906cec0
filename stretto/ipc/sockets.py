"""Sockets of one host. Between front ends and engine: ZeroMQ, ipc files in a directory that only this user can enter.

Where nobody is sure to live long enough to remove a file: names without one (Linux), which end with their socket.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

import zmq

from stretto.errors import StrettoError

_LONGEST_PATH = 100
"""Unix socket paths end at 107 bytes."""
_CREDENTIALS = struct.Struct("iII")  # process, user, group
SEND_LIMIT = 20_000
"""Messages that may wait for a peer that does not read; more than that and it counts as dead."""
LARGEST_MESSAGE = 256 * 2**20


def make_private_directory() -> Path:
    """A new directory with mode 0700 for sockets and settings; its owner removes it. Raises StrettoError."""
    directory = Path(tempfile.mkdtemp(prefix="stretto-"))
    if len(str(directory / "engine.sock")) > _LONGEST_PATH:
        shutil.rmtree(directory)
        raise StrettoError(f"the path of the temporary directory is too long for sockets: {directory}; set TMPDIR")
    return directory


def name_without_file() -> str:
    """A new name for a socket that needs no file, as libzmq writes it: `@` and the rest. Linux.

    Any user of the host may connect to it: whoever listens there asks whether the other `is_own`.
    """
    return f"@stretto-{secrets.token_hex(16)}"


def is_own(peer: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's. Linux."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def engine_address(directory: Path) -> str:
    """Where the engine listens."""
    return f"ipc://{directory / 'engine.sock'}"


def identity(worker: int) -> bytes:
    """How front end number `worker` is called."""
    return b"worker-%d" % worker


def worker_of(name: bytes) -> int | None:
    """The front end of this name."""
    prefix, _, number = name.partition(b"-")
    return int(number) if prefix == b"worker" and number.isdigit() else None


def limit(socket: Any) -> None:
    """Bound what a socket keeps and what it takes; nothing keeps a process alive that wants to leave."""
    socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
    socket.setsockopt(zmq.RCVHWM, SEND_LIMIT)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    socket.setsockopt(zmq.LINGER, 0)


def engine_socket(context: zmq.Context[Any], directory: Path) -> zmq.Socket[bytes]:
    """The engine's end; sending never blocks: it raises zmq.Again (peer too slow) or ZMQError (peer gone)."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    limit(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(engine_address(directory))
    return socket
