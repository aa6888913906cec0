"""Member: what assembling an engine asks of the ranks around it. Implemented by the leader and by followers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from stretto.config import SchedulerConfig
from stretto.distributed.group import SOLO, TensorGroup
from stretto.distributed.link import Beat
from stretto.distributed.place import Place
from stretto.errors import EngineBroken
from stretto.scheduler.turns import Inbox, LocalTurns, TurnSource

if TYPE_CHECKING:
    from stretto.device.base import Device
    from stretto.models.config import ModelConfig
    from stretto.models.resolve import ResolvedModel
    from stretto.scheduler.loop import Witness
    from stretto.scheduler.scheduler import Scheduler


class Member(Protocol):
    """One rank among others while its engine is assembled; the calls come in this order, once each."""

    @property
    def place(self) -> Place:
        """Which rank this is."""

    def join(self, resolved: ResolvedModel, model: ModelConfig, device: Device) -> TensorGroup:
        """All ranks have the same model: the group over which they share it. Blocks until all have come.

        Raises InvalidRequest if one has another model, EngineBroken if one is lost.
        """

    def agree_on_sizes(self, sizes: SchedulerConfig) -> SchedulerConfig:
        """`sizes` with what the smallest rank has room for. Blocks until all ranks have loaded. Raises as `join`."""

    def loading(self, what: str, fraction: float) -> float:
        """This rank is loading; how far all ranks are, as far as this one knows."""

    def turns(self, inbox: Inbox, now: Callable[[], float]) -> TurnSource:
        """Where the loop gets its turns: from `inbox` and the clock `now`, or from the leader. After all else."""

    def witness(self, scheduler: Scheduler) -> Witness | None:
        """Who is told each processed step."""

    def check(self) -> None:
        """Raise EngineBroken if a rank is lost. hot path"""

    def beats(self) -> Mapping[int, Beat]:
        """What each other rank last told about itself, as far as this one knows. Never blocks."""

    def rest(self, resting: bool) -> None:
        """The loop has come to rest, with nothing under way; or it has something to do again. Each change is told."""

    def broken(self, error: Exception) -> EngineBroken | None:
        """The loop failed with `error`: what to raise instead, if another rank may be the cause. May block shortly."""

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the cause, from another thread, once a rank is lost."""

    def stop(self) -> bool:
        """Make the next turn the last one, for all ranks; False if there is nobody who would have to know."""

    def close(self, *, orderly: bool) -> None:
        """The device has no work any more: let go of the others. `orderly`: the last turn is done everywhere."""


class Alone:
    """The only rank there is: nobody to ask."""

    place = Place(rank=0, size=1, local_rank=0, num_local=1, address=None)

    def join(self, resolved: ResolvedModel, model: ModelConfig, device: Device) -> TensorGroup:
        """The group of one."""
        return SOLO

    def agree_on_sizes(self, sizes: SchedulerConfig) -> SchedulerConfig:
        """`sizes`."""
        return sizes

    def loading(self, what: str, fraction: float) -> float:
        """`fraction`."""
        return fraction

    def turns(self, inbox: Inbox, now: Callable[[], float]) -> TurnSource:
        """Its own."""
        return LocalTurns(inbox, now)

    def witness(self, scheduler: Scheduler) -> Witness | None:
        """Nobody."""
        return None

    def check(self) -> None:
        """Nothing. hot path"""

    def beats(self) -> Mapping[int, Beat]:
        """There are none."""
        return {}

    def rest(self, resting: bool) -> None:
        """Nobody waits for it."""

    def broken(self, error: Exception) -> EngineBroken | None:
        """It is its own cause."""
        return None

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """There is none to lose."""

    def stop(self) -> bool:
        """Nobody."""
        return False

    def close(self, *, orderly: bool) -> None:
        """Nothing."""


ALONE = Alone()
"""It has no state."""
