"""What a device is: streams, events and pinned buffers behind one small interface.

Owns no implementation. Everything above this package is device-neutral: it hands *work* (a function and its
arguments) to a stream and talks to it only through preallocated buffers, never through return values (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import StrettoError

T = TypeVar("T")
Region = tuple[str, int]
"""A named piece of memory that the host and streams share, e.g. ("staging.host", 1), ("page", 17), ("row", 3)."""


@dataclass(frozen=True, slots=True)
class Access:
    """The shared regions that one piece of work reads and writes; only a checking device looks at it.

    `reads` names what was written *before* this work. What the work first writes and then reads itself is a write only:
    a prefill chunk reads the pages of its context so far and writes the pages of its new tokens.
    """

    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


class DeviceFault(StrettoError):
    """Work on a device failed: says which; the work's own exception is the cause. The device takes no more work."""


class DeviceClosed(StrettoError):
    """Work was handed to a device after its `close`."""


class Event(Protocol):
    """A point in a stream. Recorded again, it means the newer point."""

    def query(self) -> bool:
        """True once everything before the recorded point is done (True as well if never recorded). Never blocks.

        Raises DeviceFault if the point came after work that failed.
        """

    def synchronize(self) -> None:
        """Block the host until the recorded point is reached, the GIL released.

        Raises DeviceFault if the point came after work that failed; a point before it was reached and stays good, so
        the results of the steps before a fault can still be taken.
        """


class Stream(Protocol):
    """An in-order queue of work. The host never waits for it except through an event or `synchronize`."""

    name: str

    def run(self, work: Callable[..., None], *args: object, access: Callable[[], Access] | None = None) -> None:
        """Enqueue `work(*args)`; returns before it is done. hot path

        `access` declares the shared regions that the work touches. It is called only by a checking device. Raises
        DeviceFault if work is known to have failed (earlier work, or this one where it is run at once), DeviceClosed
        after `close`.
        """

    def record(self, event: Event) -> None:
        """Enqueue the recording of `event`."""

    def wait(self, event: Event) -> None:
        """Make work enqueued after this wait for `event` as recorded now. Never blocks the host."""

    def wait_stream(self, other: Stream) -> None:
        """Make work enqueued after this wait for everything enqueued in `other` so far. Never blocks the host."""

    def synchronize(self) -> None:
        """Block the host until everything enqueued so far is done (start-up and tests, never in the loop)."""


class HostBuffer(Protocol):
    """Page-locked host memory, seen as a numpy array by the host and as a torch tensor by work on streams."""

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """The memory as the host sees it."""

    @property
    def tensor(self) -> torch.Tensor:
        """The same memory as work on streams sees it."""


class Device(Protocol):
    """A place to run work. `close` ends its threads; afterwards nothing may be enqueued."""

    torch_device: torch.device
    checking: bool
    """True when accesses are checked; callers may then skip fast paths that would hide accesses."""

    def stream(self, name: str, priority: int = 0) -> Stream:
        """A new stream; a lower `priority` number runs first where the hardware can."""

    def event(self, timing: bool = False) -> Event:
        """A new event. With `timing`, `seconds_between` may use it."""

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Device time from `begin` to `end` in seconds; both recorded with timing and done. Never blocks."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        """Page-locked host memory with undefined contents (a checking device fills it with poison).

        Raises NotSupported for a dtype that numpy does not have (bfloat16, float8).
        """

    def now(self) -> float:
        """Host clock in seconds (monotonic; a virtual device answers with virtual time)."""

    def host_access(self, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        """Declare that the host touches shared regions now; a no-op except on a checking device. hot path"""

    def taken(self, regions: Iterable[Region]) -> None:
        """Declare that these regions have a (new) owner, who must write before anybody reads. hot path

        Needed where a region was `released` before: until then every access to it is an error. A no-op except on a
        checking device, which also verifies that nobody owns them already.
        """

    def released(self, regions: Iterable[Region]) -> None:
        """Declare that the owner gives these regions up: no launched work may use them any more (I2).

        A checking device verifies exactly that and poisons them; elsewhere a no-op. hot path
        """

    def running(self) -> AbstractContextManager[None]:
        """The scope in which the owner of the engine loop runs it. Tunes the interpreter for it where that matters, and
        leaves the calling thread's current GPU and stream as they were.
        """

    def call(self, make: Callable[[], T]) -> T:
        """What `make` returns, made where the device's torch work is done. Blocks; for start-up only.

        On a CPU that is the worker thread: torch work on a second thread would give it an OpenMP pool of its own, and
        with more OpenMP threads than cores every parallel region waits for a sleeping thread.
        """

    def close(self) -> None:
        """End the device's threads after the work enqueued so far. Idempotent."""
