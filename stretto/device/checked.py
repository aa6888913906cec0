"""CheckedDevice: what the two devices for tests share: tracked accesses, owners of regions, and poison.

How time passes, and what runs when, is theirs; which access happened before which is happens_before.py's.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable

import torch

from stretto.device.base import Device, HostBuffer, Region
from stretto.device.happens_before import HappensBefore
from stretto.device.hazards import HazardError
from stretto.device.host_memory import shared_buffer
from stretto.device.poison import poison

PoisonRegion = Callable[[int], None]


class CheckedDevice(Device):
    """A CPU device on which every access to a shared region is checked. One host thread."""

    torch_device = torch.device("cpu")
    checking = True

    def __init__(self, *, raising: bool) -> None:
        """`raising`: raise HazardError at the call of the host that meets a hazard; else only collect in `hazards`."""
        self.order = HappensBefore(raising=raising)
        self._poison: dict[str, list[PoisonRegion]] = {}

    @property
    def hazards(self) -> list[HazardError]:
        """Every hazard met so far."""
        return self.order.hazards

    @abstractmethod
    def host_call(self) -> None:
        """A call of the host begins: it takes its time. hot path"""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        """Memory full of poison."""
        buffer = shared_buffer(shape, dtype, page_locked=False)
        poison(buffer.array)
        return buffer

    # Hazards name the caller of these three: the frame above.

    def host_access(self, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        """Check the host's access. Raises HazardError."""
        self.host_call()
        self.order.host_access(reads, writes, sys._getframe(1))

    def taken(self, regions: Iterable[Region]) -> None:
        """Check that the regions have no owner, and give them one. Raises HazardError."""
        self.host_call()
        self.order.take(regions, sys._getframe(1))

    def released(self, regions: Iterable[Region]) -> None:
        """Check I2 for the regions, and put garbage where a late reader would look. Raises HazardError."""
        self.host_call()
        given_up = tuple(regions)
        self.order.release(given_up, sys._getframe(1))
        for kind, index in given_up:
            for fill in self._poison.get(kind, ()):
                fill(index)

    def on_release(self, kind: str, poison: PoisonRegion) -> None:
        """Call `poison(index)` at once, on the host, whenever region (kind, index) is released."""
        self._poison.setdefault(kind, []).append(poison)
