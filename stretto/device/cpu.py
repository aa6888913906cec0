"""The CPU as an asynchronous device: one worker thread runs the work of all streams in the order of enqueueing.

Owns the worker thread and its queue. Knows nothing of what the work does, and of shared regions nothing at all.

**Why one queue is right.** Streams and events define a partial order: work follows what was enqueued before it in its
stream, and whatever its stream was made to wait for. Both kinds of predecessor were enqueued *earlier* (an event is
waited for as recorded by then), so the order of enqueueing is one linear order that contains the partial order. The
worker runs exactly that one; `wait` and `wait_stream` therefore have nothing left to do. What this device does not show
is concurrency *between* streams; the virtual device in `checking.py` does.

**Why one thread.** OpenMP keeps a pool of threads per calling thread, so two threads with torch work overload the
cores; the thread count and inference mode belong to a thread as well. So loading, forward and sampling all run here.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue

import torch

from stretto.device.base import Access, Device, DeviceClosed, Event, HostBuffer, Region, Stream, T
from stretto.device.faults import Fault
from stretto.device.host_memory import shared_buffer
from stretto.device.switch_interval import switch_interval
from stretto.errors import StrettoError

EXIT_WAIT_S = 5.0  # at interpreter exit: how long running work may take to end before it is left behind


class CpuDevice(Device):
    """The CPU behind the `Device` interface.

    Args:
        num_threads: threads that one torch operation may use; None keeps torch's own choice (`OMP_NUM_THREADS`, else
            the number of cores). Torch takes it over for the whole process.
    """

    torch_device = torch.device("cpu")
    checking = False

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1, or None for torch's own choice")
        self._worker = _Worker()
        self._thread = threading.Thread(
            target=_run_queue, args=(self._worker, num_threads), name="stretto-cpu-device", daemon=True
        )
        self._thread.start()
        # Neither callback may hold the device itself: a device that nobody closes must still be collectable, and then
        # its thread ends once the queue is empty. Nobody joins it then (the collector may run anywhere, in the worker
        # too) before the interpreter exits.
        self._end_at_exit = partial(_end_at_exit, self._worker, self._thread)
        atexit.register(self._end_at_exit)
        self._finalizer = weakref.finalize(self, self._worker.end)
        self._finalizer.atexit = False

    def stream(self, name: str, priority: int = 0) -> CpuStream:
        """A new stream. The one worker has no use for `priority`."""
        return CpuStream(name, self)

    def event(self, timing: bool = False) -> CpuEvent:
        """A new event."""
        return CpuEvent(self, timing)

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Seconds from `begin` to `end`. Raises StrettoError unless both were recorded with timing and are done."""
        return self._own(end).reached_at() - self._own(begin).reached_at()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        """Plain memory: the CPU needs no page lock. Contents undefined."""
        return shared_buffer(shape, dtype, page_locked=False)

    def now(self) -> float:
        """Monotonic seconds, on the clock of timed events."""
        return time.perf_counter()

    def host_access(self, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        """Nothing: this device does not check. hot path"""

    def taken(self, regions: Iterable[Region]) -> None:
        """Nothing: this device does not check. hot path"""

    def released(self, regions: Iterable[Region]) -> None:
        """Nothing: this device does not check. hot path"""

    def running(self) -> AbstractContextManager[None]:
        """Shorten the interpreter's switch interval inside the scope, so that Python on the host does not starve the
        worker of the GIL (`switch_interval.py`). Scopes may nest.
        """
        return switch_interval.short()

    def call(self, make: Callable[[], T]) -> T:
        """Runs `make` on the worker; re-raises its error as it is."""
        made: list[T] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                made.append(make())
            except BaseException as error:
                failed.append(error)

        stream = self.stream("start-up")
        stream.run(work)
        stream.synchronize()
        if failed:
            raise failed[0]
        return made[0]

    def close(self) -> None:
        """Run what is enqueued, then end the worker. Blocks until it has ended. Idempotent."""
        self._finalizer.detach()
        atexit.unregister(self._end_at_exit)
        self._worker.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _own(self, event: Event) -> CpuEvent:
        if not isinstance(event, CpuEvent) or event.device is not self:
            raise StrettoError(f"{event!r} is not an event of this device")
        return event


class CpuStream(Stream):
    """One of the names under which work reaches the device's only queue."""

    def __init__(self, name: str, device: CpuDevice) -> None:
        self.name = name
        self.device = device
        self._worker = device._worker
        self._put = device._worker.queue.put

    def run(self, work: Callable[..., None], *args: object, access: Callable[[], Access] | None = None) -> None:
        """Enqueue `work(*args)`. Never blocks. Raises DeviceFault or DeviceClosed. hot path"""
        if self._worker.refusing:
            raise self._worker.refusal()
        self._put((work, args, self.name))

    def record(self, event: Event) -> None:
        """Enqueue the recording of `event`. Never blocks. hot path"""
        if self._worker.refusing and self._worker.closed:
            raise self._worker.refusal()
        self._put(self.device._own(event).renew())

    def wait(self, event: Event) -> None:
        """Nothing but a check: the queue's order contains every wait (top of this file). hot path"""
        self.device._own(event)

    def wait_stream(self, other: Stream) -> None:
        """Nothing but a check: the queue's order contains every wait (top of this file). hot path"""
        if not isinstance(other, CpuStream) or other.device is not self.device:
            raise StrettoError(f"stream {self.name!r} cannot wait for {other!r}: it belongs to another device")

    def synchronize(self) -> None:
        """Block until the work enqueued so far is done. Raises DeviceFault if some of it failed."""
        event = CpuEvent(self.device, timing=False)
        self.record(event)
        event.synchronize()


class _Ticket:
    """One recording of an event, on its way through the queue. Its lock is held until the worker gets there."""

    __slots__ = ("fault", "lock", "reached_at", "timing")

    def __init__(self, timing: bool) -> None:
        # A raw lock: made, taken and released in 0.1 us together; a threading.Event costs 20 times that.
        self.lock = threading.Lock()
        self.lock.acquire()
        self.timing = timing
        self.reached_at = 0.0
        self.fault: Fault | None = None


class CpuEvent(Event):
    """A point in the queue. Keeps its device alive."""

    def __init__(self, device: CpuDevice, timing: bool) -> None:
        self.device = device
        self._timing = timing
        self._ticket: _Ticket | None = None

    def renew(self) -> _Ticket:
        """Start a new recording; the earlier one is forgotten. For the stream only."""
        self._ticket = _Ticket(self._timing)
        return self._ticket

    def query(self) -> bool:
        """True once the recorded point is reached, or if there is none. Never blocks. hot path"""
        ticket = self._ticket
        if ticket is None:
            return True
        if ticket.lock.locked():
            return False
        if ticket.fault is not None:
            raise ticket.fault.error()
        return True

    def synchronize(self) -> None:
        """Block until the recorded point is reached; the GIL is free meanwhile, and Ctrl-C interrupts. hot path"""
        ticket = self._ticket
        if ticket is None:
            return
        if ticket.lock.locked() and threading.current_thread() is self.device._thread:
            raise StrettoError("work on the CPU device waits for an event behind itself: it would wait for ever")
        with ticket.lock:
            pass
        if ticket.fault is not None:
            raise ticket.fault.error()

    def reached_at(self) -> float:
        """When the worker got to the recorded point, in seconds of `CpuDevice.now`."""
        ticket = self._ticket
        if ticket is None or not ticket.timing or ticket.lock.locked():
            raise StrettoError("the event has no time: it must be made with timing=True, recorded and done")
        return ticket.reached_at


_Item = tuple[Callable[..., None], tuple[object, ...], str] | _Ticket | None


class _Worker:
    """What the host and the worker thread share; holds no reference to the device."""

    __slots__ = ("closed", "fault", "queue", "refusing")

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Item] = SimpleQueue()
        self.fault: Fault | None = None
        self.closed = False
        self.refusing = False  # fault or closed, in one look for the hot path

    def refusal(self) -> StrettoError:
        """Why no work is taken."""
        if self.closed:
            return DeviceClosed("the CPU device is closed; it takes no more work")
        assert self.fault is not None
        return self.fault.error()

    def fail(self, stream: str, work: Callable[..., None], cause: BaseException) -> None:
        self.fault = Fault("CPU", stream, work, cause)
        self.refusing = True

    def end(self) -> None:
        """Let the thread end after what is enqueued. Idempotent."""
        self.closed = self.refusing = True
        self.queue.put(None)


def _run_queue(worker: _Worker, num_threads: int | None) -> None:
    """The worker thread. After a fault, work is dropped but events are still reached, so that nobody waits for ever."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    get = worker.queue.get
    now = time.perf_counter
    with torch.inference_mode():
        while True:
            item = get()
            if item is None:
                return
            if type(item) is _Ticket:
                item.fault = worker.fault
                if item.timing:
                    item.reached_at = now()
                item.lock.release()
            elif worker.fault is None:
                work, args, stream = item  # type: ignore[misc]
                try:
                    work(*args)
                except BaseException as cause:
                    worker.fail(stream, work, cause)
                del work, args
            del item  # idle, the worker must not keep the last work's arguments alive


def _end_at_exit(worker: _Worker, thread: threading.Thread) -> None:
    """A daemon thread inside torch while the interpreter is torn down may crash the process: let it end first."""
    worker.end()
    if threading.current_thread() is not thread:
        thread.join(EXIT_WAIT_S)
        if thread.is_alive():
            sys.stderr.write(f"stretto: work on the CPU device is still running after {EXIT_WAIT_S:.0f} s at exit\n")
