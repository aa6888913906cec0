"""DeviceReports: tells a checking device who owns which region, and what the host writes. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stretto.device.base import Device, Region
from stretto.request import Request
from stretto.scheduler.batch import IntArray, StepPlan
from stretto.scheduler.slots import SlotTable


class DeviceReports:
    """The scheduler's decisions in terms of regions: ("page", id), ("row", slot), ("token" and "history", cell).

    Costs nothing on a device that does not check, but for the releases, of which every device is told.
    """

    def __init__(self, device: Device, slots: SlotTable, on_released: Callable[[int, list[int]], None] | None) -> None:
        """`on_released` is told each slot and the pages that change hands with it (slot 0: pages alone)."""
        self._device = device
        self._slots = slots
        self._on_released = on_released

    def pages_taken(self, pages: list[int]) -> None:
        """Pages got an owner."""
        if self._device.checking:
            self._device.taken([("page", page) for page in pages])

    def slot_taken(self, request: Request) -> None:
        """`request` got its slot, and the host has written its known tokens there."""
        if self._device.checking:
            self._device.taken(self._slot_regions(request.slot))
            known = np.arange(len(request.token_ids))
            self._device.host_access(writes=self.history(np.full_like(known, request.slot), known))

    def released(self, slot: int, pages: list[int]) -> None:
        """A slot and pages have no owner any more; slot 0: pages alone."""
        regions = self._slot_regions(slot) if slot and self._device.checking else []
        self._device.released([*regions, *(("page", page) for page in pages)])
        if self._on_released is not None:
            self._on_released(slot, pages)

    def results_taken_in(self, plan: StepPlan) -> None:
        """The host has written the tokens that the plan's step sampled, of the requests that still hold their slots."""
        if self._device.checking:
            sampled = plan.slots_B[plan.sampled_S]
            held = self._slots.held(sampled)
            self._device.host_access(writes=self.history(sampled[held], plan.position_S[held]))

    def history(self, slots: IntArray, positions: IntArray) -> list[Region]:
        """Tokens as the host knows them; what works on them must not run ahead of the results."""
        return [("history", i) for i in (slots * self._slots.tokens.shape[1] + positions).tolist()]

    def _slot_regions(self, slot: int) -> list[Region]:
        """The shared memory that goes with a slot: its row of the tables, and each of its tokens on both sides."""
        width = self._slots.tokens.shape[1]
        cells = range(slot * width, (slot + 1) * width)
        return [("row", slot), *(("token", i) for i in cells), *(("history", i) for i in cells)]
