"""Watch: the leader's view of all ranks. A thread that hears them, sees them die, hang or stick, and ends them.

Owns the lines to the followers, their processes on this host, and the one message that says why the engine has failed.
Times: a process that is stopped or dead is seen at once on this host; one that is silent after HANG_SECONDS; a rank
that runs but gets nowhere after STUCK_SECONDS. From there to the end of all ranks it is GRACE_SECONDS and a kill.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from stretto.distributed.agreement import Facts, difference
from stretto.distributed.children import Child, end_children
from stretto.distributed.link import Agreed, Beat, Broken, Bye, Digest, Failed, Hello, Leave, Link, Loading, Message
from stretto.distributed.link import Facts as FactsMessage
from stretto.distributed.place import Place
from stretto.distributed.stuck import find_stuck
from stretto.errors import EngineBroken, InvalidRequest, StrettoError

logger = logging.getLogger("stretto.ranks")

BEAT_SECONDS = 0.5
TICK_SECONDS = 0.2
HANG_SECONDS = float(os.environ.get("STRETTO_HANG_SECONDS") or 5.0)
"""Silence after which a process counts as hung. Raise it to stop a rank in a debugger."""
LOADING_FACTOR = 6.0
"""How much more silence is forgiven until the rank runs: loading libraries from a cold disk may stop all threads."""
GRACE_SECONDS = 1.0
"""How long a rank may take to end by itself once it knows; and how long a suspicion waits for a better one."""
MEET_SECONDS = 600.0
"""How long ranks on other hosts may take to come."""
CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class _Rank:
    """What the leader knows of one follower."""

    rank: int
    child: Child | None = None
    """Its process, if it is on this host and was started by this one."""
    link: Link | None = None
    name: str = ""
    heard: float = 0.0
    beat: Beat = field(default_factory=Beat)
    loading: float = 0.0
    facts: dict[str, Facts] = field(default_factory=dict)
    closed_at: float | None = None
    left: bool = False
    """It said goodbye."""


class Watch:
    """Made by the leader before any rank is there; `close` ends everything that it started."""

    def __init__(
        self,
        place: Place,
        listener: socket.socket,
        facts: Facts,
        start_children: Callable[[], list[Child]],
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        """`facts`: what must be equal before anything is loaded. Starts a thread, and in it the children."""
        self._hang_seconds = hang_seconds
        self._place = place
        self._facts = facts
        self._start_children = start_children
        self._ranks = {rank: _Rank(rank, name=f"rank {rank}") for rank in range(1, place.size)}
        self._listener: socket.socket | None = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._suspicion: tuple[float, str] | None = None
        self._closing = threading.Event()
        self._ended = False
        self._began = time.monotonic()
        self.failure: str | None = None
        """Why the engine has failed; set once."""
        self._disagreement = False
        self.own_beat: Callable[[str], Beat] = Beat
        """What the leader's own loop does; set when there is one."""
        self.on_digest: Callable[[int, bytes], str | None] = lambda rank, data: None
        """Compares a follower's digests with the leader's; what it returns is a failure. Set before the loop runs."""
        self._aborts: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="stretto-ranks", daemon=True)
        self._thread.start()

    # -- for the leader's thread ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise EngineBroken if the engine has failed."""
        if self.failure is not None:
            self._raise()

    def gather(self, stage: str, waiting: Callable[[], None] = lambda: None, seconds: float = MEET_SECONDS) -> None:
        """Wait until every rank has told its facts of `stage`; `waiting` is called now and then. Blocks.

        Raises InvalidRequest or EngineBroken once a rank differs, dies, or does not come.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while missing := [r.name for r in self._ranks.values() if stage not in r.facts]:
                self.check()
                if time.monotonic() > until:
                    self._fail(f"{', '.join(missing)} did not come to '{stage}' within {seconds:g} s")
                self._changed.wait(TICK_SECONDS)
                waiting()
            self.check()

    def facts_of(self, stage: str) -> list[Facts]:
        """What the followers told of a stage that was gathered."""
        return [rank.facts[stage] for rank in self._ranks.values()]

    def compare(self, stage: str, ours: Facts) -> None:
        """Raise InvalidRequest, here and on all ranks, if one's facts of a gathered stage differ from `ours`."""
        for rank in self._ranks.values():
            if (problem := difference(rank.rank, rank.facts[stage], ours)) is not None:
                self._disagree(problem)
                self._raise()

    def agree(self, stage: str, values: Facts) -> None:
        """Tell all followers that `stage` is passed."""
        self._tell_all(Agreed(stage, values))

    def on_failure(self, abort: Callable[[], None]) -> None:
        """Call `abort`, from the watching thread, when the engine fails: it sets free what waits for other ranks."""
        with self._changed:
            self._aborts.append(abort)
            failed = self.failure is not None
        if failed:
            abort()

    def explain(self, error: BaseException) -> str:
        """Why the leader's loop ended with `error`: another rank's end if it was that, else the error. Blocks shortly.

        Whatever it was, the engine has failed with it.
        """
        self._suspect(f"rank 0 failed: {_told(error)}")
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, GRACE_SECONDS + 4 * TICK_SECONDS)
        if self.failure is None:
            self._fail(f"rank 0 failed: {_told(error)}")
        return str(self.failure)

    def loading(self, own: float) -> float:
        """Mean of how far all ranks are, with `own` for the leader."""
        return (own + sum(rank.loading for rank in self._ranks.values())) / self._place.size

    def abandon(self) -> None:
        """End all ranks without a last turn, and without waiting for it: nobody has the engine any more."""
        self._tell_all(Leave())
        self._closing.set()

    def close(self, *, orderly: bool) -> None:
        """End all ranks. `orderly`: they got their last turn, and may take CLOSE_SECONDS to end with it. Blocks."""
        if not orderly or self.failure is not None:
            self._tell_all(Leave())
        self._closing.set()
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for child in self._start_children():
                self._ranks[child.place.rank].child = child
                self._ranks[child.place.rank].name = f"rank {child.place.rank} (pid {child.pid})"
        except OSError as error:
            self._fail(f"the processes of the other ranks cannot be started: {error}")
        try:
            self._watch()
        except BaseException as error:
            self._fail(f"rank 0's watch failed: {_told(error)}")
            raise
        finally:
            until = time.monotonic() + (CLOSE_SECONDS if self.failure is None else 0.0)
            self._end_all(until)
            self._aborts.clear()

    def _watch(self) -> None:
        last = last_beat = time.monotonic()
        while not self._closing.is_set():
            for key, _ in self._selector.select(TICK_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            now = time.monotonic()
            if now - last > max(
                2.0, self._hang_seconds / 3
            ):  # this process itself was stopped, or starved: all start anew
                for rank in self._ranks.values():
                    rank.heard = now
            last = now
            if self.failure is not None:
                self._end_failed(now)
                continue
            if now - last_beat >= BEAT_SECONDS:
                last_beat = now
                self._tell_all(Beat())
            for rank in self._ranks.values():
                self._look_at(rank, now)
            self._look_for_stuck()
            if self._suspicion is not None and now - self._suspicion[0] > GRACE_SECONDS:
                self._fail(self._suspicion[1])

    def _accept(self) -> None:
        assert self._listener is not None
        end, _ = self._listener.accept()
        self._selector.register(link := Link(end), selectors.EVENT_READ, link)

    def _hear(self, source: Link | _Rank) -> None:
        link = source if isinstance(source, Link) else source.link
        assert link is not None
        try:
            messages = link.receive()
        except ValueError as error:
            who = source.name if isinstance(source, _Rank) else "who has connected"
            logger.warning("%s talks like no rank of this engine: %s", who, error)
            messages = []
        for message in messages:
            if isinstance(source, _Rank):
                self._take(source, message)
            elif isinstance(message, Hello):
                source = self._greet(source, message)
        if link.closed:
            self._selector.unregister(link)
            link.close()
            if isinstance(source, _Rank):
                source.closed_at = time.monotonic()

    def _greet(self, link: Link, hello: Hello) -> Link | _Rank:
        """Who came is a rank if it is one that is missing and like the leader; else it is told why not."""
        rank = self._ranks.get(hello.rank)
        problem = difference(hello.rank, hello.facts, self._facts)
        if problem is None and rank is None:
            problem = f"rank {hello.rank} came to an engine of {self._place.size} ranks; start each rank once"
        if problem is None and rank is not None and rank.link is not None:
            problem = f"rank {hello.rank} came twice ({rank.name}, and pid {hello.pid} on {hello.host})"
        if problem is not None or rank is None:
            self._disagree(str(problem))
            link.send(Failed(str(self.failure)))
            return link
        rank.link, rank.heard = link, time.monotonic()
        rank.name = f"rank {hello.rank} (pid {hello.pid} on {hello.host})"
        self._selector.modify(link, selectors.EVENT_READ, rank)
        with self._changed:
            rank.facts["hello"] = hello.facts
            self._changed.notify_all()
        if self._listener is not None and all(r.link for r in self._ranks.values()):
            self._selector.unregister(self._listener)
            self._listener.close()  # all are here: nobody else may come, and the port is free
            self._listener = None
        return rank

    def _take(self, rank: _Rank, message: Message) -> None:
        rank.heard = time.monotonic()
        if isinstance(message, Beat):
            rank.beat = message
        elif isinstance(message, Loading):
            rank.loading = message.fraction
        elif isinstance(message, FactsMessage):
            with self._changed:
                rank.facts[message.stage] = message.values
                self._changed.notify_all()
        elif isinstance(message, Broken):
            self._suspect(f"{rank.name} failed: {message.message}")
        elif isinstance(message, Bye):
            rank.left = True
        elif isinstance(message, Digest) and (problem := self.on_digest(rank.rank, message.data)) is not None:
            self._fail(problem)

    def _look_at(self, rank: _Rank, now: float) -> None:
        """Whether its process lives, and is heard."""
        where = f" ({rank.beat.phase or 'start'}" + (f", {rank.beat.steps} steps done)" if rank.beat.steps else ")")
        if rank.left:
            return
        trouble = None if rank.child is None else rank.child.trouble()
        if rank.child is not None and rank.child.process.poll() == 0 and rank.link and rank.closed_at is None:
            return  # its goodbye is still to be read
        if trouble is not None:
            words = rank.child.last_words() if rank.child and rank.child.process.poll() is not None else ""
            self._fail(f"{rank.name} {trouble}{where}" + (f": {words}" if words else ""))
        elif rank.closed_at is not None and (rank.child is None or now - rank.closed_at > GRACE_SECONDS):
            self._fail(f"{rank.name} is gone: it died, or its connection broke{where}")
        elif rank.link is not None and rank.closed_at is None and now - rank.heard > self._patience(rank):
            self._fail(f"{rank.name} hangs: no sign of life for {now - rank.heard:.0f} s{where}")

    def _patience(self, rank: _Rank) -> float:
        return hang_limit(rank.beat.phase, self._hang_seconds)

    def _look_for_stuck(self) -> None:
        beats = {
            0: self.own_beat("running"),
            **{rank.rank: rank.beat for rank in self._ranks.values() if not rank.left},
        }
        found = find_stuck(beats)
        if found is not None:
            rank, cause = found
            self._fail(f"{self._ranks[rank].name if rank else 'rank 0'} {cause}")

    # -- failing and ending -----------------------------------------------------------------------------------------

    def _disagree(self, problem: str) -> None:
        self._disagreement = self.failure is None
        self._fail(problem)

    def _suspect(self, message: str) -> None:
        """Something failed that may be only the echo of another rank's end: wait for that to be seen."""
        if self._suspicion is None:
            self._suspicion = (time.monotonic(), message)

    def _fail(self, message: str) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = message
            self._failed_at = time.monotonic()
            aborts = list(self._aborts)
            self._changed.notify_all()
        self._tell_all(Failed(message))
        for abort in aborts:
            abort()

    def _raise(self) -> NoReturn:
        if self._disagreement:
            raise InvalidRequest(str(self.failure))
        raise EngineBroken(str(self.failure))

    def _tell_all(self, message: Message) -> None:
        for rank in self._ranks.values():
            if rank.link is not None:
                rank.link.send(message)

    def _end_failed(self, now: float) -> None:
        """Kill what does not end by itself: a hung process keeps the others' collectives waiting."""
        if now - self._failed_at > GRACE_SECONDS and not self._ended:
            self._ended = True
            for rank in self._ranks.values():
                if rank.child is not None:
                    rank.child.kill()

    def _end_all(self, until: float) -> None:
        end_children([rank.child for rank in self._ranks.values() if rank.child is not None], until)
        for rank in self._ranks.values():
            while rank.link is not None and not rank.link.closed and rank.link.wait(max(0.0, until - time.monotonic())):
                try:
                    rank.link.receive()  # until a rank on another host hangs up
                except ValueError:
                    break
            if rank.link is not None:
                rank.link.close()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()


def hang_limit(phase: str, seconds: float) -> float:
    """Silence after which a rank counts as hung that is, or looks at its leader, in this phase."""
    return seconds if phase in ("running", "shutdown") else seconds * LOADING_FACTOR


def _told(error: BaseException) -> str:
    """The error and its causes, in one line."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(parts) < 3:
        parts.append(str(seen) if isinstance(seen, StrettoError) else f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__
    return "; because ".join(parts)
