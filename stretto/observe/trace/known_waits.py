"""What a recording knows for sure about waits: which activity a wait is for, and which work waited for other streams'.

Only some recordings do: Kineto's with `enable_cuda_sync_events`, and exports of Nsight Systems. A call that waits for
an event waits for the last activity that was put on the event's stream before the event was recorded.
"""

from __future__ import annotations

import numpy as np

from stretto.observe.trace.model import Ints, Sync, SyncKind, Trace


class KnownWaits:
    """The waits of a trace that concern the activities `rows`. Correlations of one stream grow with time."""

    def __init__(self, trace: Trace, rows: Ints) -> None:
        self._lanes: dict[int, tuple[Ints, Ints]] = {}
        lane, correlation = trace.device.lane[rows], trace.device.correlation[rows]
        for one in np.unique(lane).tolist() if trace.syncs else []:
            mine = rows[(lane == one) & (correlation >= 0)]
            order = mine[np.lexsort((trace.device.start[mine], trace.device.correlation[mine]))]
            self._lanes[one] = (trace.device.correlation[order], order)
        self._by_call = {sync.correlation: sync for sync in trace.syncs if sync.kind is not SyncKind.STREAM_WAIT}
        self._stream_waits = [sync for sync in trace.syncs if sync.kind is SyncKind.STREAM_WAIT]

    @property
    def tell_of_streams(self) -> bool:
        """The recording has the waits of streams, so that none needs to be guessed."""
        return bool(self._stream_waits)

    def awaited(self, correlation: int) -> int | None:
        """The activity that the call of this correlation waits for, as a row.

        -1: for nothing that was recorded, so that it had happened; None: that is not known.
        """
        sync = self._by_call.get(correlation)
        return None if sync is None else self._producer(sync)

    def between_streams(self) -> list[tuple[int, int]]:
        """Pairs of activities: the first of a stream after it was made to wait, and what it waits for."""
        found = []
        for sync in self._stream_waits:
            producer = self._producer(sync)
            correlations, order = self._lanes.get(sync.waiter, (None, None))
            if producer is None or producer < 0 or correlations is None or order is None:
                continue
            at = int(np.searchsorted(correlations, sync.correlation, side="right"))
            if at < len(order):
                found.append((int(order[at]), producer))
        return found

    def _producer(self, sync: Sync) -> int | None:
        """The last activity on the stream that is waited for, put there before the event was recorded."""
        until = sync.correlation if sync.kind is SyncKind.STREAM else sync.record
        if until < 0:
            return None
        if sync.lane < 0:
            return -1
        if sync.lane not in self._lanes:
            return None  # a stream of another device
        correlations, order = self._lanes[sync.lane]
        at = int(np.searchsorted(correlations, until, side="left")) - 1
        return int(order[at]) if at >= 0 else -1
