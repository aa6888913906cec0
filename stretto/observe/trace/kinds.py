"""The kinds of things that keep a device waiting, each with its words: what it is, and how to fix it.

Owns the vocabulary of causes. The remedies are those that work in serving and training loops alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """What a blocking call does to the overlap of host and device."""

    LOST = "lost"
    """The host reads from the device inside the step: it waits for all that is queued, and nothing overlaps."""
    SHORTENED = "shortened"
    """The host waits for a copy up, or for memory: only the next launch comes later."""
    OVERLAPPED = "overlapped"
    """The host waits, but the device has more work queued, or all is done already: as it should be."""
    PLANNED = "planned"
    """The wait for a finished step's results, at its place."""
    OUTSIDE = "outside"
    """Before the first step or after the last launch: it delays nothing."""


class Cause(StrEnum):
    """Why a device was idle, or not computing, for a while."""

    SYNC = "sync"
    UPLOAD = "upload"
    PLANNED_WAIT = "planned-wait"
    ALLOCATION = "allocation"
    HOST_LATE = "host-late"
    HOST_WAITING = "host-waiting"
    LAUNCH_BOUND = "launch-bound"
    COPY = "copy"
    DEVICE = "device"
    UNKNOWN = "unknown"


CAUSE_WORDS = {
    Cause.SYNC: "host blocked in a sync",
    Cause.UPLOAD: "host blocked in an upload",
    Cause.PLANNED_WAIT: "nothing queued behind the planned wait",
    Cause.ALLOCATION: "host blocked in memory management",
    Cause.HOST_LATE: "host late",
    Cause.HOST_WAITING: "host waiting for others",
    Cause.LAUNCH_BOUND: "launch-bound",
    Cause.COPY: "copy without computation",
    Cause.DEVICE: "between kernels",
    Cause.UNKNOWN: "launch not recorded",
}


@dataclass(frozen=True, slots=True)
class Words:
    """How a kind of blocking call is spoken of."""

    title: str
    remedy: str


BLOCKING_WORDS = {
    "truth-value": Words(
        "truth value of a device tensor (`if tensor:`, bool())",
        "Decide on the host before the launch: keep a Python flag made from the requests' parameters, or compute both "
        "branches on the device and select with torch.where.",
    ),
    "item": Words(
        "value of a device tensor (.item(), int(), float())",
        "Leave the value on the device, or copy it to pinned memory with non_blocking=True, record an event, and read "
        "it one step later after event.synchronize().",
    ),
    "tolist": Words(
        "list of a device tensor (.tolist())",
        "Copy to pinned memory with non_blocking=True, record an event after the copy, and call .tolist() on the host "
        "copy one step later, after event.synchronize().",
    ),
    "to-host": Words(
        "blocking copy to the host (.cpu(), .numpy(), .to('cpu'))",
        "Copy into a pinned buffer with non_blocking=True, record a copy-done event, and wait for that event only when "
        "the results are processed, after the next step is launched.",
    ),
    "nonzero": Words(
        "output whose size depends on data (nonzero, boolean mask, unique)",
        "Keep sizes fixed: torch.where or masked arithmetic instead of boolean indexing, index lists made on the host, "
        "torch.nonzero_static where a bound is known.",
    ),
    "compare": Words(
        "comparison that returns a Python bool (equal, allclose)",
        "Move it out of the loop, or keep the result on the device: (a == b).all() without bool().",
    ),
    "repeat-interleave": Words(
        "repeat_interleave with counts on the device",
        "Give output_size=, or compute the counts on the host.",
    ),
    "pageable-upload": Words(
        "upload from pageable memory (torch.tensor(list, device=), .to(device) without pinning)",
        "Stage in pinned memory that is allocated once, copy with non_blocking=True on a stream of its own, and let "
        "the compute stream wait for it (wait_stream). non_blocking=True has no effect on pageable memory.",
    ),
    "upload": Words(
        "blocking upload (copy to the device without non_blocking=True)",
        "Pass non_blocking=True: the source is pinned already.",
    ),
    "stream-sync": Words(
        "stream.synchronize()",
        "Wait for an event recorded after the results that you need, not for the whole stream: that also waits for the "
        "step launched since.",
    ),
    "device-sync": Words(
        "device-wide synchronize (torch.cuda.synchronize())",
        "Remove it from the loop; order streams with wait_stream or events, time with events.",
    ),
    "event-sync": Words(
        "event.synchronize()",
        "Launch the next step before waiting for the event of this one, so that the device has work meanwhile.",
    ),
    "allocation": Words(
        "memory management of the device (malloc, free, pinning, module loading)",
        "Allocate before the loop and reuse; keep the caching allocator from growing (expandable_segments, warm-up of "
        "the largest shapes); never free or pin memory per step.",
    ),
}

CAUSE_REMEDIES = {
    Cause.PLANNED_WAIT: "Launch the next step before processing this one (overlap depth 1 or more), so that work is "
    "queued while the host waits.",
    Cause.HOST_LATE: "Do this work while the device computes: launch the next step first and process results after it, "
    "or make it cheaper (vectorise, cache what did not change, move it to another process).",
    Cause.HOST_WAITING: "The loop had nothing to launch: it waited for another thread, a message or a timer. If "
    "requests were waiting, look at who holds the lock or the GIL.",
    Cause.LAUNCH_BOUND: "Each kernel ends before the host has launched the next: capture the step in a CUDA graph, use "
    "torch.compile, fuse small kernels, or raise the batch size.",
    Cause.COPY: "Copy on a stream of its own, one step ahead, so that it runs beside the kernels.",
    Cause.DEVICE: "The work was queued; the device paused between kernels that depend on each other. Fuse them, or run "
    "independent work on a second stream.",
    Cause.UNKNOWN: "Record with CUDA activities and runtime calls so that launches can be found.",
}
