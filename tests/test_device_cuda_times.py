"""How a CUDA device reads a time between events, on acted events: the driver is asked once, and refusals are told."""

from __future__ import annotations

import pytest

from stretto.device.cuda import CudaDevice, CudaEvent
from stretto.errors import StrettoError


class Raw:
    """torch's event: refuses, as torch does, while either is not done."""

    def __init__(self, done: bool) -> None:
        self.done = done
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.done

    def elapsed_time(self, end: Raw) -> float:
        if not (self.done and end.done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 2.5


def event(device: CudaDevice, *, timing: bool = True, recorded: bool = True, done: bool = True) -> CudaEvent:
    made = object.__new__(CudaEvent)  # one without a GPU
    made.device, made.timing, made.recorded, made.fault = device, timing, recorded, None
    made.raw = Raw(done)
    return made


@pytest.fixture
def device() -> CudaDevice:
    return object.__new__(CudaDevice)


def test_a_time_costs_no_queries(device: CudaDevice) -> None:
    begin, end = event(device), event(device)
    assert device.seconds_between(begin, end) == 0.0025
    assert begin.raw.queries == end.raw.queries == 0


@pytest.mark.parametrize("lacks", ["timing", "recorded", "done"])
@pytest.mark.parametrize("which", [0, 1])
def test_events_without_a_time_are_refused(device: CudaDevice, lacks: str, which: int) -> None:
    events = [event(device), event(device)]
    events[which] = event(device, **{lacks: False})
    with pytest.raises(StrettoError, match="timing=True, recorded and done"):
        device.seconds_between(*events)
