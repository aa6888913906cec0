"""What wakes a sleeping process fastest: the ways in which the shared-memory ring could ring for its followers.

Two processes wake each other in turns; half of a round is one way. Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import socket
import time
from collections.abc import Callable

import numpy as np
from control_plane_rank import fork

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
Ends = tuple[Callable[[], None], Callable[[], None]]
"""Ring for the other side; wait until it rings."""


def _through(waited: int, rung: Callable[[], object], heard: Callable[[], object]) -> Ends:
    poll = select.poll()
    poll.register(waited, select.POLLIN)

    def wait() -> None:
        poll.poll()
        heard()

    return lambda: rung() and None, wait


def _pipe() -> tuple[Ends, Ends]:
    (a_reads, b_writes), (b_reads, a_writes) = os.pipe(), os.pipe()
    return (
        _through(a_reads, lambda: os.write(a_writes, b"1"), lambda: os.read(a_reads, 64)),
        _through(b_reads, lambda: os.write(b_writes, b"1"), lambda: os.read(b_reads, 64)),
    )


def _eventfd() -> tuple[Ends, Ends]:
    a, b = os.eventfd(0), os.eventfd(0)
    return (
        _through(a, lambda: os.eventfd_write(b, 1), lambda: os.eventfd_read(a)),
        _through(b, lambda: os.eventfd_write(a, 1), lambda: os.eventfd_read(b)),
    )


def _socket() -> tuple[Ends, Ends]:
    a, b = socket.socketpair()
    return (
        _through(a.fileno(), lambda: a.send(b"1"), lambda: a.recv(64)),
        _through(b.fileno(), lambda: b.send(b"1"), lambda: b.recv(64)),
    )


def _futex() -> tuple[Ends, Ends]:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    words = memoryview(memory).cast("I")
    call = ctypes.CDLL(None).syscall

    def end(own: int, other: int) -> Ends:
        heard = 0

        def ring() -> None:
            words[other] += 1
            call(_FUTEX, ctypes.c_void_p(start + 4 * other), 1, 1, None, None, 0)

        def wait() -> None:
            nonlocal heard
            while words[own] == heard:
                call(_FUTEX, ctypes.c_void_p(start + 4 * own), 0, heard, None, None, 0)
            heard += 1

        return ring, wait

    return end(0, 64), end(64, 0)


def measure_bells(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds from the ring to the waking, p50 and p99, by kind of bell."""
    kinds = {"pipe": _pipe, "eventfd": _eventfd, "socket": _socket} | ({"futex": _futex} if _FUTEX else {})
    return {name: _measure(make, rounds) for name, make in kinds.items()}


def _measure(make: Callable[[], tuple[Ends, Ends]], rounds: int) -> dict[str, float]:
    (ring, wait), (answer, hear) = make()

    def echo() -> None:
        for _ in range(rounds):
            hear()
            answer()

    child = fork(echo)
    times = []
    for _ in range(rounds):
        before = time.monotonic_ns()
        ring()
        wait()
        times.append((time.monotonic_ns() - before) / 2000)
    os.waitpid(child, 0)
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return {"p50": round(p50, 1), "p99": round(p99, 1)}
