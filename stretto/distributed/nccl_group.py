"""The tensor group of GPUs: memory that all ranks write for sums, and NCCL for what is faster with it.

Owns the communicator and that memory. Everything here can be captured in CUDA graphs.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # torch does not list the first
    AllgatherOptions,
    AllreduceOptions,
    Store,
)

from stretto.distributed.peer_memory import PeerMemory, Unshareable
from stretto.errors import EngineBroken, NotSupported

if TYPE_CHECKING:
    from stretto.kernels.peer_buffers import PeerBuffers

logger = logging.getLogger("stretto.ranks")

_WAYS_TO_END_THE_PROCESS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",  # it also talks to the store for good
)
_CLOSE_SECONDS = 2.0


class NcclGroup:
    """`TensorGroup` between GPUs: calls are work on the current stream, and can be captured in CUDA graphs."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout: datetime.timedelta,
    ) -> None:
        """Blocks; see `connect_group`. Raises RuntimeError or NotSupported."""
        try:
            from torch.distributed.distributed_c10d import ProcessGroupNCCL
        except ImportError as error:
            raise NotSupported("tensor parallelism on GPUs needs a torch with NCCL") from error
        from stretto.kernels.exchange import sum_ranks

        self.rank = rank
        self.size = size
        self._device = device
        self._aborted = threading.Event()
        self._ending: threading.Thread | None = None
        self._sum_ranks = sum_ranks
        self._largest_direct = largest_direct(size)

        torch.cuda.set_device(device)  # every thread has its own current device
        nccl: Any = ProcessGroupNCCL  # torch's stubs lack its calls
        options = nccl.Options()
        options._timeout = timeout
        with _own_failures():
            self._group: Any = nccl(store, rank, size, options)
        # Here, not in the first step or in the middle of a capture. (Torch's own call for this may hold the GIL.)
        self._group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
        self._memory = self._share_memory(store)
        # Not asynchronous: on the current stream itself, so that no events and no second stream come between kernels.
        self._reduce = AllreduceOptions()
        self._gather = AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False

    def _share_memory(self, store: Store) -> PeerMemory | None:
        if os.environ.get("STRETTO_DISABLE_PEER_MEMORY", "0") not in ("", "0"):
            return None
        try:
            return PeerMemory(store, self.rank, self.size, self._device)
        except Unshareable as error:
            logger.warning("rank %d: sums go through NCCL, which is slower: %s", self.rank, error)
            return None

    def peers_for(self, x: Tensor) -> PeerBuffers | None:
        """See `TensorGroup`. hot path"""
        if self._memory is None or x.nbytes > self._largest_direct or not self._memory.buffers.holds(x):
            return None
        return self._memory.buffers

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TensorGroup`. hot path"""
        group, peers = self._open(), self.peers_for(x)
        if peers is not None:
            return self._sum_ranks(x, peers)
        self._enqueued(group.allreduce([x], self._reduce))
        return x

    def all_gather(self, x_XL: Tensor, total: int) -> Tensor:
        """See `TensorGroup`. hot path"""
        part_XL = x_XL.contiguous()
        parts_RXL = part_XL.new_empty((self.size, *part_XL.shape))
        self._enqueued(self._open()._allgather_base(parts_RXL, part_XL, self._gather))
        width = part_XL.shape[-1]
        kept = [part[..., : max(0, total - rank * width)] for rank, part in enumerate(parts_RXL)]
        return torch.cat(kept, dim=-1)

    def abort(self) -> None:
        """See `TensorGroup`. Kernels that wait for another rank end."""
        if not self._aborted.is_set():
            self._aborted.set()
            self._end()

    def close(self) -> None:
        """See `TensorGroup`. The device must have no work of the group any more, nor a graph that holds some."""
        if self._group is None:
            return
        if not self._aborted.is_set():
            self._aborted.set()
            self._end()  # NCCL's own orderly end waits for the other ranks, which may be gone
        if self._ending is not None:
            self._ending.join(_CLOSE_SECONDS)
            if self._ending.is_alive():
                return  # it is left to the end of the process
        self._group = None
        if self._memory is not None:
            self._memory.close()

    def end_with_process(self) -> None:
        """See `TensorGroup`."""
        if self._ending is not None:
            self._ending.join(_CLOSE_SECONDS)

    def _end(self) -> None:
        group, memory = self._group, self._memory

        def end() -> None:
            torch.cuda.set_device(self._device)
            if memory is not None:
                memory.abort()
            with suppress(RuntimeError):  # it has waited a minute for graphs that hold calls, and goes on waiting
                group.abort()

        self._ending = threading.Thread(target=end, name="stretto-nccl-abort", daemon=True)
        self._ending.start()

    def _open(self) -> Any:
        if self._group is None or self._aborted.is_set():
            raise EngineBroken(f"rank {self.rank} of {self.size}: the tensor group is closed")
        return self._group

    @staticmethod
    def _enqueued(work: Any) -> None:
        """Let the current stream wait for a call that was put on another one; NCCL gives nothing where it was not."""
        if work is not None:
            work.wait()


def largest_direct(size: int) -> float:
    """Bytes of a sum up to which `size` ranks write each other's memory; NCCL does more.

    Two ranks send no more than with NCCL, and were measured to be faster with all sizes that a step has
    (`stretto.bench.gpu_exchange`, H200). More ranks send more: their limits are estimated from two ranks' figures.
    """
    return math.inf if size == 2 else 2**22 / ((size - 1) * (size - 2))


@contextmanager
def _own_failures() -> Iterator[None]:
    """A group made in here does not end the process when a call fails: what a lost rank means is the watch's affair."""
    before = {name: os.environ.get(name) for name in _WAYS_TO_END_THE_PROCESS}
    os.environ |= dict.fromkeys(before, "0")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
