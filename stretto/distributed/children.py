"""Starting the other ranks of this host as processes, and seeing whether they still run.

Owns those processes from start to end. What their end means is for others to say.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from stretto.config import EngineConfig
from stretto.distributed.place import Place
from stretto.interrupts import starting_children

RANK_MODULE = "stretto.distributed.rank_process"
STOPPED_SECONDS = 1.5
"""How long a process may be stopped (SIGSTOP) before it counts as hung: Ctrl-Z stops all of them, one by one."""

STOPPED = "hangs: its process is stopped (SIGSTOP)"

_POLL_SECONDS = 0.01


class RankSettings(msgspec.Struct, frozen=True):
    """What a rank's process is told by the one that starts it: over a private pipe, for options can be secrets."""

    engine: EngineConfig
    place: Place
    parent_pid: int
    log_level: str


class Stopped:
    """Whether a process of this host has been stopped for so long that it counts as hung. Looked at now and then."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: float | None = None

    def look(self) -> bool:
        """Whether it has, for STOPPED_SECONDS. Never blocks."""
        if not is_stopped(self._pid):
            self._since = None
            return False
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since >= STOPPED_SECONDS


class Sibling(Stopped):
    """A rank of this host that another program (torchrun) has started, as it has started this one."""

    @classmethod
    def find(cls, pid: int) -> Sibling | None:
        """The process `pid`, if it is one."""
        return cls(pid) if _parent_of(pid) == os.getppid() else None

    def end(self) -> None:
        """Kill it if it is stopped: it would keep its device, and cannot end by itself."""
        if is_stopped(self._pid) and _parent_of(self._pid) == os.getppid():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class Child:
    """The process of one rank, and the line to it that tells each side that the other is gone."""

    def __init__(self, settings: RankSettings, environment: dict[str, str], module: str = RANK_MODULE) -> None:
        """Start `module` for it. Its parent in the kernel's eyes is the calling *thread*: it is killed with that."""
        self.place = settings.place
        ours, theirs = socket.socketpair()
        with theirs, starting_children():
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the user's program
                env=environment,
            )
        self._line = ours
        self._parent = os.getpid()
        self._stopped = Stopped(self.process.pid)
        with suppress(OSError):  # it may have died already
            ours.sendall(msgspec.json.encode(settings) + b"\n")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def trouble(self) -> str | None:
        """Why it does not run, in a few words; None while it does. Never blocks."""
        code = self.process.poll()
        if code is not None:
            return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code} ({_signal(-code)})"
        return STOPPED if self._stopped.look() else None

    def last_words(self) -> str:
        """What it left to say when it ended; empty if nothing."""
        with suppress(OSError):
            self._line.setblocking(False)
            return self._line.recv(1 << 16).decode(errors="replace").strip()
        return ""

    def kill(self) -> None:
        """End it now, whatever it does. Nothing in a forked child of its parent: it is not that one's to end."""
        if os.getpid() == self._parent and self.process.poll() is None:
            self.process.kill()

    def wait(self, until: float) -> bool:
        """Whether it has ended by the monotonic time `until`. Blocks."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        return self.process.poll() is not None

    def close(self) -> None:
        """Kill it if it still runs, and take away what is left of it. Blocks for an instant."""
        self.kill()
        self.process.wait()
        self._line.close()


def end_children(children: list[Child], until: float) -> None:
    """Let them end by themselves until the monotonic time `until`, then kill those that did not. Blocks.

    One that is stopped will not end, and is not waited for.
    """
    while any(child.process.poll() is None and child.trouble() is None for child in children):
        if time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    for child in children:
        child.close()


def threads_of_rank(config: EngineConfig, place: Place) -> int:
    """CPU threads of each rank: as given, else an even share of the cores that this process may use."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // place.num_local)
    return config.num_threads or (int(told) if told.isdigit() and int(told) else share)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal or a debugger (Linux)."""
    return _state_of(pid)[0] in ("T", "t")


def _parent_of(pid: int) -> int:
    return int(_state_of(pid)[1])


def _state_of(pid: int) -> list[str]:
    """State and parent of a process, and more; "-" and -1 if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ["-", "-1"]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
