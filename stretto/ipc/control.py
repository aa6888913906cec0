"""The line between the parent process and each of its children: a socket pair with one JSON message a line.

It also tells each side that the other is gone: when a process dies, however it dies, its end reads as closed.
Nothing about requests travels here, and what is said is rare.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec


class EngineInfo(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is ready; what it is."""

    model: str
    device: str
    dtype: str
    tokenizer_kind: str | None
    """`directory`, `gguf`, or None: the model came without a tokenizer."""
    tokenizer_path: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    page_size: int
    num_pages: int
    overlap_depth: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The engine is loading: `fraction` (0 to 1) of `what` is done."""

    what: str
    fraction: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The child cannot start, for a reason that the operator can read."""

    message: str
    bad_input: bool


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """A front end takes requests."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A front end's event loop turns."""


class EngineStuck(msgspec.Struct, frozen=True, tag="stuck"):
    """A front end got no answer from the engine in time."""


class EngineGone(msgspec.Struct, frozen=True, tag="gone"):
    """To front ends: the engine is dead; fail what is open."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To front ends: take no new requests, let running ones finish for `seconds`, then leave."""

    seconds: float


class WorkerGone(msgspec.Struct, frozen=True, tag="worker_gone"):
    """To the engine: the front end of this number is dead; end its requests."""

    worker: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """To the engine: leave."""


Control: TypeAlias = (
    EngineInfo | Progress | Failed | Serving | Beat | EngineStuck | EngineGone | Drain | WorkerGone | Stop
)

_decoder = msgspec.json.Decoder(Control)
MAX_LINE = 1 << 20


class ControlLine:
    """One end of the line. `send` never blocks for long: lines are short and rare. Any thread may send."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._buffer = b""
        self.closed = False
        """The other side is gone."""

    @classmethod
    def from_fd(cls, fd: int) -> ControlLine:
        """The end that was inherited as `fd`."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For polling: readable when there is a message, or when the other side is gone."""
        return self._end.fileno()

    def send(self, message: Control) -> None:
        """Say something; nothing happens if the other side is gone."""
        with self._sending:
            try:
                self._end.sendall(msgspec.json.encode(message) + b"\n")
            except OSError:
                self.closed = True

    def receive(self) -> list[Control]:
        """Read what is there (blocks until something is); sets `closed` at the end of the line."""
        try:
            data = self._end.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE:
            raise ValueError("a control message is too long")
        return [_decoder.decode(line) for line in lines if line]

    def messages(self) -> Iterator[Control]:
        """All messages until the line ends. Blocks."""
        while not self.closed:
            yield from self.receive()

    def close(self) -> None:
        """Hang up."""
        self._end.close()


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for `sig` when the parent process `parent` dies (Linux); leaves at once if it is dead already."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave_when_closed(fd: int, directory: Path | None) -> None:
    """Watch `fd` in a thread of its own; when it closes, remove the private `directory` and end this process at once.

    A thread, so that a busy or stuck event loop does not keep an orphan alive. But if it is closed already, this does
    not return.
    """

    def leave() -> None:
        try:
            _last_word(b"stretto: the parent process of the server is gone, and so this front end ends\n")
        finally:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            os._exit(1)

    def watch() -> None:
        while os.read(fd, 1):
            pass
        leave()

    poll = select.poll()
    poll.register(fd, 0)  # only its end
    if poll.poll(0):
        leave()
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _last_word(line: bytes) -> None:
    """Say something on standard error if somebody reads it, and nothing more: what breaks from now on is no news."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with suppress(OSError):
        if poll.poll(0) == [(2, select.POLLOUT)]:
            os.write(2, line)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
