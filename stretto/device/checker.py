"""What the checking devices share: the happens-before tracker, and poison for regions that are given up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from stretto.device.base import Region
from stretto.device.happens_before import HappensBefore

PoisonRegion = Callable[[int], None]


class AccessChecker:
    """Tracks the host's own accesses and the owners of regions, and poisons what is released.

    Every method that names a place in the code names the caller of the *device's* method that called it.
    """

    def __init__(self, *, raising: bool) -> None:
        self.order = HappensBefore(raising=raising)
        self._poison: dict[str, list[PoisonRegion]] = {}

    def on_release(self, kind: str, poison: PoisonRegion) -> None:
        """Call `poison(index)` at once, on the host, whenever region (kind, index) is released."""
        self._poison.setdefault(kind, []).append(poison)

    def host_access(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """The host touches regions now."""
        self.order.host_access(reads, writes, sys._getframe(2))

    def taken(self, regions: Iterable[Region]) -> None:
        """The regions have a new owner."""
        self.order.take(regions, sys._getframe(2))

    def released(self, regions: Iterable[Region]) -> None:
        """The regions have no owner any more: check that, then put garbage where a late reader would look."""
        given_up = tuple(regions)
        self.order.release(given_up, sys._getframe(2))
        for kind, index in given_up:
            for poison in self._poison.get(kind, ()):
                poison(index)
