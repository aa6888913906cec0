"""How long ranks wait for each other before they call one lost. The end of all comes GRACE_SECONDS later."""

from __future__ import annotations

import os

BEAT_SECONDS = 0.5
TICK_SECONDS = 0.2
"""How often the threads that watch look around."""
HANG_SECONDS = float(os.environ.get("STRETTO_HANG_SECONDS") or 5.0)
"""Silence after which a process counts as hung, and the time in one place after which one counts as stuck.

Raise it to stop a rank in a debugger.
"""
LOADING_FACTOR = 6.0
"""How much more silence is forgiven until the rank runs: loading libraries from a cold disk may stop all threads."""
GRACE_SECONDS = 1.0
"""How long a rank may take to end by itself once it knows; and how long a suspicion waits for a better one."""


def hang_limit(phase: str, seconds: float) -> float:
    """Silence after which a rank counts as hung that is, or looks at its leader, in this phase."""
    return seconds if phase in ("running", "shutdown") else seconds * LOADING_FACTOR
