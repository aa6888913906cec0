"""A stream whose `synchronize` a guard sees, for devices whose streams torch does not know."""

from __future__ import annotations

from collections.abc import Callable

from stretto.device.base import Access, Event, Stream
from stretto.observe.sync_guard import SyncGuard


class WatchedStream(Stream):
    """Hands everything on to `raw`; waiting for the whole stream in watched code is a hidden sync."""

    def __init__(self, raw: Stream, guard: SyncGuard) -> None:
        self.raw = raw
        self.name = raw.name
        self._guard = guard

    def run(self, work: Callable[..., None], *args: object, access: Callable[[], Access] | None = None) -> None:
        """See `Stream`. hot path"""
        self.raw.run(work, *args, access=access)

    def record(self, event: Event) -> None:
        """See `Stream`. hot path"""
        self.raw.record(event)

    def wait(self, event: Event) -> None:
        """See `Stream`. hot path"""
        self.raw.wait(event)

    def wait_stream(self, other: Stream) -> None:
        """Let following work follow what `other` has so far. hot path"""
        self.raw.wait_stream(other.raw if isinstance(other, WatchedStream) else other)

    def synchronize(self) -> None:
        """Block until everything enqueued so far is done; the guard decides whether that may be."""
        self._guard.call("stream-sync", "Stream.synchronize", self.raw.synchronize)
