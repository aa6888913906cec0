"""Lending a process to the engine: one that is a rank above 0, or starts all ranks of a further host. And its end.

Owns how a rank's process ends when its engine has failed and the main thread may hang in a collective.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from stretto.config import EngineConfig
from stretto.distributed.follower import Follower, FollowingRuntime
from stretto.distributed.launch import host_ranks
from stretto.distributed.patience import GRACE_SECONDS
from stretto.distributed.place import Place
from stretto.errors import EngineBroken, StrettoError


def lend_process(
    config: EngineConfig,
    place: Place,
    build: Callable[[Follower], FollowingRuntime],
    progress: Callable[[str, float], None] | None = None,
) -> NoReturn:
    """Serve the leader with this process until it stops, then raise SystemExit(0). Blocks.

    `progress` is told once that this is so. Raises EngineBroken, with the cause, if the engine fails. A process that
    was started by torchrun is a rank itself; should its main thread hang in a collective then, it ends with code 1.
    """
    if progress is not None:
        last = place.rank + (0 if place.launched else place.num_local - 1)
        ranks = f"rank {place.rank}" if last == place.rank else f"ranks {place.rank} to {last}"
        progress(f"serving the leader as {ranks} of {place.size}", 0.0)
    if not place.launched:
        host_ranks(config, place)
        raise SystemExit(0)
    end = EndOfRank(place.rank)
    follower = Follower(config, place, None, end)
    end.abort = follower.abort
    try:
        follower.run(build)
    except Exception as error:
        verdict = follower.watchdog.failure
        if verdict is None:
            verdict = follower.watchdog.broken(_reason(error))
        follower.abandon()
        end.main_thread_is_free.set()
        if not verdict:  # the leader left without a last turn
            raise SystemExit(0) from error
        raise EngineBroken(verdict) from error
    except BaseException as error:
        follower.watchdog.interrupted(type(error).__name__)
        follower.abandon()
        raise
    raise SystemExit(0)


class EndOfRank:
    """How a rank ends in a process that is the user's: its main thread is set free, and raises."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.abort: Callable[[], None] = lambda: None
        """Sets the main thread free if it waits for other ranks."""
        self.main_thread_is_free = threading.Event()

    def __call__(self, reason: str, told: bool) -> None:
        """See `Watchdog`."""
        self.abort()
        if not self.main_thread_is_free.wait(3 * GRACE_SECONDS):
            sys.stderr.write(f"stretto: rank {self._rank} ends: {reason}\n")
            sys.stderr.flush()
            os._exit(1 if reason else 0)


class EndOfProcess:
    """How a rank ends whose process is its own: at once, leaving its reason to the one that started it."""

    def __init__(self, rank: int, parent: socket.socket) -> None:
        self._rank = rank
        self._parent = parent
        self._only_once = threading.Lock()

    def __call__(self, reason: str, told: bool) -> None:
        """End this process. Called by any thread; the main thread may hang. Never returns."""
        self._only_once.acquire()  # for good: both threads may learn of a failure, and one says it
        if reason and not told:
            sys.stderr.write(f"stretto: rank {self._rank} ends: {reason}\n")
        if reason:
            self.leave_word(reason)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1 if reason else 0)

    def leave_word(self, reason: str) -> None:
        """Say why, to whom it may concern."""
        try:
            self._parent.setblocking(False)
            self._parent.send(reason.encode()[:60_000])
        except OSError:
            pass  # nobody is there


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
