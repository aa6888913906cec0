"""A CUDA GPU as a device: `torch.cuda` streams, events and page-locked memory behind the `Device` interface.

Importing this file touches no CUDA; making a `CudaDevice` does. The host is the only thread: `run` calls the work at
once, and what the work launches is asynchronous.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import torch

from stretto.device.base import Access, Device, DeviceClosed, DeviceFault, Event, HostBuffer, Region, Stream, T
from stretto.device.faults import Fault
from stretto.device.host_memory import shared_buffer
from stretto.errors import NotSupported, StrettoError

HIGHEST_PRIORITY = -5  # of the streams of a CUDA device; torch takes -5 to 0 and the driver rounds to what it has


class CudaDevice(Device):
    """One GPU.

    A tensor that is made by work of one stream and used in another must be kept alive by its owner until an event says
    that the use is over (torch's allocator follows only the stream that made it); the engine's buffers live as long as
    the engine.

    Args:
        index: which of the visible GPUs.

    Raises NotSupported if torch has no CUDA, the machine no usable GPU, or no GPU of this index.
    """

    checking = False

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
            raise NotSupported(f"no CUDA GPU: torch {torch.__version__} {built} and finds no usable GPU; use the CPU")
        if not 0 <= index < torch.cuda.device_count():
            raise NotSupported(f"no CUDA GPU {index}: there are {torch.cuda.device_count()}, counted from 0")
        self.torch_device = torch.device("cuda", index)
        self.closed = False
        self.fault: Fault | None = None
        torch.cuda.set_device(self.torch_device)
        self._elapsed, self._elapsed_ms = _elapsed_time(), ctypes.c_float()
        self._elapsed_at = ctypes.byref(self._elapsed_ms)

    def stream(self, name: str, priority: int = 0) -> CudaStream:
        """A new stream. `priority` 0 is the lowest, down to -5 is higher; what is outside is moved to the nearest."""
        return CudaStream(name, self, max(HIGHEST_PRIORITY, min(0, priority)))

    def event(self, timing: bool = False) -> CudaEvent:
        """A new event."""
        return CudaEvent(self, timing)

    def seconds_between(self, begin: Event, end: Event) -> float:
        """GPU time in seconds. Raises StrettoError unless both were recorded with timing and are done. hot path"""
        # Asked twice in every step; torch's own call would ask the driver three times as often.
        if (
            isinstance(begin, CudaEvent)
            and isinstance(end, CudaEvent)
            and begin.clock is self
            and end.clock is self
            and self._elapsed(self._elapsed_at, begin.handle, end.handle) == 0
        ):
            return self._elapsed_ms.value * 1e-3
        return self._torch_seconds_between(self.own(begin), self.own(end))

    def _torch_seconds_between(self, begin: CudaEvent, end: CudaEvent) -> float:
        """By torch, if there is a time at all."""
        fault = begin.fault or end.fault
        if fault is not None:
            raise fault.error()
        if begin.clock is self and end.clock is self and begin.query() and end.query():  # raise if the GPU has failed
            return float(begin.raw.elapsed_time(end.raw)) * 1e-3
        raise StrettoError("the event has no time: it must be made with timing=True, recorded and done")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        """Page-locked host memory, contents undefined. May block the host: allocate at start-up."""
        return shared_buffer(shape, dtype, page_locked=True)

    now = staticmethod(time.perf_counter)

    def host_access(self, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        """Nothing: this device does not check. hot path"""

    def taken(self, regions: Iterable[Region]) -> None:
        """Nothing: this device does not check. hot path"""

    def released(self, regions: Iterable[Region]) -> None:
        """Nothing: this device does not check. hot path"""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Give the calling thread its current device and stream back at the end: its own work may go on there."""
        index = torch.cuda.current_device()
        stream = torch.cuda.current_stream(self.torch_device)
        try:
            yield
        finally:
            with suppress(RuntimeError):  # of a GPU that has failed
                torch.cuda.set_stream(stream)
                torch.cuda.set_device(index)

    def call(self, make: Callable[[], T]) -> T:
        """Runs `make` at once and waits for what it put on the GPU."""
        made = make()
        torch.cuda.synchronize(self.torch_device)
        return made

    def close(self) -> None:
        """Wait for the GPU's work, then take no more. Idempotent. Raises nothing if work failed."""
        if not self.closed:
            self.closed = True
            if self.fault is None:
                with suppress(RuntimeError):  # work that failed; whoever wanted its results was told
                    torch.cuda.synchronize(self.torch_device)

    # For the streams and events of this device.

    def refuse_if_unusable(self) -> None:
        """Raise DeviceFault or DeviceClosed if the device takes no more work."""
        if self.closed:
            raise DeviceClosed(f"device {self.torch_device} is closed; it takes no more work")
        if self.fault is not None:
            raise self.fault.error()

    def fail(self, stream: str, work: Callable[..., None], cause: BaseException) -> DeviceFault:
        """Take no more work; the error to raise, with `cause` as its cause."""
        self.fault = Fault(str(self.torch_device), stream, work, cause)
        return self.fault.error()

    def own(self, event: Event) -> CudaEvent:
        """The event itself, if it is this device's. Raises StrettoError otherwise."""
        if not isinstance(event, CudaEvent) or event.device is not self:
            raise StrettoError(f"{event!r} is not an event of this device")
        return event


class CudaStream(Stream):
    """A CUDA stream; `raw` is torch's."""

    def __init__(self, name: str, device: CudaDevice, priority: int) -> None:
        self.name = name
        self.device = device
        self.raw = torch.cuda.Stream(device.torch_device, priority=priority)  # type: ignore[no-untyped-call]
        self._handle: int = self.raw.cuda_stream
        self._index: int = device.torch_device.index

    def run(self, work: Callable[..., None], *args: object, access: Callable[[], Access] | None = None) -> None:
        """Call `work(*args)` now, with this stream as the current one and in inference mode. hot path

        The stream stays the calling thread's current one, to the end of `running`: switching there and back costs more
        than many a work. What the work launches is asynchronous. Raises DeviceFault at once if the work raises, or if
        the driver reports that earlier work has failed; DeviceClosed after `close`.
        """
        device = self.device
        if device.closed or device.fault is not None:
            device.refuse_if_unusable()
        try:
            # A thread has one current stream for each device, and one current device.
            if (
                torch._C._cuda_getCurrentRawStream(self._index) != self._handle
                or torch._C._cuda_getDevice() != self._index
            ):
                torch.cuda.set_stream(self.raw)
            with torch.inference_mode():
                work(*args)
        except Exception as cause:
            raise device.fail(self.name, work, cause) from cause

    def record(self, event: Event) -> None:
        """Record `event` behind the work so far. hot path"""
        device = self.device
        if device.closed:
            device.refuse_if_unusable()
        own = device.own(event)
        own.raw.record(self.raw)
        if not own.recorded:
            own.recorded = True
            own.handle.value = own.raw.cuda_event  # torch makes the event when it is first recorded
            own.clock = device if own.timing else None
        if device.fault is not None:
            own.fault, own.clock = device.fault, None

    def wait(self, event: Event) -> None:
        """Let the GPU hold back following work until the event's point. hot path"""
        own = self.device.own(event)
        if own.recorded:
            self.raw.wait_event(own.raw)

    def wait_stream(self, other: Stream) -> None:
        """Let the GPU hold back following work until the work of `other` so far is done. hot path"""
        if not isinstance(other, CudaStream) or other.device is not self.device:
            raise StrettoError(f"stream {self.name!r} cannot wait for {other!r}: it belongs to another device")
        self.raw.wait_stream(other.raw)

    def synchronize(self) -> None:
        """Block until this stream's work so far is done. Raises DeviceFault if some failed."""
        if self.device.fault is not None:
            raise self.device.fault.error()
        try:
            self.raw.synchronize()
        except RuntimeError as cause:
            raise self.device.fail(self.name, self.raw.synchronize, cause) from cause


class CudaEvent(Event):
    """A CUDA event; `raw` is torch's."""

    def __init__(self, device: CudaDevice, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.recorded = False
        self.handle = ctypes.c_void_p()  # an int would be made into one of these at every call of the driver
        self.clock: CudaDevice | None = None  # on which it has a time
        self.fault: Fault | None = None  # what had failed when it was recorded
        self.raw = torch.cuda.Event(enable_timing=timing, blocking=False)  # type: ignore[no-untyped-call]

    def query(self) -> bool:
        """Whether the GPU has passed the point. Never blocks. hot path"""
        if not self.recorded:
            return True
        if self.fault is not None:
            raise self.fault.error()
        try:
            return bool(self.raw.query())  # type: ignore[no-untyped-call]
        except RuntimeError as cause:
            raise self.device.fail("of an event", self.raw.query, cause) from cause

    def synchronize(self) -> None:
        """Block until the GPU has passed the point; the GIL is free meanwhile. hot path"""
        if not self.recorded:
            return
        if self.fault is not None:
            raise self.fault.error()
        try:
            self.raw.synchronize()
        except RuntimeError as cause:
            raise self.device.fail("of an event", self.raw.synchronize, cause) from cause


def _elapsed_time() -> Callable[..., int]:
    """The driver's cuEventElapsedTime(float *ms, begin, end): 0 if both events are recorded with timing and done.

    Since CUDA 12.8 there is one that only computes (0.8 us), beside the old one that asks for the state of both events
    first (3.6 us). Where the driver has another name (not on Linux), a call that always says no.
    """
    try:
        driver = ctypes.PyDLL("libcuda.so.1")  # without giving up the GIL: it never waits
        call = getattr(driver, "cuEventElapsedTime_v2", None) or driver.cuEventElapsedTime
    except (OSError, AttributeError):
        return lambda ms, begin, end: 1
    call.restype = ctypes.c_int  # no argument types: what it is given are C values, and a check of them costs more
    return cast(Callable[..., int], call)
