"""The tensor group: sums and gathers of tensors over the ranks of one model, as plain calls inside its forward.

Owns the interface and Gloo between CPUs; GPUs are nccl_group.py's. Who the ranks are, and how they find each other, is
the caller's. Never used for control messages. Legend: X any leading dimensions, L the last one of a rank's part.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto.distributed.forks import keep_for_good, let_go, tell_forked_children
from stretto.errors import EngineBroken

if TYPE_CHECKING:
    from stretto.kernels.peer_buffers import PeerBuffers

DEFAULT_TIMEOUT_S = 60.0
_TICK = datetime.timedelta(milliseconds=50)
"""How often a waiting collective looks whether it was aborted. One that ends sooner never looks."""
_SETTLE_S = 1.0
"""How long `close` waits for calls that were broken off: they end as soon as the other ranks' processes have ended."""


class TensorGroup(Protocol):
    """The ranks that hold one model's shards. All make the same calls in the same order, each on its device's thread.

    The result of a call is the same on every rank, to the bit.
    """

    rank: int
    """From 0."""
    size: int

    def peers_for(self, x: Tensor) -> PeerBuffers | None:
        """What a kernel needs that sums or exchanges `x` itself; None where `all_reduce` is the way, or the faster one.

        Depends on nothing but shape and dtype, and is the same on every rank. hot path
        """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place; returns `x`. Contiguous, of the same shape and float dtype everywhere.

        On a CPU it waits for the other ranks; on a GPU it is work on the current stream. Raises EngineBroken if a rank
        is lost, does not come within the timeout, or after `abort`. hot path
        """

    def all_gather(self, x_XL: Tensor, total: int) -> Tensor:
        """Every rank's `x_XL` side by side along the last dimension, the first `total` columns: a new [X, total].

        All ranks' parts have the same shape. Waits and raises as `all_reduce`. hot path
        """

    def abort(self) -> None:
        """Break off a call that another thread is in, and make later ones fail. Any thread; never waits; idempotent."""

    def close(self) -> None:
        """Let go of the connections; no call may be in progress. Idempotent."""

    def end_with_process(self) -> None:
        """The process is about to end, and whether the group was closed is not known. Blocks for two seconds at most.

        As far as that suffices, no thread of the group comes back to the interpreter after this: one that does while
        the interpreter is torn down takes the process with it, by SIGABRT. Idempotent; nothing in a forked child.
        """


class SoloGroup:
    """One rank: every call is the identity."""

    rank = 0
    size = 1

    def peers_for(self, x: Tensor) -> PeerBuffers | None:
        """There are none. hot path"""
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x`. hot path"""
        return x

    def all_gather(self, x_XL: Tensor, total: int) -> Tensor:
        """The first `total` columns of `x_XL`, not copied. hot path"""
        return x_XL if x_XL.shape[-1] == total else x_XL[..., :total]

    def abort(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def end_with_process(self) -> None:
        """Nothing."""


SOLO = SoloGroup()
"""The group of a model that is not split. It has no state."""


def connect_group(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    look: Callable[[], None] | None = None,
) -> TensorGroup:
    """Join the tensor group of `size` ranks that meet in `store`; `SOLO` for one rank. Blocks until all have come.

    `store`: shared by the ranks, e.g. a `TCPStore`; used under the prefix "stretto/tensors" while connecting, and on a
    GPU as long as the group lives, so another thread's use of the same client may wait for it: give it a client of its
    own. `host`: the name or address of this machine at which the other ranks reach it (Gloo). `timeout_s`: how long
    connecting, and then each collective, waits for the other ranks. `look` is called now and then while this connects;
    what it raises ends the wait.

    Gloo on a CPU, NCCL on a GPU (`device` with its index). Raises EngineBroken if the ranks do not come together,
    NotSupported where torch was built without the library.
    """
    if size == 1:
        return SOLO
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")
    own = PrefixStore("stretto/tensors", store)
    timeout = datetime.timedelta(seconds=timeout_s)

    def make() -> TensorGroup:
        if device.type == "cuda":
            from stretto.distributed.nccl_group import NcclGroup

            return NcclGroup(own, rank, size, device, timeout)
        return GlooGroup(own, rank, size, host, timeout)

    try:
        return make() if look is None else _in_thread(make, look)
    except RuntimeError as error:  # torch's DistError is one
        raise EngineBroken(
            f"rank {rank} of {size}: the tensor group did not come together within {timeout_s:g} s: {error}"
        ) from error


class GlooGroup:
    """`TensorGroup` over TCP between CPUs."""

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout: datetime.timedelta) -> None:
        """Blocks; see `connect_group`. Raises RuntimeError."""
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=host)]
        self.rank = rank
        self.size = size
        self._aborted = threading.Event()
        self._calling = threading.Lock()
        """Held by the thread that makes a call."""
        self._left: list[Any] = []
        """Calls that were broken off and may still wait inside the library. Each keeps the group for good until
        `close` has seen its end: destroying a group waits for its calls, and nobody need ever close an engine that
        failed."""
        self._group: Any = gloo(store, rank, size, options)
        self._is_copy = False
        """Of a forked child, which has none of its threads."""
        tell_forked_children(self._forget)

    def peers_for(self, x: Tensor) -> PeerBuffers | None:
        """There is no such way. hot path"""
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TensorGroup`. The sum of each element is made by one rank and handed to the others. hot path"""
        with self._calling:
            self._wait(self._open().allreduce([x]), "all-reduce")
        return x

    def all_gather(self, x_XL: Tensor, total: int) -> Tensor:
        """See `TensorGroup`. hot path"""
        part_XL = x_XL.contiguous()
        parts = [torch.empty_like(part_XL) for _ in range(self.size)]
        with self._calling:
            self._wait(self._open().allgather([parts], [part_XL]), "all-gather")
        return _side_by_side(parts, total)

    def abort(self) -> None:
        """See `TensorGroup`. The other ranks' calls end when this process does, or at their timeout."""
        self._aborted.set()

    def close(self) -> None:
        """See `TensorGroup`. A call in progress is broken off."""
        self._aborted.set()
        if not self._calling.acquire(timeout=_SETTLE_S):
            keep_for_good(self._group)
            return
        try:
            self._settle()
        finally:
            self._calling.release()

    def end_with_process(self) -> None:
        """See `TensorGroup`. Gloo's threads give tensors back that Python has seen, for which they need its lock."""
        if not self._is_copy:
            self.close()

    def _forget(self) -> None:
        self._is_copy = True
        keep_for_good(self)

    def _settle(self) -> None:
        until = time.monotonic() + _SETTLE_S
        while any(not work.is_completed() for work in self._left) and time.monotonic() < until:
            time.sleep(_TICK.total_seconds())
        if all(work.is_completed() for work in self._left):
            for work in self._left:
                let_go(work)
                let_go(self._group)
        self._left.clear()
        self._group = None  # its end joins its threads

    def _open(self) -> Any:
        if self._group is None or self._aborted.is_set():
            raise EngineBroken(f"rank {self.rank} of {self.size}: the tensor group is closed")
        return self._group

    def _wait(self, work: Any, what: str) -> None:
        while not self._ended(work, what):
            pass

    def _ended(self, work: Any, what: str) -> bool:
        """Wait for a tick at most. Raises EngineBroken."""
        try:
            # The timeout of the wait, not of the collective, which is longer and goes on.
            work.wait(_TICK)
            return True
        except RuntimeError as error:
            if self._aborted.is_set():
                keep_for_good(work)
                keep_for_good(self._group)
                self._left.append(work)
                raise EngineBroken(f"rank {self.rank} of {self.size}: an {what} was broken off") from error
        if not work.is_completed():
            return False
        try:
            work.wait()
            return True
        except RuntimeError as error:
            raise EngineBroken(
                f"rank {self.rank} of {self.size}: an {what} failed, another rank is lost or hangs: {error}"
            ) from error


def _in_thread(make: Callable[[], TensorGroup], look: Callable[[], None]) -> TensorGroup:
    """What `make` returns or raises, from a thread of its own; `look` is called meanwhile, and what it raises ends the
    wait: the libraries wait long, or forever, for a rank that died before it came, and cannot be called off.
    """
    made: list[TensorGroup] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="stretto-tensors-connect", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_TICK.total_seconds())
            look()
    except BaseException:
        thread.join(_SETTLE_S)  # the process may end now: see `end_with_process`
        raise
    if errors:
        raise errors[0]
    return made[0]


def _side_by_side(parts: list[Tensor], total: int) -> Tensor:
    """The columns of all parts in order, cut after `total`, in one copy."""
    width = parts[0].shape[-1]
    kept = [part[..., : max(0, total - rank * width)] for rank, part in enumerate(parts)]
    return torch.cat(kept, dim=-1)
