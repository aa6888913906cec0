"""Proof of overlap: the step timeline, the guard against hidden syncs, recording, and the analysis of traces.

Names are imported when first used: who reads a stored trace (`stretto.observe.trace`) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.observe.record import profile
    from stretto.observe.sync_guard import HiddenSync, SyncFinding, SyncGuard

_HOMES = {
    "HiddenSync": "stretto.observe.sync_guard",
    "SyncFinding": "stretto.observe.sync_guard",
    "SyncGuard": "stretto.observe.sync_guard",
    "profile": "stretto.observe.record",
}

__all__ = ["HiddenSync", "SyncFinding", "SyncGuard", "profile"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.observe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
