"""The guard against hidden syncs in its strictest form: raises where code looks at a tensor's value on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stretto.observe import HiddenSync as HostRead
from stretto.observe import SyncGuard

__all__ = ["HostRead", "no_host_reads"]


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise HostRead on any look at a tensor's value, or copy from pageable memory, in this thread."""
    with SyncGuard("raise"):
        yield
