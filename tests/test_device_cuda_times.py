"""How a CUDA device reads a time between events, on acted events: the driver is asked once, and refusals are told."""

from __future__ import annotations

import ctypes
from typing import Any

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
    made.handle = id(made.raw)
    HANDLES[made.handle] = made.raw
    return made


HANDLES: dict[int, Raw] = {}


def driver(ms: Any, begin: int, end: int) -> int:
    """cuEventElapsedTime."""
    if not (HANDLES[begin].done and HANDLES[end].done):
        return 600  # CUDA_ERROR_NOT_READY
    ms._obj.value = 1.5
    return 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    made = object.__new__(CudaDevice)
    monkeypatch.setattr("tests.test_device_cuda_times.HANDLES", {})
    made._elapsed, made._elapsed_ms = driver, ctypes.c_float()
    return made


def test_a_time_costs_no_queries(device: CudaDevice) -> None:
    begin, end = event(device), event(device)
    assert device.seconds_between(begin, end) == 0.0015
    assert begin.raw.queries == end.raw.queries == 0


def test_without_the_driver_torch_is_asked(device: CudaDevice) -> None:
    device._elapsed = lambda ms, begin, end: 1
    assert device.seconds_between(event(device), event(device)) == 0.0025


@pytest.mark.parametrize("lacks", ["timing", "recorded", "done"])
@pytest.mark.parametrize("which", [0, 1])
def test_events_without_a_time_are_refused(device: CudaDevice, lacks: str, which: int) -> None:
    events = [event(device), event(device)]
    events[which] = event(device, **{lacks: False})
    with pytest.raises(StrettoError, match="timing=True, recorded and done"):
        device.seconds_between(*events)
