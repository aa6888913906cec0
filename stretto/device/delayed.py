"""The CPU device with seeded random delays and checked accesses: real threads for the tests that need them.

Wraps a `CpuDevice`; owns the delays. The delays follow from the seed and the host's calls; what the two threads do to
each other in between does not, so a failure here may not repeat. `checking.py` is the device whose runs do.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from stretto.device.base import Access, Event, Stream, T
from stretto.device.checked import CheckedDevice
from stretto.device.cpu import CpuDevice, CpuEvent, CpuStream
from stretto.device.happens_before import Point
from stretto.errors import StrettoError


class DelayedCpuDevice(CheckedDevice):
    """A slow CPU device under a slow host. One host thread.

    Args:
        seed: decides the delays.
        device_delay: shortest and longest sleep before each piece of work, in seconds.
        host_delay: shortest and longest sleep in each call of the host (also in those that otherwise never block).
        num_threads: as for `CpuDevice`.
        raising: raise HazardError at the call of the host that meets a hazard; otherwise only collect in `hazards`.
    """

    def __init__(
        self,
        seed: int,
        *,
        device_delay: tuple[float, float] = (0.0, 1e-3),
        host_delay: tuple[float, float] = (0.0, 1e-3),
        num_threads: int | None = None,
        raising: bool = True,
    ) -> None:
        super().__init__(raising=raising)
        self._inner = CpuDevice(num_threads)
        self._uniform = random.Random(seed).uniform
        self._device_delay = device_delay
        self._host_delay = host_delay

    def stream(self, name: str, priority: int = 0) -> DelayedStream:
        """A new stream."""
        return DelayedStream(self, self._inner.stream(name, priority))

    def event(self, timing: bool = False) -> DelayedEvent:
        """A new event."""
        return DelayedEvent(self, self._inner.event(timing))

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Seconds. Raises StrettoError unless both were recorded with timing and are done."""
        return self._inner.seconds_between(self.own(begin).inner, self.own(end).inner)

    def now(self) -> float:
        """Monotonic seconds."""
        return self._inner.now()

    def running(self) -> AbstractContextManager[None]:
        """As `CpuDevice.running`."""
        return self._inner.running()

    def call(self, make: Callable[[], T]) -> T:
        """As `CpuDevice.call`."""
        return self._inner.call(make)

    def close(self) -> None:
        """Run what is enqueued, then end the worker. Blocks until it has ended. Idempotent."""
        self._inner.close()

    # For the streams and events of this device.

    def host_call(self) -> None:
        """A call of the host begins: sleep."""
        time.sleep(self._uniform(*self._host_delay))

    def device_sleep(self) -> float:
        """How long to sleep before the next piece of work, in seconds."""
        return self._uniform(*self._device_delay)

    def own(self, event: Event) -> DelayedEvent:
        """The event itself, if it is this device's. Raises StrettoError otherwise."""
        if not isinstance(event, DelayedEvent) or event.device is not self:
            raise StrettoError(f"{event!r} is not an event of this device")
        return event


class DelayedStream(Stream):
    """A `CpuStream` whose work comes late."""

    def __init__(self, device: DelayedCpuDevice, inner: CpuStream) -> None:
        self.name = inner.name
        self.device = device
        self.inner = inner
        self._order = device.order
        self._actor = self._order.actor(inner.name)

    def run(self, work: Callable[..., None], *args: object, access: Callable[[], Access] | None = None) -> None:
        """Enqueue a sleep and the work, and check its accesses. Raises HazardError, DeviceFault or DeviceClosed."""
        self.device.host_call()
        if access is not None:
            self._order.launch(self._actor, work, access(), sys._getframe(1))
        self.inner.run(time.sleep, self.device.device_sleep())
        self.inner.run(work, *args)

    def record(self, event: Event) -> None:
        """Enqueue the recording."""
        self.device.host_call()
        own = self.device.own(event)
        own.point = self._order.point(self._actor)
        self.inner.record(own.inner)

    def wait(self, event: Event) -> None:
        """Let following work follow the event's point."""
        self.device.host_call()
        own = self.device.own(event)
        if own.point is not None:
            self._order.wait(self._actor, own.point)
        self.inner.wait(own.inner)

    def wait_stream(self, other: Stream) -> None:
        """Let following work follow what `other` has so far."""
        self.device.host_call()
        if not isinstance(other, DelayedStream) or other.device is not self.device:
            raise StrettoError(f"stream {self.name!r} cannot wait for {other!r}: it belongs to another device")
        self._order.wait(self._actor, self._order.point(other._actor))
        self.inner.wait_stream(other.inner)

    def synchronize(self) -> None:
        """Block until the work enqueued so far is done. Raises DeviceFault if some of it failed."""
        self.device.host_call()
        point = self._order.point(self._actor)
        self.inner.synchronize()
        self._order.host_knows(point)


class DelayedEvent(Event):
    """A `CpuEvent` with what it has seen; `point` is None until it is recorded."""

    def __init__(self, device: DelayedCpuDevice, inner: CpuEvent) -> None:
        self.device = device
        self.inner = inner
        self.point: Point | None = None

    def query(self) -> bool:
        """Whether the point is reached, after a host delay."""
        self.device.host_call()
        done = self.inner.query()
        if done and self.point is not None:
            self.device.order.host_knows(self.point)
        return done

    def synchronize(self) -> None:
        """Block until the point is reached."""
        self.device.host_call()
        self.inner.synchronize()
        if self.point is not None:
            self.device.order.host_knows(self.point)
