"""Model check of the request life cycle: every interleaving of launch, process, end-of-sequence and abort is walked.

Explicit-state search over the real scheduler (no engine, no device), in the manner of Holzmann's SPIN: from each state
all actions are tried, states met before are not walked again. Admission and release happen inside the actions.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from stretto.cache.base import NoCache, PrefixCache
from stretto.cache.page_pool import PagePool
from stretto.cache.radix import RadixCache
from stretto.cache.radix_node import Node
from stretto.config import SchedulerConfig
from stretto.device.cpu import CpuDevice
from stretto.device.hazards import HazardError
from stretto.request import FinishReason, Request, RequestState, SamplingParams
from stretto.scheduler.batch import StepPlan, StepResults
from stretto.scheduler.integrity import IntegrityError
from stretto.scheduler.lifecycle import Lifecycle
from stretto.scheduler.scheduler import Scheduler

EOS, OTHER = 0, 1
Action = tuple[str, int | tuple[int, ...]]
Key = tuple[object, ...]


class TwoSlots(SchedulerConfig):
    """Two rows in all, so that requests wait for slots too."""

    @property
    def num_slots(self) -> int:
        return 3


@dataclass
class State:
    """The scheduler, its launched steps, and what each of these holds: slot, request and pages at launch."""

    scheduler: Scheduler
    requests: list[Request]
    launched: deque[tuple[StepPlan, list[tuple[int, int, list[int]]]]] = field(default_factory=deque)

    def actions(self) -> Iterator[Action]:
        """All that could happen next."""
        if len(self.launched) <= self.scheduler.config.overlap_depth and self.scheduler.runnable:
            yield "launch", 0
        if self.launched:
            for tokens in product((EOS, OTHER), repeat=len(self.launched[0][0].sampled_S)):
                yield "process", tokens
        for request in self.requests:
            if request.state is not RequestState.FINISHED:
                yield "abort", request.uid

    def act(self, action: Action) -> None:
        """Let it happen."""
        name, argument = action
        if name == "launch":
            plan = self.scheduler.schedule()
            if plan is not None:
                holds = [self.scheduler.slots.holder(slot) for slot in plan.slots_B.tolist()]
                self.launched.append((plan, [(r.slot, r.uid, list(r.pages)) for r in holds]))
        elif name == "process":
            plan, _ = self.launched.popleft()
            self.scheduler.process(plan, StepResults(np.array(argument, np.int64)))
        else:
            assert isinstance(argument, int)
            self.scheduler.end(self.requests[argument], FinishReason.ABORT)
            self.scheduler.ended()

    def check(self) -> None:
        """I2 by books of our own, beside the scheduler's own checks."""
        self.scheduler.check()
        slots = self.scheduler.slots
        for _, held in self.launched:
            for slot, uid, pages in held:
                request = slots.requests[slot]
                assert request is not None, f"slot {slot} was released while a launched step holds it"
                assert request.uid == uid, f"slot {slot} went to another request while a launched step holds it"
                assert set(pages) <= set(request.pages), f"pages of request {uid} were released in flight"
        in_flight = [slot for _, held in self.launched for slot, _, _ in held]
        for slot in range(1, 3):
            assert slots.in_flight[slot] == in_flight.count(slot)

    @property
    def is_final(self) -> bool:
        return not self.launched and all(request.state is RequestState.FINISHED for request in self.requests)

    def key(self) -> Key:
        """What the future depends on."""
        slots = self.scheduler.slots
        return (
            tuple(
                (
                    r.state,
                    r.finish_reason,
                    r.slot,
                    tuple(r.pages),
                    len(r.token_ids),
                    *((int(slots.length[r.slot]), int(slots.num_output[r.slot])) if r.slot else (0, 0)),
                )
                for r in self.requests
            ),
            tuple(
                (tuple(plan.slots_B.tolist()), tuple(plan.num_new_B.tolist()), tuple(plan.position_S.tolist()))
                for plan, _ in self.launched
            ),
            self._cache_key(),
        )

    def _cache_key(self) -> Key:
        """The tree, who has what of it locked, and the order in which it will be evicted."""
        cache = self.scheduler.cache
        if not isinstance(cache, RadixCache):
            return ()
        nodes = [node for node in cache._nodes() if node.parent is not None]
        return (
            tuple(sorted((self._path(node), tuple(node.pages.tolist()), node.locks) for node in nodes)),
            tuple(self._path(node) for node in cache._order),
            tuple(-1 if r.prefix is None else r.prefix.num_tokens for r in self.requests),
        )

    @staticmethod
    def _path(node: Node) -> tuple[int, ...]:
        """All tokens from the root to the end of `node`."""
        above = () if node.parent is None else State._path(node.parent)
        return (*above, *node.tokens.tolist())


def start(
    depth: int, *, caching: bool, num_pages: int, policy: str, lifecycle_type: type[Lifecycle] = Lifecycle
) -> State:
    """Three requests that wait, two slots, pages of two tokens."""
    config = TwoSlots(
        max_num_seqs=2,
        max_num_batched_tokens=2,
        max_model_len=6,
        page_size=2,
        num_pages=1 + num_pages,
        overlap_depth=depth,
        batch_policy=policy,  # type: ignore[arg-type]
        eos_ids=(EOS,),
        vocab_size=4,
    )
    pool = PagePool(config.num_pages)
    cache: PrefixCache = RadixCache(pool, config.page_size) if caching else NoCache()
    scheduler = Scheduler(config, _DEVICE, pool, cache, checked=True, lifecycle_type=lifecycle_type)
    prompts = [[2, 3, 3], [2, 3], [2]]
    requests = []
    for uid, prompt in enumerate(prompts):
        final_len = min(len(prompt) + 3, config.max_model_len)
        request = Request(uid, np.array(prompt, np.int32), SamplingParams(), uid, final_len, (EOS,))
        requests.append(request)
        scheduler.add(request)
    return State(scheduler, requests)


_DEVICE = CpuDevice(1)
"""Does no work: the scheduler only tells it what changes hands."""


def branch(state: State) -> State:
    """An independent copy."""
    copied = copy.deepcopy(state, {id(_DEVICE): _DEVICE})
    pool = copied.scheduler.pages.pool
    pool._is_free = np.frombuffer(pool._free, np.bool_)  # one memory seen twice: a copy has to be joined again
    return copied


def explore(initial: State) -> tuple[int, dict[Key, set[Key]], set[Key]]:
    """Walk every reachable state. Returns (transitions, successors of each state, final states)."""
    seen = {initial.key()}
    successors: dict[Key, set[Key]] = {}
    final: set[Key] = set()
    frontier = deque([initial])
    transitions = 0
    while frontier:
        state = frontier.popleft()
        key = state.key()
        successors[key] = set()
        if state.is_final:
            final.add(key)
        for action in state.actions():
            following = branch(state)
            following.act(action)
            following.check()
            transitions += 1
            reached = following.key()
            successors[key].add(reached)
            if reached not in seen:
                seen.add(reached)
                frontier.append(following)
    return transitions, successors, final


CASES = [
    (0, 3, False, "mixed"),
    (1, 3, False, "mixed"),
    (1, 3, True, "mixed"),
    (1, 3, False, "prefill-first"),
    (2, 3, True, "mixed"),
    (2, 3, True, "prefill-first"),
    (3, 3, False, "prefill-first"),
    (3, 3, True, "mixed"),
]
"""(depth, pages, prefix cache, batch policy); about 7,000 transitions each."""


@pytest.mark.parametrize(("depth", "num_pages", "caching", "policy"), CASES)
def test_no_interleaving_breaks_the_life_cycle_or_gets_stuck(
    depth: int, num_pages: int, caching: bool, policy: str
) -> None:
    initial = start(depth, caching=caching, num_pages=num_pages, policy=policy)
    transitions, successors, final = explore(initial)
    assert transitions > 100
    assert final
    predecessors: dict[Key, set[Key]] = {}
    for key, following in successors.items():
        for reached in following:
            predecessors.setdefault(reached, set()).add(key)
    live = set(final)
    frontier = list(final)
    while frontier:
        for key in predecessors.get(frontier.pop(), ()):
            if key not in live:
                live.add(key)
                frontier.append(key)
    stuck = set(successors) - live
    assert not stuck, f"{len(stuck)} of {len(successors)} states never reach an end, such as {next(iter(stuck))}"


def test_the_walk_finds_a_release_in_flight() -> None:
    class ReleasesAtOnce(Lifecycle):
        def _leave_when_processed(self, request: Request) -> None:
            self.release(request)

    initial = start(1, caching=False, num_pages=3, policy="mixed", lifecycle_type=ReleasesAtOnce)
    with pytest.raises(HazardError, match="is released while 1 launched steps hold it"):
        explore(initial)


def test_the_walk_finds_a_state_that_is_stuck() -> None:
    class ForgetsToRelease(Lifecycle):
        def release_processed(self) -> None:
            pass

    initial = start(1, caching=False, num_pages=3, policy="mixed", lifecycle_type=ForgetsToRelease)
    with pytest.raises(IntegrityError, match="in no launched step, but still holds slot"):
        explore(initial)
