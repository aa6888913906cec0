"""What a test leaves behind, and must not: processes, listening sockets, shared memory."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.server_process import alive

_SHARED = ("stretto", "torch", "gloo", "nccl", "psm_", "sem.")
"""How names of what Stretto and its libraries could leave in /dev/shm begin; other programs use it too."""


def children_of(pid: int) -> list[int]:
    """Processes that run and were started by `pid`, and those that these have started."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            if entry.name.isdigit():
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    parents.setdefault(int(parent), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        todo += (started := parents.get(todo.pop(), []))
        found += started
    return sorted(found)


def ranks_of(pid: int) -> list[int]:
    """Those of `children_of` that are ranks: a test process has other children, too."""
    found = []
    for child in children_of(pid):
        with suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"stretto.distributed.rank_process" in command or b"fake_rank" in command:
                found.append(child)
    return found


def listening() -> set[str]:
    """Addresses at which this process listens for TCP connections."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    found.add(fields[1])
    return found


@contextmanager
def nothing_left(seconds: float = 5.0) -> Iterator[None]:
    """Fails if, soon after the block, more is there than before it."""
    gc.collect()

    def here() -> tuple[set[int], set[str], set[str]]:
        shared = {name for name in os.listdir("/dev/shm") if name.startswith(_SHARED)}
        return set(children_of(os.getpid())), listening(), shared

    before = here()
    yield
    until = time.monotonic() + seconds
    while True:
        gc.collect()
        left = [now - then for now, then in zip(here(), before, strict=True)]
        if not any(left):
            return
        assert time.monotonic() < until, f"left: processes {left[0]}, ports {left[1]}, shared memory {left[2]}"
        time.sleep(0.05)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_dead(pids: list[int], seconds: float = 10.0) -> None:
    """Fails if one of these processes still runs then."""
    until = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < until, f"still alive: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)
