"""Watch: the leader's view of all ranks. A thread that hears them, sees them die, hang or stick, and ends them.

Owns the lines to the followers, their processes on this host, and the one message that says why the engine has failed.
A process that is stopped or dead is seen at once on this host; one that is silent, or gets nowhere, after the times in
patience.py. From there to the end of all ranks it is a moment's grace and a kill.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from stretto.distributed.agreement import Facts, difference
from stretto.distributed.children import Child, Sibling, end_children
from stretto.distributed.follower_state import FollowerState
from stretto.distributed.link import Agreed, Beat, Broken, Digest, Failed, Hello, Leave, Link, Message
from stretto.distributed.patience import BEAT_SECONDS, GRACE_SECONDS, HANG_SECONDS, TICK_SECONDS, hang_limit
from stretto.distributed.place import Place
from stretto.distributed.stuck import find_stuck
from stretto.errors import EngineBroken, InvalidRequest, StrettoError

logger = logging.getLogger("stretto.ranks")

MEET_SECONDS = 600.0
"""How long ranks on other hosts may take to come."""
CLOSE_SECONDS = 5.0


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
        """`facts`: what must be equal before anything is loaded. Starts a thread; in it, at `start`, the children."""
        self._hang_seconds = hang_seconds
        self._place = place
        self._facts = facts
        self._start_children: Callable[[], list[Child]] | None = start_children
        self._may_start = threading.Event()
        self._ranks = {rank: FollowerState(rank, f"rank {rank}") for rank in range(1, place.size)}
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
        self._telling = threading.Lock()
        self._resting = False
        """Told to followers as it changes, and with each heartbeat; under the lock, so that none overtakes another."""
        self.own_beat: Callable[[str], Beat] = Beat
        """What the leader's own loop does; set when there is one."""
        self.on_digest: Callable[[int, bytes], str | None] = lambda rank, data: None
        """Compares a follower's digests with the leader's; what it returns is a failure. Set before the loop runs."""
        self.on_end: Callable[[], None] = lambda: None
        """Called by the watch's thread once all ranks have ended, its last deed. Set before `abandon`."""
        self._aborts: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="stretto-ranks", daemon=True)
        self._thread.start()

    # -- for the leader's thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the children now: this rank has found nothing that would be refused. Does not wait for them."""
        self._may_start.set()

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

    def last_steps(self) -> dict[int, int | None]:
        """After `close`: how many steps each follower had done when it ended in order; None: it did not."""
        return {rank.rank: rank.last_steps for rank in self._ranks.values()}

    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of each follower."""
        return {rank.rank: rank.beat for rank in self._ranks.values()}

    def rest(self, resting: bool) -> None:
        """The leader has nothing under way, or again something: until then followers forgive its silence.

        Told at once, by the calling thread: the next thing that this does may stop all threads of the process for long.
        """
        with self._telling:
            self._resting = resting
            self._tell_all(Beat(resting=resting))

    def loading(self, own: float) -> float:
        """Mean of how far all ranks are, with `own` for the leader."""
        return (own + sum(rank.loading for rank in self._ranks.values())) / self._place.size

    def abandon(self) -> None:
        """End all ranks without a last turn, and without waiting for it: nobody has the engine any more."""
        self._closing.set()  # first: a rank that leaves because it is told to is not lost
        self._tell_all(Leave())
        self._end_stopped_siblings()

    def close(self, *, orderly: bool) -> None:
        """End all ranks. `orderly`: they got their last turn, and may take CLOSE_SECONDS to end with it. Blocks."""
        self._closing.set()  # first: a rank that leaves because it is told to is not lost
        if not orderly or self.failure is not None:
            self._tell_all(Leave())
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            self._fail(f"rank 0's watch failed: {_told(error)}")
            raise
        finally:
            until = time.monotonic() + (CLOSE_SECONDS if self.failure is None else 0.0)
            self._end_all(until)
            self._aborts.clear()
            self.on_end()

    def _begin(self, start_children: Callable[[], list[Child]]) -> None:
        self._start_children = None
        try:
            for child in start_children():
                self._ranks[child.place.rank].child = child
                self._ranks[child.place.rank].name = f"rank {child.place.rank} (pid {child.pid})"
        except OSError as error:
            self._fail(f"the processes of the other ranks cannot be started: {error}")

    def _watch(self) -> None:
        last = last_beat = time.monotonic()
        while not self._closing.is_set():
            if self._start_children is not None and self._may_start.wait(TICK_SECONDS / 10):
                self._begin(self._start_children)
            for key, _ in self._selector.select(TICK_SECONDS if self._start_children is None else 0.0):
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
                with self._telling:
                    self._tell_all(Beat(resting=self._resting))
            for rank in self._ranks.values():
                problem = rank.problem(now, hang_limit(rank.beat.phase, self._hang_seconds))
                if problem is not None and not self._closing.is_set():
                    self._fail(problem)
            self._look_for_stuck()
            if self._suspicion is not None and now - self._suspicion[0] > GRACE_SECONDS:
                self._fail(self._suspicion[1])

    def _accept(self) -> None:
        assert self._listener is not None
        end, _ = self._listener.accept()
        self._selector.register(link := Link(end), selectors.EVENT_READ, link)

    def _hear(self, source: Link | FollowerState) -> None:
        link = source if isinstance(source, Link) else source.link
        assert link is not None
        try:
            messages = link.receive()
        except ValueError as error:
            who = source.name if isinstance(source, FollowerState) else "who has connected"
            logger.warning("%s talks like no rank of this engine: %s", who, error)
            messages = []
        for message in messages:
            if isinstance(source, FollowerState):
                self._take(source, message)
            elif isinstance(message, Hello):
                source = self._greet(source, message)
        if link.closed:
            self._selector.unregister(link)
            link.close()
            if isinstance(source, FollowerState):
                source.closed_at = time.monotonic()

    def _greet(self, link: Link, hello: Hello) -> Link | FollowerState:
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
        if self._place.launched and hello.rank < self._place.num_local:
            rank.sibling = Sibling.find(hello.pid)
        self._selector.modify(link, selectors.EVENT_READ, rank)
        with self._changed:
            rank.facts["hello"] = hello.facts
            self._changed.notify_all()
        if self._listener is not None and all(r.link for r in self._ranks.values()):
            self._selector.unregister(self._listener)
            self._listener.close()  # all are here: nobody else may come, and the port is free
            self._listener = None
        return rank

    def _take(self, rank: FollowerState, message: Message) -> None:
        with self._changed:
            rank.take(message)
            self._changed.notify_all()
        if isinstance(message, Broken):
            self._suspect(f"{rank.name} failed: {message.message}")
        elif isinstance(message, Digest) and (problem := self.on_digest(rank.rank, message.data)) is not None:
            self._fail(problem)

    def _look_for_stuck(self) -> None:
        beats = {
            0: self.own_beat("running"),
            **{rank.rank: rank.beat for rank in self._ranks.values() if rank.last_steps is None},
        }
        found = find_stuck(beats)
        if found is not None:
            rank, cause = found
            self._fail(f"{self._ranks[rank].name if rank else 'rank 0'} {cause}")

    # -- failing and ending -----------------------------------------------------------------------------------------

    def _end_stopped_siblings(self) -> None:
        """Before anybody learns of the failure: with that this process may end, and no other would kill them."""
        for rank in self._ranks.values():
            if rank.sibling is not None:
                rank.sibling.end()

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
            self._end_stopped_siblings()
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
            self._end_stopped_siblings()

    def _end_all(self, until: float) -> None:
        for rank in self._ranks.values():
            if rank.child is not None and rank.link is None:
                rank.child.kill()  # it has not come yet: nobody can tell it to leave
        end_children([rank.child for rank in self._ranks.values() if rank.child is not None], until)
        for rank in self._ranks.values():
            while rank.link is not None and not rank.link.closed and rank.link.wait(max(0.0, until - time.monotonic())):
                try:
                    for message in rank.link.receive():  # until it hangs up
                        rank.take(message)
                except ValueError:
                    break
            if rank.link is not None:
                rank.link.close()
        self._end_stopped_siblings()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()


def _told(error: BaseException) -> str:
    """The error and its causes, in one line."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(parts) < 3:
        parts.append(str(seen) if isinstance(seen, StrettoError) else f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__
    return "; because ".join(parts)
