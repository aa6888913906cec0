"""A timeline that is told a made-up story in virtual seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from stretto.device.base import Device
from stretto.observe.timeline import LAUNCH, PROCESS, SCHEDULE, WAIT, Timeline
from stretto.simulate.engine import Clock, Moment


class Told:
    """A timeline that is told a story in virtual seconds."""

    def __init__(self, size: int = 8) -> None:
        self.clock = Clock()
        self.timeline = Timeline(cast(Device, self.clock), size)

    def launch(self, index: int, receive: float, schedule: float, begin: float, end: float) -> None:
        self.at(receive).begin_turn()
        self.at(schedule).enter(SCHEDULE)
        self.at(begin).enter(LAUNCH)
        self.at(end).launched(SimpleNamespace(index=index))

    def process(
        self, wait: float, there: float, done: float, device: tuple[float, float], *, runnable: bool = True
    ) -> None:
        step = SimpleNamespace(begin=Moment(device[0]), copy_done=Moment(device[1]))
        self.at(wait).enter(WAIT)
        self.at(there).enter(PROCESS)
        self.at(done).step_done(step, runnable=runnable)
        self.timeline.end_turn()

    def at(self, time: float) -> Timeline:
        self.clock.time = time
        return self.timeline
