"""Under STRETTO_CHECK: proves step by step that all ranks do the same, and shows where they first did not.

Each rank digests what it planned, sampled and ended in every processed step. Followers send theirs to the leader, which
compares whenever one comes and never waits for one. Owns digests and views, not their way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.errors import EngineBroken
from stretto.scheduler.batch import StepOutput, StepPlan, StepResults
from stretto.scheduler.scheduler import Scheduler

MOST_BEHIND = 4096
"""Steps that a follower's digests may be behind the leader's."""
_LONGEST = 2000
"""Characters of one line of a view."""
_RECENT = 64


class RanksDiffer(EngineBroken):
    """Two ranks have not done the same in a step: both sides' views are in the message."""


class StepDigest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One processed step of one rank."""

    index: int
    digest: bytes
    """64 bits over plan, sampled tokens, ends, and what is free afterwards."""
    view: list[tuple[str, str]]
    """The same for people: what, and its value (cut off where it is very long)."""

    @classmethod
    def of(cls, plan: StepPlan, results: StepResults, output: StepOutput, scheduler: Scheduler) -> StepDigest:
        """Of a step that `scheduler` has just processed."""
        ends = [f"{request.uid} {request.finish_reason} {request.num_output}" for request in output.finished]
        after = [
            scheduler.pages.pool.num_free,
            scheduler.cache.num_evictable,
            scheduler.num_running,
            scheduler.num_waiting,
        ]
        state = blake2b(digest_size=8)
        for array in (
            plan.slots_B,
            plan.start_B,
            plan.num_new_B,
            plan.prefill_tokens,
            plan.page_slot_U,
            plan.page_index_U,
            plan.page_id_U,
            plan.sampled_S,
            plan.position_S,
            plan.is_last_S,
            results.tokens_S,
            output.uids,
            np.frombuffer("\n".join(ends).encode(), np.uint8),
            np.array([plan.num_decode, *after], np.int64),
        ):
            _add(state, array)
        return cls(plan.index, state.digest(), list(_view(plan, results, output, ends, after)))


class DigestReport:
    """A follower's witness of its steps: sends the digest of each. `recent`: the last ones."""

    def __init__(self, scheduler: Scheduler, send: Callable[[bytes], None]) -> None:
        """`send` takes one message to the leader's `DigestCheck.take`; it should not block."""
        self._scheduler = scheduler
        self._send = send
        self.recent: deque[StepDigest] = deque(maxlen=_RECENT)

    def __call__(self, plan: StepPlan, results: StepResults, output: StepOutput) -> None:
        """A step was processed (`scheduler.loop.Witness`)."""
        self.recent.append(StepDigest.of(plan, results, output, self._scheduler))
        self._send(_encoder.encode(self.recent[-1]))


class DigestCheck:
    """The leader's witness of its steps, which followers' digests are compared with. `take` may be another thread's."""

    def __init__(self, scheduler: Scheduler, followers: Iterable[int]) -> None:
        """`followers`: the ranks that send digests."""
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._due = dict.fromkeys(followers, 0)
        """The step whose digest comes next, by rank."""
        self._own: deque[StepDigest] = deque()
        """Of the steps that some follower has not answered yet, in order."""
        self._early: dict[int, deque[StepDigest]] = {rank: deque() for rank in self._due}
        """Digests of steps that are not processed here yet."""
        self._num_own = 0
        self.recent: deque[StepDigest] = deque(maxlen=_RECENT)
        self.difference: str | None = None
        """The first difference; set once."""

    @property
    def num_compared(self) -> int:
        """Steps in which every rank did the same."""
        return min(self._due.values(), default=self._num_own)

    def __call__(self, plan: StepPlan, results: StepResults, output: StepOutput) -> None:
        """A step was processed (`scheduler.loop.Witness`). Raises RanksDiffer once there is a difference."""
        own = StepDigest.of(plan, results, output, self._scheduler)
        with self._lock:
            self.recent.append(own)
            self._own.append(own)
            self._num_own += 1
            for rank, early in self._early.items():
                if early and early[0].index == own.index:
                    self._compare(rank, early.popleft())
            behind = min(self._due, key=self._due.__getitem__, default=0)
            if len(self._own) > MOST_BEHIND:
                self._differ(f"rank {behind} has sent no digest since step {self._due[behind] - 1}")
            self._forget()
            if self.difference is not None:
                raise RanksDiffer(self.difference)

    def take(self, rank: int, data: bytes) -> str | None:
        """A digest has come from `rank`; never waits for one of this rank. Returns the first difference, if any."""
        try:
            theirs = _decoder.decode(data)
        except msgspec.DecodeError as error:
            theirs = None
            damage = f"rank {rank} has sent a digest that is none: {error}"
        with self._lock:
            if theirs is None:
                self._differ(damage)
            elif rank not in self._due:
                self._differ(f"a digest has come from rank {rank}, which is no follower")
            elif theirs.index != self._due[rank] + len(self._early[rank]):
                due = self._due[rank] + len(self._early[rank])
                self._differ(f"rank {rank} has processed step {theirs.index} where step {due} was due")
            elif theirs.index >= self._num_own:
                self._early[rank].append(theirs)
            else:
                self._compare(rank, theirs)
                self._forget()
            return self.difference

    # -- with the lock held -----------------------------------------------------------------------------------------

    def _compare(self, rank: int, theirs: StepDigest) -> None:
        own = self._own[theirs.index - self._own[0].index]
        self._due[rank] += 1
        if own.digest != theirs.digest:
            self._differ(_side_by_side(rank, own, theirs))

    def _differ(self, what: str) -> None:
        if self.difference is None:
            self.difference = what

    def _forget(self) -> None:
        """Drop what every follower has answered."""
        done = min(self._due.values(), default=self._num_own)
        while self._own and self._own[0].index < done:
            self._own.popleft()


def _add(state: blake2b, array: npt.NDArray[np.generic]) -> None:
    state.update(len(array).to_bytes(8, "little"))
    state.update(np.ascontiguousarray(array).astype(np.int64, copy=False).tobytes())


def _view(
    plan: StepPlan, results: StepResults, output: StepOutput, ends: list[str], after: list[int]
) -> Iterable[tuple[str, str]]:
    rows = zip(plan.slots_B.tolist(), plan.start_B.tolist(), plan.num_new_B.tolist(), strict=True)
    pages = zip(plan.page_slot_U.tolist(), plan.page_index_U.tolist(), plan.page_id_U.tolist(), strict=True)
    sampled = zip(plan.sampled_S.tolist(), plan.position_S.tolist(), plan.is_last_S.tolist(), strict=True)
    told = zip(output.uids.tolist(), output.tokens.tolist(), strict=True)
    yield "rows (slot: length + new tokens)", _line(f"{slot}: {start}+{new}" for slot, start, new in rows)
    yield "decode rows", str(plan.num_decode)
    yield "prompt tokens", _line(map(str, plan.prefill_tokens.tolist()))
    yield "new pages (slot[index] = page)", _line(f"{slot}[{index}]={page}" for slot, index, page in pages)
    yield "sampled (row at position)", _line(f"{row} at {at}{' last' if last else ''}" for row, at, last in sampled)
    yield "sampled tokens", _line(map(str, results.tokens_S.tolist()))
    yield "told (request: token)", _line(f"{uid}: {token}" for uid, token in told)
    yield "ended (request, reason, tokens)", _line(ends)
    yield "afterwards", "{} pages free, {} evictable, {} requests running, {} waiting".format(*after)


def _line(items: Iterable[str]) -> str:
    line = ", ".join(items) or "-"
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."


def _side_by_side(rank: int, own: StepDigest, theirs: StepDigest) -> str:
    """Both views, what is equal once."""
    lines = [f"ranks 0 and {rank} differ in step {own.index}, for the first time:"]
    their_view = dict(theirs.view)
    differs = False
    for name, value in own.view:
        if their_view.get(name) == value:
            lines.append(f"  both    {name}: {value}")
        else:
            differs = True
            lines.append(f"> rank 0  {name}: {value}")
            lines.append(f"> rank {rank:<2} {name}: {their_view.get(name, 'nothing')}")
    if not differs:
        lines.append("> in what is cut off above")
    return "\n".join(lines)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepDigest)
