"""Follower: a rank above 0. Joins the leader's engine, does its turns, and ends when the leader says or is gone.

Owns the follower's connections and its end. Nothing ever comes in here but the leader's turns.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from stretto.config import EngineConfig, SchedulerConfig
from stretto.distributed.agreement import (
    MINIMUM,
    checks,
    environment_facts,
    model_facts,
    option_facts,
    size_facts,
    version_facts,
)
from stretto.distributed.forks import keep_for_good
from stretto.distributed.link import PROTOCOL, Beat, Digest, Hello, Link, Loading
from stretto.distributed.patience import TICK_SECONDS
from stretto.distributed.place import Place
from stretto.distributed.rendezvous import connect_to_leader, join_store
from stretto.distributed.watch import MEET_SECONDS
from stretto.distributed.watchdog import Watchdog
from stretto.errors import EngineBroken

if TYPE_CHECKING:
    from stretto.device.base import Device
    from stretto.distributed.group import TensorGroup
    from stretto.distributed.transport import FollowerTransport
    from stretto.models.config import ModelConfig
    from stretto.models.resolve import ResolvedModel
    from stretto.scheduler.loop import Witness
    from stretto.scheduler.scheduler import Scheduler
    from stretto.scheduler.turns import Inbox, TurnSource

logger = logging.getLogger("stretto.ranks")

LEADER_NAME = "the leader (rank 0)"
CONNECT_SECONDS = 60.0
_TELL_SECONDS = 0.2


class FollowingRuntime(Protocol):
    """The engine of a follower."""

    def follow(self) -> int:
        """Do the leader's turns up to the last one; the number of steps."""

    def beat(self, phase: str) -> Beat:
        """What its loop does, in this phase of the rank's life. Any thread."""

    def close(self) -> None:
        """Let launched steps end, then end the device."""


class Follower:
    """`Member` for a rank above 0."""

    def __init__(
        self,
        config: EngineConfig,
        place: Place,
        parent: socket.socket | None,
        end: Callable[[str, bool], None],
        parent_pid: int | None = None,
    ) -> None:
        """Find the leader; blocks until it is there. For the rest see `Watchdog`. Raises EngineBroken."""
        self.place = place
        self._config = config
        waits_since = time.monotonic()

        def waiting(why: str) -> None:
            nonlocal waits_since
            if time.monotonic() - waits_since > 10.0:
                waits_since = time.monotonic()
                where = place.address or ("?", 0)
                logger.warning("rank %d waits for the leader at %s port %d: %s", place.rank, *where, why)

        connection = connect_to_leader(place, MEET_SECONDS, waiting)
        self._host = connection.getsockname()[0]
        link = Link(connection)
        facts = {**version_facts(), **environment_facts(), **option_facts(config)}
        link.send(Hello(place.rank, socket.gethostname(), os.getpid(), PROTOCOL, facts))
        parent_name = LEADER_NAME if place.rank == place.local_rank else f"the first process of {socket.gethostname()}"
        self.watchdog = Watchdog(link, parent, end, parent_pid, parent_name)
        self._group: TensorGroup | None = None
        self._transport: FollowerTransport | None = None
        self._told = 0.0

    def join(self, resolved: ResolvedModel, model: ModelConfig, device: Device) -> TensorGroup:
        """See `Member`."""
        from stretto.distributed.group import connect_group
        from stretto.distributed.transport import connect

        self.watchdog.enter("loading")
        place, watchdog = self.place, self.watchdog
        addresses = watchdog.agree("hello", {})
        watchdog.agree("model", model_facts(self._config, resolved, model, device.torch_device))
        host = None if place.single_host else self._host
        self._transport = connect(addresses["control"], place.rank, place.size, CONNECT_SECONDS, host=host)
        kind = device.torch_device
        self._group = device.call(
            lambda: connect_group(join_store(addresses["store"]), place.rank, place.size, kind, host=self._host)
        )
        atexit.register(self._group.end_with_process)  # nothing of this object: the process may outlive the engine
        return self._group

    def agree_on_sizes(self, sizes: SchedulerConfig) -> SchedulerConfig:
        """See `Member`."""
        agreed = self.watchdog.agree("sizes", size_facts(sizes))
        return replace(sizes, num_pages=int(agreed[MINIMUM]))

    def loading(self, what: str, fraction: float) -> float:
        """See `Member`."""
        if what == "loading weights" and (time.monotonic() - self._told > _TELL_SECONDS or fraction >= 1.0):
            self._told = time.monotonic()
            self.watchdog.tell(Loading(what, fraction))
        return fraction

    def turns(self, inbox: Inbox, now: Callable[[], float]) -> TurnSource:
        """See `Member`: the leader's; nothing ever comes in here."""
        from stretto.distributed.turns import FollowerTurns

        assert self._transport is not None
        return FollowerTurns(self._transport.receive, look_every_s=TICK_SECONDS, look=self.check)

    def witness(self, scheduler: Scheduler) -> Witness | None:
        """See `Member`: under STRETTO_CHECK, the report to the leader."""
        from stretto.distributed.digest import DigestReport

        return DigestReport(scheduler, lambda data: self.watchdog.tell(Digest(data))) if checks() else None

    def check(self) -> None:
        """See `Member`."""
        if self.watchdog.failure is not None:
            raise EngineBroken(self.watchdog.failure)

    def beats(self) -> Mapping[int, Beat]:
        """See `Member`: it knows of none."""
        return {}

    def rest(self, resting: bool) -> None:
        """See `Member`: that is the leader's to tell."""

    def broken(self, error: Exception) -> EngineBroken | None:
        """See `Member`."""
        return None

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """See `Member`: the watchdog sees to it."""

    def stop(self) -> bool:
        """See `Member`: that is the leader's to say."""
        return False

    def close(self, *, orderly: bool) -> None:
        """See `Member`."""
        if self._transport is not None:
            self._transport.close()
        # The tensor group ends with the process: NCCL's end would wait for the leader's, which waits for this one.

    def run(self, build: Callable[[Follower], FollowingRuntime]) -> None:
        """The whole life of the rank, up to the leader's last turn. Blocks. Raises whatever broke it."""
        runtime = build(self)
        watchdog = self.watchdog
        watchdog.enter("running", runtime.beat)
        watchdog.agree("ready", {})
        steps = runtime.follow()
        watchdog.enter("shutdown")
        runtime.close()
        watchdog.leave(steps)

    def abort(self) -> None:
        """Set the main thread free if it waits for other ranks."""
        if self._group is not None:
            self._group.abort()

    def abandon(self) -> None:
        """After a failure, in a process that goes on: neither its life nor its end waits for the other ranks."""
        self.abort()
        if self._group is not None:
            keep_for_good(self._group)  # of NCCL's groups as well the end may wait
