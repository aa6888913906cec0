"""A rank of the control plane as a real process that does what a test tells it, one thing at a time.

Forked from a server that has imported torch once, so that starting (and killing) one takes milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterable
from multiprocessing import forkserver
from typing import Any

import torch  # noqa: F401  # for the server that ranks are forked from

from stretto.distributed.transport import PeerGone, TransportError, connect, listen

WAIT_S = 60.0
_PACKAGE = "tests.helpers.transport_rank"


def message(index: int, length: int) -> bytes:
    """Bytes that no other index has (from a few bytes on)."""
    return hashlib.shake_128(b"%d" % index).digest(length)


def digest(data: bytes) -> tuple[int, str]:
    """What ranks report of a message."""
    return len(data), hashlib.blake2b(data, digest_size=8).hexdigest()


def digests(messages: Iterable[bytes]) -> list[tuple[int, str]]:
    return [digest(data) for data in messages]


class _Rank:
    """What runs in the process."""

    def __init__(self) -> None:
        self.end: Any = None

    def temporary_directory(self, path: str) -> None:
        tempfile.tempdir = path

    def listen(self, *args: Any) -> str:
        self.end = listen(*args)
        return str(self.end.address)

    def wait(self, timeout_s: float) -> None:
        self.end.wait_for_followers(timeout_s)

    def publish(self, sizes: list[int]) -> None:
        for index, length in enumerate(sizes):
            self.end.publish(message(index, length))

    def connect(self, *args: Any) -> None:
        self.end = connect(*args)

    def receive(self, count: int, timeout_s: float | None) -> list[tuple[int, str] | None]:
        """`count` messages; None where one did not come in time."""
        return [None if data is None else digest(data) for data in (self.end.receive(timeout_s) for _ in range(count))]

    def receive_all(self) -> tuple[list[tuple[int, str]], int | None, bool]:
        """Everything until the end, and who ended it how."""
        got: list[tuple[int, str]] = []
        try:
            while True:
                got.append(digest(self.end.receive(None)))
        except PeerGone as gone:
            return got, gone.rank, gone.orderly

    def close(self) -> None:
        self.end.close()
        self.end.close()


def _serve(line: Any) -> None:
    rank = _Rank()
    with contextlib.suppress(EOFError):
        while True:
            name, args = line.recv()
            try:
                line.send((True, getattr(rank, name)(*args)))
            except (TransportError, ValueError) as error:
                line.send((False, f"{type(error).__name__}: {error}"))
    os._exit(0)  # as engine processes end


def start_server() -> None:
    """Start the process that ranks are forked from; later ranks start in milliseconds."""
    forkserver.set_forkserver_preload([_PACKAGE, "pytest"])
    forkserver.ensure_running()


class Failed(Exception):
    """What a rank raised, as text."""


class RankProcess:
    """The test's side of one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, name: str, *args: Any) -> None:
        """Tell it to do something."""
        self._line.send((name, args))

    def result(self) -> Any:
        """What came of it. Raises Failed."""
        if not self._line.poll(WAIT_S):
            raise TimeoutError("a rank hangs")
        fine, result = self._line.recv()
        if not fine:
            raise Failed(result)
        return result

    def do(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.result()

    def kill(self) -> None:
        """As the out-of-memory killer does."""
        self._process.kill()
        self._process.join()
        self._line.close()
