"""RuntimeStats: what an engine has done since its start, as figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Sums since the start. Times are seconds of device time unless a name says otherwise."""

    steps: int
    prompt_tokens: int
    """Prompt tokens computed, those computed again after a preemption included."""
    output_tokens: int
    busy_s: float
    bubble_s: float
    bubble_share: float
    """Share of device time in which the device had no work queued although a request was runnable."""
    launching_s: float
    launching_share: float
    """Share of device time in steps that the host was still launching: see `TimelineTotals.launching_s`."""
    runnable_s: float
    """Wall time while anything was runnable."""
    occupancy: float
    """Device busy / wall time while anything was runnable."""
    overlap_window_s: float
    """Mean time of a step in which the host could work for free: see `TimelineTotals.window_s`."""
    receive_s: float
    """Host time of the loop's phases since the start: this and the next four."""
    schedule_s: float
    launch_s: float
    blocked_s: float
    process_s: float
    hidden_syncs: int | None
    """Unplanned waits of the host for the device; None: nobody watches (`sync_guard`)."""
    preemptions: int
    overlap_depth: int
    num_pages: int
    """KV pages that requests can hold."""
    num_free_pages: int
    """Those that requests could take now, unused cached ones included."""
    num_cached_pages: int
    cached_tokens: int
    """Prompt tokens that were not computed because their KV was cached."""
    queried_tokens: int
    """Tokens of prompts that were looked for in the prefix cache."""
    num_running: int
    num_waiting: int
