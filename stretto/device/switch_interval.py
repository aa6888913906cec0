"""The interpreter's thread switch interval, shortened while an engine loop runs beside a worker thread.

A thread that wants the GIL waits until the holder blocks or the switch interval has passed, and each of the hundreds of
torch calls of a step takes the GIL anew. A step of 700 small products took 18 ms beside a blocked host; beside one that
computed in Python without a pause 4.1 s at Python's default of 5 ms, 0.87 s at 1 ms, 0.17 s at 0.1 ms and 0.12 s at
0.02 ms (medians, two cores). So the interval helps, and short host sections that end in a blocking wait help more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOOP_INTERVAL_S = 1e-4


class SwitchInterval:
    """Shortens the interval while at least one scope is open and then restores what was there before the first.

    Scopes may nest, and those of different threads may overlap in any order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._before_s = 0.0

    @contextmanager
    def short(self, interval_s: float = LOOP_INTERVAL_S) -> Iterator[None]:
        """Keep the switch interval at most `interval_s` seconds inside the scope."""
        with self._lock:
            if self._scopes == 0:
                self._before_s = sys.getswitchinterval()
            self._scopes += 1
            if interval_s < sys.getswitchinterval():
                _set(interval_s)
        try:
            yield
        finally:
            with self._lock:
                self._scopes -= 1
                if self._scopes == 0:
                    _set(self._before_s)


def _set(seconds: float) -> None:
    # Python keeps whole microseconds and cuts the rest off: 1e-4 would become 99 us, and each restoring one less.
    sys.setswitchinterval(seconds + 5e-7)


# The interval belongs to the interpreter, not to a device: two loops in two threads share it, and the first to end must
# not take it from the other. So its count is per process too, the one piece of module state of this package.
switch_interval = SwitchInterval()
