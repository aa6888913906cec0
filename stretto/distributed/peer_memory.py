"""Memory that the GPUs of one host share: a buffer of each rank that every other rank can write.

Owns the allocation, its mappings and the word that ends all waiting. Talks to the CUDA driver itself: torch's ways of
sharing memory need a registered process group, or leave files behind when a process is killed.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from stretto.kernels.peer_buffers import PeerBuffers

logger = logging.getLogger("stretto.ranks")

FLAGGED_WORDS = 2**17
"""4-byte words of one call up to which each has a flag (kernels/peer_buffers.py)."""
SIGNALLED_BYTES = 2**27
"""Of a buffer, for calls of more words; both halves and all ranks share them."""
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """A CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


class Unshareable(Exception):
    """These GPUs cannot write each other's memory; the reason is the text."""


class PeerMemory:
    """This rank's buffer, and where the others' are. Made by all ranks at once, on the thread that has the device."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Blocks until all ranks have come. Raises Unshareable, on all ranks or none; RuntimeError if one is lost."""
        from stretto.kernels.peer_buffers import STATE_WORDS, PeerBuffers

        self._device = device
        self._driver = _Driver()
        self._mapped: list[int] = []
        self._own = 0
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self._aborting = torch.ones(1, dtype=torch.int32).pin_memory()
        self._abort_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        signalled = SIGNALLED_BYTES // (2 * size * 16) * 4
        problem, handle = "", b""
        try:
            self._own = self._driver.allocate(PeerBuffers.bytes_of(size, FLAGGED_WORDS, signalled))
            handle = self._driver.export(self._own)
        except (OSError, RuntimeError) as error:
            problem = str(error)
        offers = _all_gather(store, "offer", rank, size, _host().encode() + b"\n" + handle)
        addresses = [self._own] * size
        hosts = {offer.split(b"\n", 1)[0] for offer in offers}
        if not problem and len(hosts) > 1:
            problem = "the ranks are on several hosts"
        if not problem:
            try:
                for peer, offer in enumerate(offers):
                    if peer != rank:
                        addresses[peer] = self._driver.open(offer.split(b"\n", 1)[1])
                        self._mapped.append(addresses[peer])
            except RuntimeError as error:
                problem = str(error)
        problems = [p for p in _all_gather(store, "opened", rank, size, problem.encode()) if p]
        if problems:
            self.close()
            raise Unshareable(problems[0].decode(errors="replace"))
        self.buffers: PeerBuffers = PeerBuffers(
            torch.tensor(addresses, dtype=torch.int64).to(device),
            self._state,
            rank,
            size,
            FLAGGED_WORDS,
            signalled,
        )
        torch.cuda.synchronize(device)

    def abort(self) -> None:
        """Kernels that wait for another rank end, with garbage; later ones do not wait. Any thread; never blocks."""
        from stretto.kernels.peer_buffers import ABORTED

        with torch.cuda.device(self._device), torch.cuda.stream(self._abort_stream):
            self._state[ABORTED : ABORTED + 1].copy_(self._aborting, non_blocking=True)

    def close(self) -> None:
        """Give the memory back. No kernel may use it any more, on any rank. Idempotent."""
        for address in self._mapped:
            self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(address), check=False)
        self._mapped.clear()
        if self._own:
            self._driver.call("cuMemFree_v2", ctypes.c_uint64(self._own), check=False)
            self._own = 0


class _Driver:
    """The calls of libcuda that are needed. They act on the calling thread's current device."""

    def __init__(self) -> None:
        self._library: Any = None

    def call(self, name: str, *arguments: Any, check: bool = True) -> None:
        """Raises OSError without a driver, RuntimeError if the call fails."""
        if self._library is None:
            self._library = ctypes.CDLL("libcuda.so.1")
        status = getattr(self._library, name)(*arguments)
        if status and check:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown').decode()} ({status})")

    def allocate(self, nbytes: int) -> int:
        """Address of fresh zeros."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        self.call("cuCtxSynchronize")
        return address.value

    def export(self, address: int) -> bytes:
        """What another process opens this allocation with."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address of another process's allocation, here."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value


def _all_gather(store: Store, what: str, rank: int, size: int, data: bytes) -> list[bytes]:
    """Every rank's `data`. Blocks."""
    store.set(f"peer memory/{what}/{rank}", data.hex())
    return [bytes.fromhex(store.get(f"peer memory/{what}/{peer}").decode()) for peer in range(size)]


def _host() -> str:
    """Equal for processes of one running system."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
