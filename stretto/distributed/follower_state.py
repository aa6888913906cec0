"""What the leader knows of one follower: its line, its process, what it told last, and whether it is lost.

Owns no thread; the watch calls it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stretto.distributed.agreement import Facts
from stretto.distributed.children import STOPPED, Child, Sibling
from stretto.distributed.link import Beat, Bye, Link, Loading, Message
from stretto.distributed.link import Facts as FactsMessage
from stretto.distributed.patience import GRACE_SECONDS


@dataclass(eq=False)
class FollowerState:
    """One rank above 0."""

    rank: int
    name: str
    """For people; with process and host once they are known."""
    child: Child | None = None
    """Its process, if it is on this host and was started by this one."""
    sibling: Sibling | None = None
    """Its process, if it is on this host and was started by torchrun."""
    link: Link | None = None
    heard: float = 0.0
    beat: Beat = field(default_factory=Beat)
    loading: float = 0.0
    """Fraction of its weights that it has loaded."""
    facts: dict[str, Facts] = field(default_factory=dict)
    """What it told, by stage."""
    closed_at: float | None = None
    """When its line ended."""
    last_steps: int | None = None
    """Steps that it had done when it said goodbye; None: it has not."""

    def take(self, message: Message) -> None:
        """Remember what it says."""
        self.heard = time.monotonic()
        if isinstance(message, Beat):
            self.beat = message
        elif isinstance(message, Loading):
            self.loading = message.fraction
        elif isinstance(message, FactsMessage):
            self.facts[message.stage] = message.values
        elif isinstance(message, Bye):
            self.last_steps = message.steps

    def problem(self, now: float, patience: float) -> str | None:
        """Why it is lost, in one sentence; None while it is not. `patience`: seconds of silence that are forgiven."""
        if self.last_steps is not None:
            return None
        steps = f", {self.beat.steps} steps done" if self.beat.steps else ""
        where = f"({self.beat.phase or 'start'}{steps})"
        child, line_is_open = self.child, self.link is not None and self.closed_at is None
        if child is not None and child.process.poll() == 0 and line_is_open:
            return None  # its goodbye is still to be read
        if child is not None and (trouble := child.trouble()) is not None:
            words = child.last_words() if child.process.poll() is not None else ""
            return f"{self.name} {trouble} {where}" + (f": {words}" if words else "")
        if self.sibling is not None and self.sibling.look():
            return f"{self.name} {STOPPED} {where}"
        if self.closed_at is not None and (child is None or now - self.closed_at > GRACE_SECONDS):
            return f"{self.name} is gone: it died, or its connection broke {where}"
        if line_is_open and now - self.heard > patience:
            return f"{self.name} hangs: no sign of life for {now - self.heard:.0f} s {where}"
        return None
