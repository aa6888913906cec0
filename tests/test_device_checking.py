"""The virtual device: its time, its order, its poison, and that a seed decides everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.device.base import Access, Device
from stretto.device.checking import CheckingDevice, Executed
from stretto.device.cpu import CpuDevice
from stretto.device.delayed import DelayedCpuDevice
from stretto.device.hazards import HazardError
from stretto.device.poison import is_poison, poison
from stretto.errors import StrettoError

NO_DELAY = (0.0, 0.0)


def slow(log: list[str], name: str) -> None:
    log.append(name)


def priced(seconds: dict[str, float], **options: object) -> CheckingDevice:
    """A device whose host calls are free and whose work `slow(log, name)` costs `seconds[name]`."""
    return CheckingDevice(0, host_delay=NO_DELAY, cost=lambda _s, _w, args: seconds[str(args[1])], **options)  # type: ignore[arg-type]


def test_work_takes_effect_when_the_hosts_clock_passes_its_end() -> None:
    device, log = priced({"a": 2.0, "b": 3.0}), []
    stream = device.stream("engine")
    stream.run(slow, log, "a")
    stream.run(slow, log, "b")
    device.host_work(1.9)
    assert log == []
    device.host_work(0.2)
    assert log == ["a"]
    device.host_work(2.8)
    assert log == ["a"]
    device.host_work(0.2)
    assert log == ["a", "b"]
    assert device.now() == pytest.approx(5.1)


def test_streams_overlap_and_effects_come_in_the_order_of_their_ends() -> None:
    device, log = priced({"long": 5.0, "short": 1.0, "next": 1.0}), []
    engine, scheduler = device.stream("engine"), device.stream("scheduler")
    engine.run(slow, log, "long")
    scheduler.run(slow, log, "short")
    scheduler.run(slow, log, "next")
    engine.synchronize()
    assert log == ["short", "next", "long"]
    assert device.now() == pytest.approx(5.0)


def test_waiting_for_a_stream_delays_the_work_and_not_the_host() -> None:
    device, log = priced({"copy": 5.0, "forward": 1.0}), []
    engine, scheduler = device.stream("engine"), device.stream("scheduler")
    scheduler.run(slow, log, "copy")
    engine.wait_stream(scheduler)
    engine.run(slow, log, "forward")
    assert device.now() == 0.0
    engine.synchronize()
    assert log == ["copy", "forward"]
    assert device.now() == pytest.approx(6.0)


def test_synchronising_moves_the_hosts_clock_to_the_event_only() -> None:
    device, log = priced({"a": 1.0, "b": 10.0}), []
    stream, event = device.stream("engine"), device.event(timing=True)
    stream.run(slow, log, "a")
    stream.record(event)
    stream.run(slow, log, "b")
    assert not event.query()
    event.synchronize()
    assert (log, device.now()) == (["a"], 1.0)
    device.close()
    assert log == ["a", "b"]


def test_polling_an_event_ends() -> None:
    device, log = CheckingDevice(3, device_delay=(1e-3, 1e-3), host_delay=(1e-6, 1e-5)), []
    stream, event = device.stream("engine"), device.event()
    stream.run(slow, log, "a")
    stream.record(event)
    polls = 1
    while not event.query():
        polls += 1
    assert log == ["a"]
    assert polls > 50


def test_what_the_host_writes_before_a_copys_end_is_what_the_copy_reads() -> None:
    device = priced({"n": 1.0})
    stream, buffer, seen = device.stream("scheduler"), device.pinned((1,), torch.int32), []
    buffer.array[0] = 1
    stream.run(lambda array, _: seen.append(int(array[0])), buffer.array, "n")
    buffer.array[0] = 2
    stream.synchronize()
    assert seen == [2]


def test_no_thread_is_made_and_no_real_time_is_spent() -> None:
    threads, begin = threading.active_count(), time.perf_counter()
    device = CheckingDevice(0, device_delay=(100.0, 1000.0))
    stream = device.stream("engine")
    for _ in range(10):
        stream.run(lambda: None)
    stream.synchronize()
    assert threading.active_count() == threads
    assert device.now() > 1000.0 > time.perf_counter() - begin


@pytest.mark.parametrize("bad", [(-1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_senseless_delays_are_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="host_delay"):
        CheckingDevice(0, host_delay=bad)
    with pytest.raises(ValueError, match="device_delay"):
        CheckingDevice(0, device_delay=bad)


def test_work_that_calls_its_own_device_is_refused() -> None:
    device = CheckingDevice(0)
    stream = device.stream("engine")
    stream.run(stream.synchronize)
    with pytest.raises(StrettoError, match="only the host may"):
        stream.synchronize()


def test_ctrl_c_in_work_interrupts_the_host() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    device = CheckingDevice(0)
    stream = device.stream("engine")
    stream.run(interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.synchronize()


def test_a_failure_stops_other_streams_only_after_its_time() -> None:
    device, log = priced({"early": 1.0, "late": 3.0, "fails": 2.0}), []
    engine, scheduler = device.stream("engine"), device.stream("scheduler")
    early, late = device.event(), device.event()
    engine.run(lambda *_: 1 / 0, log, "fails")
    scheduler.run(slow, log, "early")
    scheduler.record(early)
    scheduler.run(slow, log, "late")
    scheduler.record(late)
    early.synchronize()
    with pytest.raises(StrettoError, match="ZeroDivisionError"):
        late.synchronize()
    early.synchronize()
    assert log == ["early"]


# --- determinism ----------------------------------------------------------------------------------------------------


def trace(seed: int) -> list[tuple[str, float, float, float] | float]:
    """Everything that a small two-stream program makes the device do."""
    seen: list[tuple[str, float, float, float] | float] = []
    device = CheckingDevice(
        seed, on_executed=lambda done: seen.append((done.stream, done.enqueued, done.begin, done.end))
    )
    streams, event = [device.stream("scheduler"), device.stream("engine")], device.event()
    for n in range(40):
        streams[n % 2].run(lambda: None)
        if n % 3 == 0:
            streams[n % 2].record(event)
            streams[1 - n % 2].wait(event)
        seen.append(float(event.query()))
        seen.append(device.now())
    device.close()
    return seen


@given(st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    assert trace(seed) == trace(seed)


def test_another_seed_gives_another_trace() -> None:
    assert len({tuple(map(str, trace(seed))) for seed in range(20)}) == 20


def test_a_trace_tells_what_ran_where_and_when() -> None:
    seen: list[Executed] = []
    device = priced({"a": 2.0, "b": 1.0}, on_executed=seen.append)
    stream, log = device.stream("engine"), []
    stream.run(slow, log, "a")
    device.host_work(0.5)
    stream.run(slow, log, "b")
    device.close()
    assert [(done.work, done.args[1], done.enqueued, done.begin, done.end) for done in seen] == [
        (slow, "a", 0.0, 0.0, 2.0),
        (slow, "b", 0.5, 2.0, 3.0),
    ]


# --- poison ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["checking", "delayed"])
def checking(request: pytest.FixtureRequest) -> Iterator[CheckingDevice | DelayedCpuDevice]:
    device: CheckingDevice | DelayedCpuDevice
    if request.param == "checking":
        device = CheckingDevice(0)
    else:
        device = DelayedCpuDevice(0, device_delay=NO_DELAY, host_delay=NO_DELAY)
    yield device
    device.close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32])
def test_pinned_memory_starts_poisoned(checking: Device, dtype: torch.dtype) -> None:
    assert is_poison(checking.pinned((4, 3), dtype).array).all()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16]
)
def test_arrays_and_tensors_are_poisoned_alike(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, dtype=dtype)
    poison(tensor)
    seen = (tensor.float() if dtype is torch.bfloat16 else tensor).numpy()
    assert is_poison(seen).all()
    poison(seen)
    assert is_poison(seen).all()
    assert not is_poison(np.zeros_like(seen)).any()


def test_a_poisoned_index_is_out_of_bounds() -> None:
    for dtype in (torch.int32, torch.int64):
        index = torch.zeros(1, dtype=dtype)
        poison(index)
        with pytest.raises(IndexError):
            torch.arange(10)[index]


def test_released_regions_are_poisoned_at_once(checking: CheckingDevice | DelayedCpuDevice) -> None:
    pages = np.ones((4, 2), np.float32)
    checking.on_release("page", lambda index: poison(pages[index]))
    checking.released([("page", 2), ("row", 1)])
    assert is_poison(pages)[:, 0].tolist() == [False, False, True, False]


def test_a_ring_entry_can_be_poisoned_when_it_is_handed_back(checking: CheckingDevice | DelayedCpuDevice) -> None:
    stream, ring = checking.stream("scheduler"), [checking.pinned((2,), torch.int32) for _ in range(2)]
    checking.on_release("staging.host", lambda index: poison(ring[index].array))
    entry = ("staging.host", 1)
    for _ in range(2):
        checking.taken([entry])
        checking.host_access(writes=[entry])
        ring[1].array[:] = 5
        stream.run(lambda: None, access=lambda: Access(reads=(entry,)))
        stream.synchronize()
        checking.released([entry])
        assert is_poison(ring[1].array).all()


def test_a_hazard_is_raised_where_the_host_meets_it_and_kept(checking: CheckingDevice | DelayedCpuDevice) -> None:
    stream, region = checking.stream("engine"), ("results.host", 0)
    stream.run(lambda: None, access=lambda: Access(writes=(region,)))
    with pytest.raises(HazardError, match="raw_results") as info:
        checking.host_access(reads=[region])
    assert checking.hazards == [info.value]
    assert __file__ in str(info.value)
    assert "device/" not in str(info.value)


def test_seeing_an_event_done_is_knowing_it(checking: CheckingDevice | DelayedCpuDevice) -> None:
    stream, event, region = checking.stream("engine"), checking.event(), ("results.host", 0)
    stream.run(lambda: None, access=lambda: Access(writes=(region,)))
    stream.record(event)
    while not event.query():
        pass
    checking.host_access(reads=[region])


def test_a_query_that_says_no_is_not_knowing_it() -> None:
    device = CheckingDevice(0, device_delay=(1.0, 1.0), host_delay=NO_DELAY)
    stream, event, region = device.stream("engine"), device.event(), ("results.host", 0)
    stream.run(lambda: None, access=lambda: Access(writes=(region,)))
    stream.record(event)
    assert not event.query()
    with pytest.raises(HazardError):
        device.host_access(reads=[region])


def test_the_delayed_device_runs_what_the_cpu_device_runs() -> None:
    def program(device: Device) -> float:
        stream, out = device.stream("engine"), device.pinned((), torch.float32)
        x = torch.ones(8)
        for n in range(20):
            stream.run(x.mul_, 1.0 + n / 10)
        stream.run(lambda: out.tensor.copy_(x.sum()))
        stream.synchronize()
        device.close()
        return float(out.array)

    assert program(DelayedCpuDevice(5, device_delay=(0.0, 1e-4), host_delay=(0.0, 1e-4))) == program(CpuDevice())
