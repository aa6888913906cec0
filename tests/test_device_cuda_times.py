"""How a CUDA device reads a time between events, on acted events: the driver is asked once, and refusals are told."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.device.base import DeviceFault
from stretto.device.cuda import CudaDevice, CudaEvent, CudaStream, _elapsed_time
from stretto.errors import StrettoError


class Raw:
    """torch's event: refuses, as torch does, while either is not done."""

    def __init__(self) -> None:
        self.done = True
        self.queries = 0

    @property
    def cuda_event(self) -> int:
        return id(self)

    def record(self, stream: object) -> None:
        HANDLES[id(self)] = self

    def query(self) -> bool:
        self.queries += 1
        return self.done

    def elapsed_time(self, end: Raw) -> float:
        if not (self.done and end.done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 2.5


HANDLES: dict[int, Raw] = {}


def driver(ms: Any, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> int:
    """cuEventElapsedTime."""
    first, last = HANDLES[begin.value or 0], HANDLES[end.value or 0]
    if not (first.done and last.done):
        return 600  # CUDA_ERROR_NOT_READY
    ms._obj.value = 1.5
    return 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """One without a GPU."""
    monkeypatch.setattr("tests.test_device_cuda_times.HANDLES", {})
    monkeypatch.setattr("torch.cuda.Event", lambda **options: Raw())
    monkeypatch.setattr("stretto.device.cuda._elapsed_time", lambda: driver)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
    return CudaDevice()


def event(device: CudaDevice, *, timing: bool = True, recorded: bool = True, done: bool = True) -> CudaEvent:
    made = device.event(timing)
    if recorded:
        stream_of(device).record(made)
    made.raw.done = done
    return made


def stream_of(device: CudaDevice) -> CudaStream:
    made = object.__new__(CudaStream)
    made.name, made.device, made.raw = "engine", device, None
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


def test_an_event_of_another_device_is_refused(device: CudaDevice) -> None:
    with pytest.raises(StrettoError, match="not an event of this device"):
        device.seconds_between(event(device), event(CudaDevice()))


def test_an_event_recorded_after_a_fault_tells_it_and_those_before_keep_their_time(device: CudaDevice) -> None:
    before = [event(device), event(device)]
    device.fail("engine", driver, RuntimeError("broken"))
    with pytest.raises(DeviceFault, match="broken"):
        device.seconds_between(before[0], event(device))
    assert device.seconds_between(*before) == 0.0015


@pytest.mark.parametrize(
    ("has", "taken"),
    [
        ({"cuEventElapsedTime", "cuEventElapsedTime_v2"}, "cuEventElapsedTime_v2"),
        ({"cuEventElapsedTime"}, "cuEventElapsedTime"),
    ],
)
def test_the_cheapest_call_of_the_driver_is_taken(has: set[str], taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {name: SimpleNamespace() for name in has}
    monkeypatch.setattr("ctypes.PyDLL", lambda name: SimpleNamespace(**calls))
    assert _elapsed_time() is calls[taken]


def test_where_there_is_no_driver_the_answer_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.PyDLL", missing)
    assert _elapsed_time()(None, None, None) != 0
