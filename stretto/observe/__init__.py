"""Proof of overlap: the step timeline, the guard against hidden syncs, recording, and the analysis of traces."""

from stretto.observe.record import profile
from stretto.observe.sync_guard import HiddenSync, SyncFinding, SyncGuard

__all__ = ["HiddenSync", "SyncFinding", "SyncGuard", "profile"]
