"""Watchdog: a follower's thread that tells the leader how it does, and ends the rank when the engine has failed.

Owns the follower's line. The main thread may be anywhere, in a collective that never ends for one; so the end of a rank
does not depend on it.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from stretto.distributed import patience
from stretto.distributed.agreement import Facts
from stretto.distributed.children import STOPPED, Stopped
from stretto.distributed.link import Agreed, Beat, Broken, Bye, Failed, Leave, Link, Message
from stretto.distributed.link import Facts as FactsMessage
from stretto.errors import EngineBroken

logger = logging.getLogger("stretto.ranks")

VERDICT_SECONDS = patience.GRACE_SECONDS + 1.0
"""How long a rank that failed waits for the leader to say what really happened."""


class Watchdog:
    """A follower's side of `Watch`. `end` is called once, in the watchdog's thread, when the rank must end."""

    def __init__(
        self,
        link: Link,
        parent: socket.socket | None,
        end: Callable[[str, bool], None],
        parent_pid: int | None = None,
        parent_name: str = "the process that started this rank",
    ) -> None:
        """`parent`: closes when the process that started this one is gone; `parent_pid`: whether that one is stopped.

        `end` gets the reason, and whether the leader has told it (else it was found here); an empty reason is an
        orderly end.
        """
        self._parent_stopped = None if parent_pid is None else Stopped(parent_pid)
        self._parent_name = parent_name
        self._link = link
        self._parent = parent
        self._end = end
        self._changed = threading.Condition()
        self._agreed: dict[str, Facts] = {}
        self.failure: str | None = None
        """Why the rank must end."""
        self._phase = "start"
        self._own_beat: Callable[[str], Beat] = Beat
        self._leader_rests = False
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="stretto-watchdog", daemon=True)
        self._thread.start()

    def enter(self, phase: str, own_beat: Callable[[str], Beat] = Beat) -> None:
        """The main thread enters a phase of its life; `own_beat`: what it does there, given the phase."""
        self._phase, self._own_beat = phase, own_beat
        self.tell(own_beat(phase))

    def tell(self, message: Message) -> None:
        """Say something to the leader."""
        self._link.send(message)

    def agree(self, stage: str, ours: Facts) -> Facts:
        """Tell the leader that this rank got to `stage`, and wait until all ranks did; what it answers. Blocks.

        Raises EngineBroken when the engine has failed.
        """
        if stage != "hello":
            self.tell(FactsMessage(stage, ours))
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or stage in self._agreed)
            if self.failure is not None:
                raise EngineBroken(self.failure)
            return self._agreed[stage]

    def broken(self, message: str) -> str:
        """The main thread failed. Why, as the leader sees it: it may have been another rank. Blocks shortly."""
        self.tell(Broken(message))
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, VERDICT_SECONDS)
        return self.failure or message

    def interrupted(self, how: str) -> None:
        """Something from outside ends the main thread: the leader should know before the line breaks."""
        self.tell(Broken(f"it was interrupted ({how})"))

    def leave(self, steps: int) -> None:
        """The last turn is done: say goodbye."""
        self._leaving = True
        self.tell(Bye(steps))
        self._thread.join(patience.TICK_SECONDS * 2)
        self._link.close()

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # unheard, it would look like a hang
            cause = f"its watchdog failed: {type(error).__name__}: {error}"
            self.tell(Broken(cause))
            self._fail(cause, told=False)
            raise

    def _watch(self) -> None:
        last = last_beat = heard = time.monotonic()
        selector = selectors.PollSelector()
        for line in (self._link, self._parent):
            if line is not None:
                selector.register(line, selectors.EVENT_READ)
        while not self._leaving and self.failure is None:
            ready = [key.fileobj for key, _ in selector.select(patience.TICK_SECONDS)]
            now = time.monotonic()
            if now - last > max(2.0, patience.HANG_SECONDS / 3):
                heard = now  # this process itself was stopped, or starved
            last = now
            if self._link in ready:
                heard = now
                self._hear()
            elif self._leader_rests:
                heard = now  # its death, or that of its host, ends the line
            elif now - heard > patience.hang_limit(self._phase, patience.HANG_SECONDS):
                self._fail(f"the leader (rank 0) hangs: no sign of life for {now - heard:.0f} s", told=False)
            if self._parent in ready:
                self._fail("the process that started this rank is gone", told=False)
            if self._parent_stopped is not None and self._parent_stopped.look():
                self._fail(f"{self._parent_name} {STOPPED}", told=False)
            if now - last_beat >= patience.BEAT_SECONDS:
                last_beat = now
                self.tell(self._own_beat(self._phase))

    def _hear(self) -> None:
        try:
            messages = self._link.receive()
        except ValueError:
            self._fail("where the leader should be, somebody talks something else", told=False)
            return
        for message in messages:
            if isinstance(message, Agreed):
                with self._changed:
                    self._agreed[message.stage] = message.values
                    self._changed.notify_all()
            elif isinstance(message, Beat):
                self._leader_rests = message.resting
            elif isinstance(message, Failed):
                self._fail(message.message, told=True)
            elif isinstance(message, Leave):
                self._fail("", told=True)
        if self._link.closed and not self._leaving:
            self._fail("the leader (rank 0) is gone: it died, or its connection broke", told=False)

    def _fail(self, message: str, *, told: bool) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = message
            self._changed.notify_all()
        self._end(message, told)
