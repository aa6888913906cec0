"""How much memory some work takes on a CPU beside what there was before."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], None]) -> int:
    """The most that torch's allocations of `work`, on this thread, held at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    changes = [event for event in results.events() if event.name() == "[memory]"]
    assert changes, "torch's profiler saw no allocation"
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most
