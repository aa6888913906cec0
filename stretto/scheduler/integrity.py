"""Walks the scheduler's books and compares every count with a recount (tests and STRETTO_CHECK=1)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.request import Request, RequestState

if TYPE_CHECKING:
    from stretto.scheduler.scheduler import Scheduler


class IntegrityError(StrettoError):
    """The scheduler's books do not add up: a bug in Stretto. The message says what, and who held what."""


def check_integrity(scheduler: Scheduler) -> None:
    """Raise IntegrityError unless free + owned + cached pages and slots are all there are, each with its holders."""
    problems = [*_slot_problems(scheduler), *_page_problems(scheduler), *_state_problems(scheduler)]
    try:
        scheduler.cache.check()
    except RuntimeError as error:
        problems.append(str(error))
    if problems:
        raise IntegrityError("\n".join([*problems, "", report(scheduler)]))


def _slot_problems(scheduler: Scheduler) -> list[str]:
    try:
        scheduler.slots.check()
    except RuntimeError as error:
        return [str(error)]
    return []


def _page_problems(scheduler: Scheduler) -> list[str]:
    pool = scheduler.pages.pool
    problems = []
    try:
        pool.check()
    except RuntimeError as error:
        problems.append(str(error))
    holders = Counter(scheduler.cache.held())
    for request in _holders(scheduler):
        holders.update(request.pages)
        row = scheduler.slots.page_table[request.slot, : len(request.pages)].tolist()
        if row != request.pages or scheduler.slots.num_pages[request.slot] != len(request.pages):
            problems.append(f"request {request.uid} holds pages {request.pages}, its page table says {row}")
    # With as many pages held as there are holders' pages, none is held that has no holder: no need to ask the others.
    all_held = pool.num_pages - 1 - pool.num_free == len(holders)
    return problems + [
        f"page {page}: the pool counts {pool.references(page)} holders, there are {holders[page]}"
        for page in (sorted(holders) if all_held else range(1, pool.num_pages))
        if pool.references(page) != holders[page]
    ]


def _state_problems(scheduler: Scheduler) -> list[str]:
    problems = []
    lifecycle, slots = scheduler.lifecycle, scheduler.slots
    decoding = {slot: slots.requests[slot] for slot in lifecycle.decode.slots.tolist()}
    for request in _holders(scheduler):
        slot, state = request.slot, request.state
        if (slot in decoding) != (state is RequestState.DECODE):
            problems.append(f"request {request.uid} is {state}, but decoding is {slot in decoding}")
        if (request in lifecycle.prefill.running) != (state is RequestState.PREFILL):
            problems.append(f"request {request.uid} is {state}, but its prompt is not among those being computed")
        leaves = state in (RequestState.RETIRING, RequestState.PREEMPTING, RequestState.FINISHED)
        if leaves != (request in lifecycle.leaving):
            problems.append(f"request {request.uid} is {state}, but about to be released: {not leaves}")
        if leaves and slots.in_flight[slot] == 0:
            problems.append(f"request {request.uid} is {state} and in no launched step, but still holds slot {slot}")
        if slots.length[slot] > len(request.pages) * scheduler.config.page_size:
            problems.append(f"request {request.uid} has {slots.length[slot]} tokens in {len(request.pages)} pages")
    return problems


def report(scheduler: Scheduler) -> str:
    """Who holds what, for people."""
    slots, pool = scheduler.slots, scheduler.pages.pool
    lines = [
        f"{pool.num_free} of {pool.num_pages - 1} pages free, {scheduler.cache.num_evictable} evictable; "
        f"{slots.num_free} slots free; {scheduler.num_waiting} requests waiting",
        "  uid  slot  state        length  target  in flight  pages",
    ]
    for request in _holders(scheduler):
        slot = request.slot
        lines.append(
            f"{request.uid:5d} {slot:5d}  {request.state:<11} {slots.length[slot]:7d} {slots.target[slot]:7d} "
            f"{slots.in_flight[slot]:10d}  {request.pages}"
        )
    return "\n".join(lines)


def _holders(scheduler: Scheduler) -> list[Request]:
    return [request for request in scheduler.slots.requests if request is not None]
