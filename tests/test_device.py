"""What every device does alike: the CPU, CUDA, and the two checking devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from stretto.device.base import Access, Device, DeviceClosed, DeviceFault, Stream
from stretto.device.checking import CheckingDevice
from stretto.device.cpu import CpuDevice
from stretto.device.cuda import CudaDevice
from stretto.device.delayed import DelayedCpuDevice
from stretto.errors import NotSupported, StrettoError

KINDS = [
    "cpu",
    "delayed",
    "checking",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]

TINY = (0.0, 1e-5)


def long_work() -> None:
    """Stands for work that takes a second; the checking device's cost hook knows it."""


def make(kind: str) -> Device:
    if kind == "cpu":
        return CpuDevice()
    if kind == "delayed":
        return DelayedCpuDevice(0, device_delay=TINY, host_delay=TINY)
    if kind == "checking":
        return CheckingDevice(0, host_delay=TINY, cost=lambda _stream, work, _args: 1.0 if work is long_work else 1e-5)
    return CudaDevice()


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = make(request.param)
    yield made
    made.close()


def occupy(device: Device, stream: Stream) -> Callable[[], None]:
    """Keep `stream` busy until the answer is called (a second at most where work cannot be let go)."""
    if isinstance(device, CheckingDevice):
        stream.run(long_work)
        return lambda: None
    if isinstance(device, CudaDevice):
        stream.run(torch.cuda._sleep, 2_000_000_000)
        return lambda: None
    gate = threading.Lock()
    gate.acquire()
    stream.run(gate.acquire)
    return gate.release


def zeros(device: Device, stream: Stream, n: int = 1) -> torch.Tensor:
    """A device tensor that is ready for work in any stream."""
    made: list[torch.Tensor] = []
    stream.run(lambda: made.append(torch.zeros(n, dtype=torch.int64, device=device.torch_device)))
    stream.synchronize()
    return made[0]


def double_and_add(x: torch.Tensor, n: int) -> None:
    x.mul_(2).add_(n)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def add(x: torch.Tensor, n: int) -> None:
    x.add_(n)


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def test_the_work_of_a_stream_runs_in_order(device: Device) -> None:
    stream = device.stream("engine")
    x = zeros(device, stream)
    expected = 0
    for n in range(40):
        stream.run(double_and_add, x, n)
        expected = expected * 2 + n
    stream.synchronize()
    assert x.item() == expected


def test_the_host_runs_ahead_of_the_device(device: Device) -> None:
    stream, done = device.stream("engine"), device.event()
    x = zeros(device, stream)
    let_go = occupy(device, stream)
    for _ in range(100):
        stream.run(add, x, 1)
    stream.record(done)
    assert not done.query()
    let_go()
    done.synchronize()
    assert done.query()
    assert x.item() == 100


def test_an_event_does_not_wait_for_work_after_it(device: Device) -> None:
    stream, first, second = device.stream("engine"), device.event(), device.event()
    x = zeros(device, stream)
    stream.run(add, x, 1)
    stream.record(first)
    let_go = occupy(device, stream)
    stream.record(second)
    first.synchronize()
    assert not second.query()
    let_go()
    second.synchronize()


def test_an_event_that_was_never_recorded_is_done_and_waiting_for_it_is_nothing(device: Device) -> None:
    stream, event = device.stream("engine"), device.event()
    x = zeros(device, stream)
    assert event.query()
    event.synchronize()
    stream.wait(event)
    stream.run(add, x, 1)
    stream.synchronize()
    assert x.item() == 1


def test_an_event_recorded_again_means_the_newer_point(device: Device) -> None:
    stream, event = device.stream("engine"), device.event()
    stream.record(event)
    event.synchronize()
    let_go = occupy(device, stream)
    stream.record(event)
    assert not event.query()
    let_go()
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize("by_event", [True, False])
def test_a_stream_waits_for_another_without_blocking_the_host(device: Device, by_event: bool) -> None:
    producer, consumer, event = device.stream("scheduler"), device.stream("engine"), device.event()
    x, y = zeros(device, producer), zeros(device, producer)
    let_go = occupy(device, producer)
    producer.run(add, x, 7)
    if by_event:
        producer.record(event)
        consumer.wait(event)
    else:
        consumer.wait_stream(producer)
    consumer.run(copy, y, x)
    let_go()
    consumer.synchronize()
    assert y.item() == 7


def test_pinned_memory_is_one_memory_for_host_and_device(device: Device) -> None:
    stream, landed = device.stream("engine"), device.event()
    up, down = device.pinned((5,), torch.int64), device.pinned((5,), torch.int64)
    x = zeros(device, stream, 5)
    up.array[:] = np.arange(5)
    stream.run(copy, x, up.tensor)
    stream.run(add, x, 1)
    stream.run(copy, down.tensor, x)
    stream.record(landed)
    landed.synchronize()
    assert down.array.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.uint8, torch.bool])
def test_pinned_memory_has_the_shape_and_dtype_asked_for(device: Device, dtype: torch.dtype) -> None:
    buffer = device.pinned((3, 4), dtype)
    assert buffer.array.shape == tuple(buffer.tensor.shape) == (3, 4)
    assert buffer.tensor.dtype is dtype
    assert torch.from_numpy(buffer.array).dtype is dtype


def test_pinned_memory_of_a_dtype_without_numpy_counterpart_is_refused(device: Device) -> None:
    with pytest.raises(NotSupported, match="bfloat16"):
        device.pinned((1,), torch.bfloat16)


def test_work_runs_in_inference_mode(device: Device) -> None:
    stream, seen = device.stream("engine"), []
    stream.run(lambda: seen.append(torch.is_inference_mode_enabled()))
    stream.synchronize()
    assert seen == [True]
    assert not torch.is_inference_mode_enabled()


def test_timed_events_measure_the_work_between_them(device: Device) -> None:
    stream, begin, end = device.stream("engine"), device.event(timing=True), device.event(timing=True)
    x = zeros(device, stream)
    stream.record(begin)
    stream.run(add, x, 1)
    stream.record(end)
    end.synchronize()
    assert device.seconds_between(begin, end) > 0
    assert device.seconds_between(end, begin) <= 0


def test_time_is_refused_for_events_without_it(device: Device) -> None:
    stream, timed, plain, pending = device.stream("s"), device.event(True), device.event(), device.event(True)
    stream.record(timed)
    stream.record(plain)
    stream.synchronize()
    with pytest.raises(StrettoError, match="timing=True"):
        device.seconds_between(timed, plain)
    with pytest.raises(StrettoError, match="recorded"):
        device.seconds_between(timed, pending)
    let_go = occupy(device, stream)
    stream.record(pending)
    with pytest.raises(StrettoError, match="done"):
        device.seconds_between(timed, pending)
    let_go()


def test_the_clock_never_goes_back(device: Device) -> None:
    stream = device.stream("engine")
    times = [device.now()]
    for _ in range(10):
        stream.run(lambda: None)
        times.append(device.now())
    assert times == sorted(times)


def test_a_failure_reaches_the_host_with_its_cause_and_stops_the_device(device: Device) -> None:
    stream, other = device.stream("engine"), device.stream("scheduler")
    before, after = device.event(), device.event()
    x = zeros(device, stream)
    stream.run(add, x, 1)
    stream.record(before)
    try:
        stream.run(fail)
        stream.run(add, x, 10)
    except DeviceFault:
        pass  # a device that runs work at once, or had the time to, already knows
    stream.record(after)
    for use in (after.synchronize, after.query, stream.synchronize, lambda: stream.run(add, x, 100)):
        with pytest.raises(DeviceFault, match=r"work 'fail' on stream 'engine'.*ZeroDivisionError: on purpose") as info:
            use()
        assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(DeviceFault, match="'fail'"):
        other.run(add, x, 1000)
    before.synchronize()
    assert before.query()
    assert x.item() == 1
    device.close()


def test_a_closed_device_has_done_its_work_and_takes_no_more(device: Device) -> None:
    stream, event = device.stream("engine"), device.event()
    x = zeros(device, stream)
    for _ in range(50):
        stream.run(add, x, 1)
    stream.record(event)
    device.close()
    device.close()
    assert x.item() == 50
    event.synchronize()
    assert event.query()
    with pytest.raises(DeviceClosed, match="closed"):
        stream.run(add, x, 1)
    with pytest.raises(DeviceClosed, match="closed"):
        stream.record(event)


def test_streams_and_events_of_another_device_are_refused(device: Device) -> None:
    stranger = CpuDevice()
    foreign_stream, foreign_event = stranger.stream("foreign"), stranger.event()
    stream = device.stream("engine")
    with pytest.raises(StrettoError, match="another device"):
        stream.wait_stream(foreign_stream)
    for use in (stream.wait, stream.record):
        with pytest.raises(StrettoError, match="not an event of this device"):
            use(foreign_event)
    stranger.close()


def test_declared_accesses_change_nothing_where_they_are_right(device: Device) -> None:
    stream, done = device.stream("engine"), device.event()
    x = zeros(device, stream)
    page = ("page", 3)
    device.taken([page])
    device.host_access(writes=[page])
    stream.run(add, x, 1, access=lambda: Access(reads=(page,), writes=(page,)))
    stream.record(done)
    done.synchronize()
    device.host_access(reads=[page])
    device.released([page])
    device.taken([page])
    assert x.item() == 1


def test_only_a_checking_device_looks_at_accesses(device: Device) -> None:
    asked = []

    def access() -> Access:
        asked.append(True)
        return Access()

    stream = device.stream("engine")
    stream.run(lambda: None, access=access)
    stream.synchronize()
    assert bool(asked) == device.checking


def test_a_running_scope_may_nest(device: Device) -> None:
    stream = device.stream("engine")
    x = zeros(device, stream)
    with device.running(), device.running():
        stream.run(add, x, 1)
        stream.synchronize()
    assert x.item() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_clearly_where_there_is_none() -> None:
    with pytest.raises(NotSupported, match="no CUDA GPU"):
        CudaDevice()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cuda_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(NotSupported, match="no CUDA GPU 99"):
        CudaDevice(99)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_running_scope_gives_the_thread_its_cuda_stream_back() -> None:
    device = CudaDevice()
    stream, own = device.stream("engine"), torch.cuda.Stream()
    with torch.cuda.stream(own):
        with device.running():
            stream.run(lambda: None)
            assert torch.cuda.current_stream() == stream.raw
        assert torch.cuda.current_stream() == own
    device.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_streams_of_different_priority_run_side_by_side_and_pinned_memory_is_page_locked() -> None:
    device = CudaDevice()
    slow, fast = device.stream("slow"), device.stream("fast", priority=-99)
    assert fast.raw.priority < slow.raw.priority == 0
    assert device.pinned((2,), torch.int32).tensor.is_pinned()
    slow_done, fast_done = device.event(), device.event()
    slow.run(torch.cuda._sleep, 2_000_000_000)
    slow.record(slow_done)
    fast.run(torch.cuda._sleep, 1_000)
    fast.record(fast_done)
    fast_done.synchronize()
    assert not slow_done.query()
    slow_done.synchronize()
    device.close()
