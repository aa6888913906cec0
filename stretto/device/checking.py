"""A device for tests in virtual time: asynchronous, seeded, on one thread, without sleeping, and it checks accesses.

Owns the virtual clock and the work that has not taken effect. The happens-before tracker is in `happens_before.py`.

Each piece of work takes a seeded virtual time and begins when the host has enqueued it, the work before it in its
stream has ended, and what the stream waits for is done; works of different streams overlap. Each call of the host costs
a seeded virtual time too. A work's *effect* (calling its function) happens at its virtual end, and only once the host's
clock has passed that end, or the host waits, which moves its clock there. So where a guard is missing, a copy really
reads what the host has written meanwhile, and the host really reads memory that has not landed. The same seed, the same
calls: the same everything.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from stretto.device.base import Access, DeviceClosed, Event, Stream, T
from stretto.device.checked import CheckedDevice
from stretto.device.faults import Fault
from stretto.device.happens_before import Point
from stretto.errors import StrettoError

Work = Callable[..., None]
Cost = Callable[[str, Work, tuple[object, ...]], float]
"""(name of the stream, work, its arguments) -> seconds that the work takes."""


class Executed(NamedTuple):
    """One piece of work that has taken effect; times in virtual seconds."""

    stream: str
    work: Work
    args: tuple[object, ...]
    enqueued: float
    begin: float
    end: float


class CheckingDevice(CheckedDevice):
    """The virtual device. Not thread-safe: one host thread.

    Args:
        seed: decides every delay.
        device_delay: shortest and longest time of a piece of work, in seconds.
        host_delay: shortest and longest time of a call of the host.
        cost: answers the time of each piece of work instead of `device_delay`.
        raising: raise HazardError at the call of the host that meets a hazard; otherwise only collect in `hazards`.
        on_executed: is told each piece of work when it has taken effect.
    """

    def __init__(
        self,
        seed: int,
        *,
        device_delay: tuple[float, float] = (0.0, 1e-3),
        host_delay: tuple[float, float] = (0.0, 1e-3),
        cost: Cost | None = None,
        raising: bool = True,
        on_executed: Callable[[Executed], None] | None = None,
    ) -> None:
        for name, (low, high) in (("device_delay", device_delay), ("host_delay", host_delay)):
            if not 0.0 <= low <= high:
                raise ValueError(f"{name} is ({low}, {high}); it must be 0 <= shortest <= longest")
        super().__init__(raising=raising)
        self._random = random.Random(seed).random
        self._device_delay = device_delay
        self._host_delay = host_delay
        self._cost = cost
        self._on_executed = on_executed
        self._now = 0.0
        self._sequence = 0
        self._pending: list[tuple[float, int, Executed]] = []  # a heap, by end and then by order of enqueueing
        self._executing = False
        self._fault: Fault | None = None
        self._fault_at = (0.0, 0)
        self._closed = False

    def stream(self, name: str, priority: int = 0) -> VirtualStream:
        """A new stream, which shares no hardware with the others: `priority` changes nothing."""
        return VirtualStream(name, self)

    def event(self, timing: bool = False) -> VirtualEvent:
        """A new event."""
        return VirtualEvent(self, timing)

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Virtual seconds. Raises StrettoError unless both were recorded with timing and are done."""
        return self.own(end).reached_at() - self.own(begin).reached_at()

    def now(self) -> float:
        """The host's virtual clock. The only call of the host that costs no time."""
        return self._now

    def running(self) -> AbstractContextManager[None]:
        """Nothing to tune: there is one thread."""
        return nullcontext()

    def call(self, make: Callable[[], T]) -> T:
        """Runs `make` at once: there is one thread."""
        return make()

    def close(self) -> None:
        """Let all work take effect, then take no more. Idempotent; raises nothing if work fails."""
        while self._pending:
            self.advance_to(self._pending[0][0])
        self._closed = True

    def host_work(self, seconds: float) -> None:
        """Let the host be busy for so long: a simulation's own cost of host code."""
        self.advance_to(self._now + seconds)

    # For the streams and events of this device.

    def host_call(self) -> None:
        """A call of the host begins: it takes its time, and work that ends meanwhile takes effect. hot path"""
        low, high = self._host_delay
        self.advance_to(self._now + low + (high - low) * self._random())

    def advance_to(self, time: float) -> None:
        """Move the host's clock forward to `time` (never back). hot path"""
        if self._executing:
            raise StrettoError("work on a device called its own device; only the host may")
        if time > self._now:
            self._now = time
        if self._pending and self._pending[0][0] <= self._now:
            self._execute()

    def enqueue(self, stream: str, work: Work, args: tuple[object, ...], ready: float) -> float:
        """Queue work that may begin at `ready`; returns when it ends. Raises DeviceFault or DeviceClosed. hot path"""
        self.refuse_if_unusable()
        if self._cost is not None:
            seconds = self._cost(stream, work, args)
        else:
            low, high = self._device_delay
            seconds = low + (high - low) * self._random()
        begin = max(ready, self._now)
        end = begin + seconds
        heappush(self._pending, (end, self.next_sequence(), Executed(stream, work, args, self._now, begin, end)))
        return end

    def next_sequence(self) -> int:
        """A number that orders what happens at the same virtual time."""
        self._sequence += 1
        return self._sequence

    def refuse_if_unusable(self) -> None:
        """Raise DeviceFault or DeviceClosed if the device takes no more work."""
        self.refuse_if_closed()
        if self._fault is not None:
            raise self._fault.error()

    def refuse_if_closed(self) -> None:
        """Raise DeviceClosed after `close`."""
        if self._closed:
            raise DeviceClosed("the checking device is closed; it takes no more work")

    def raise_fault_before(self, time: float, sequence: int) -> None:
        """Raise DeviceFault if work failed before this point."""
        if self._fault is not None and self._fault_at < (time, sequence):
            raise self._fault.error()

    def own(self, event: Event) -> VirtualEvent:
        """The event itself, if it is this device's. Raises StrettoError otherwise."""
        if not isinstance(event, VirtualEvent) or event.device is not self:
            raise StrettoError(f"{event!r} is not an event of this device")
        return event

    def _execute(self) -> None:
        pending = self._pending
        self._executing = True
        try:
            with torch.inference_mode():
                while pending and pending[0][0] <= self._now:
                    end, sequence, item = heappop(pending)
                    if self._fault is not None:
                        continue
                    try:
                        item.work(*item.args)
                    except Exception as cause:
                        self._fault = Fault("checking", item.stream, item.work, cause)
                        self._fault_at = (end, sequence)
                        continue
                    if self._on_executed is not None:
                        self._on_executed(item)
        finally:
            self._executing = False


class VirtualStream(Stream):
    """A queue whose work ends at known virtual times."""

    def __init__(self, name: str, device: CheckingDevice) -> None:
        self.name = name
        self.device = device
        self.actor = device.order.actor(name)
        self.ready = 0.0  # when everything that the next work has to follow is done

    def run(self, work: Work, *args: object, access: Callable[[], Access] | None = None) -> None:
        """Enqueue work and check its accesses. Raises HazardError, DeviceFault or DeviceClosed."""
        self.device.host_call()
        if access is not None:
            self.device.order.launch(self.actor, work, access(), sys._getframe(1))
        self.ready = self.device.enqueue(self.name, work, args, self.ready)

    def record(self, event: Event) -> None:
        """Record: the event's time is known at once, the host is not told it."""
        self.device.host_call()
        self.device.refuse_if_closed()
        self.device.own(event).renew(self)

    def wait(self, event: Event) -> None:
        """Let following work follow the event's point."""
        self.device.host_call()
        own = self.device.own(event)
        if own.point is not None:
            self.ready = max(self.ready, own.time)
            self.device.order.wait(self.actor, own.point)

    def wait_stream(self, other: Stream) -> None:
        """Let following work follow what `other` has so far."""
        if not isinstance(other, VirtualStream) or other.device is not self.device:
            raise StrettoError(f"stream {self.name!r} cannot wait for {other!r}: it belongs to another device")
        event = VirtualEvent(self.device, timing=False)
        event.renew(other)
        self.wait(event)

    def synchronize(self) -> None:
        """Move the host's clock to the end of the work enqueued so far. Raises DeviceFault if some of it failed."""
        event = VirtualEvent(self.device, timing=False)
        event.renew(self)
        event.synchronize()


class VirtualEvent(Event):
    """A point in a virtual stream; `point` is None until it is recorded."""

    def __init__(self, device: CheckingDevice, timing: bool) -> None:
        self.device = device
        self.time = 0.0
        self.point: Point | None = None
        self._sequence = 0
        self._timing = timing

    def renew(self, stream: VirtualStream) -> None:
        """Become the point after the last work of `stream`. For the streams only."""
        # An idle stream's event is reached when it is recorded.
        self.time = max(stream.ready, self.device.now())
        self.point = self.device.order.point(stream.actor)
        self._sequence = self.device.next_sequence()

    def query(self) -> bool:
        """Whether the host's clock has passed the point. Costs the host time, so polling ends."""
        self.device.host_call()
        if self.point is None:
            return True
        if self.device.now() < self.time:
            return False
        self._learn(self.point)
        return True

    def synchronize(self) -> None:
        """Move the host's clock to the point."""
        self.device.host_call()
        if self.point is not None:
            self.device.advance_to(self.time)
            self._learn(self.point)

    def reached_at(self) -> float:
        """The point's virtual time."""
        if self.point is None or not self._timing or self.device.now() < self.time:
            raise StrettoError("the event has no time: it must be made with timing=True, recorded and done")
        return self.time

    def _learn(self, point: Point) -> None:
        self.device.raise_fault_before(self.time, self._sequence)
        self.device.order.host_knows(point)
