"""A byte stream from one writer to N readers in shared memory: who owns which word, and in which order it is touched.

    word 0     magic        written once, before anyone else can see the memory
    word 1     capacity     bytes of the data area
    word 2     size         ranks, the writer included
    word 16    head         bytes ever written                written by the writer only
    word 17    closed       1: nothing will follow            written by the writer only
    word 16 + 16 * r        tail: bytes ever read by rank r   written by rank r only
        + 1                 sleeping: rank r wants a bell     written by rank r only
        + 2                 closed: rank r has left           written by rank r only
    then, from a page boundary on, the data: byte n of the stream is at n modulo capacity

Every word has one writer, and 128 bytes lie between words of different writers. Counts of 64 bits never wrap.

What correctness relies on: (1) an aligned word is read and written in one piece: a memoryview of format "Q" moves it
with a memcpy of eight bytes, which every compiler makes one instruction on a 64-bit machine; (2) `Fence` keeps what is
before it before what is after it. It releases and takes a lock of the interpreter, two atomic operations: locked
instructions on x86 (a full barrier); on arm64 a releasing store followed by an acquiring load, which the architecture
keeps in order, and what is before the first and after the second with them. The fence stands wherever a word follows
data or data follows a word, and where each side writes its own word and then reads the other's (head and sleeping).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

from stretto.distributed.transport.base import ConnectFailed, TransportError

_MAGIC = 0x53545245_54544F31
_WORD, _HEAD, _CLOSED, _FIRST = 8, 16, 17, 16
_STRIDE = 16
_TAIL, _SLEEPING, _LEFT = 0, 1, 2


class Fence:
    """Orders this thread's accesses to shared memory; see the top of this file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        """What is above happens, for every other process, before what is below."""
        self._lock.release()
        self._lock.acquire()


def _data_offset(size: int) -> int:
    words = _FIRST + _STRIDE * size
    return -(-words * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE


class _Mapped:
    """The mapped memory. Ends when `close` is called or the process dies; nothing has to be unlinked."""

    def __init__(self, fd: int, size: int, capacity: int) -> None:
        self.size, self.capacity = size, capacity
        self._map = mmap.mmap(fd, _data_offset(size) + capacity)
        self._all = memoryview(self._map)
        self._words = self._all[: _data_offset(size)].cast("Q")
        self._data = self._all[_data_offset(size) :]
        self._fence = Fence()

    def close(self) -> None:
        """Unmap. Safe to call twice."""
        for view in (self._words, self._data, self._all):
            view.release()
        self._map.close()


class RingWriter(_Mapped):
    """The leader's side: makes the memory, writes the stream. `fd` is for passing on; it stays open until `close`."""

    def __init__(self, size: int, capacity: int) -> None:
        if size < 2 or capacity < 64:
            raise ValueError(f"a ring of {capacity} bytes for {size} ranks")
        # Anonymous: it is gone with the last process that has it open or mapped, however that process ends. Sealed: no
        # other process can shrink it, which would kill this one when it touches what is not there any more.
        self.fd = os.memfd_create("stretto-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _data_offset(size) + capacity)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            super().__init__(self.fd, size, capacity)
        except BaseException:
            os.close(self.fd)
            raise
        self._words[0], self._words[1], self._words[2] = _MAGIC, capacity, size
        self._head = 0
        self._slowest = 0  # at least this much was read by everybody, when last looked
        self._tails = [_FIRST + _STRIDE * rank for rank in range(1, size)]

    def write(self, piece: memoryview) -> int:
        """Copy what there is room for; returns how many bytes of `piece`. Readers see it after `show`."""  # hot path
        head, capacity = self._head, self.capacity
        count = len(piece)
        if count > capacity - (head - self._slowest):
            self._look()
            count = min(count, capacity - (head - self._slowest))
        at = head % capacity
        first = min(count, capacity - at)
        self._data[at : at + first] = piece[:first]
        if first < count:
            self._data[: count - first] = piece[first:count]
        self._head = head + count
        return count

    def show(self) -> None:
        """Let readers see what was written."""  # hot path
        self._fence()
        self._words[_HEAD] = self._head
        self._fence()  # before `sleepers` reads who wants a bell

    def sleepers(self) -> list[int]:
        """The ranks that want a bell."""  # hot path
        words = self._words
        return [rank for rank, tail in enumerate(self._tails, 1) if words[tail + _SLEEPING]]

    def pending(self) -> tuple[int, int]:
        """The rank that is furthest behind, and how many bytes it has not read."""
        self._look()
        rank = min(range(1, self.size), key=lambda rank: self._words[self._tails[rank - 1]])
        return rank, self._head - self._words[self._tails[rank - 1]]

    def left(self, rank: int) -> bool:
        """Whether this rank has closed its end."""
        return bool(self._words[self._tails[rank - 1] + _LEFT])

    def end(self) -> None:
        """Say that nothing will follow."""
        self._fence()
        self._words[_CLOSED] = 1
        self._fence()

    def close(self) -> None:
        """Unmap and close the descriptor. Safe to call twice."""
        if self.fd >= 0:
            super().close()
            os.close(self.fd)
            self.fd = -1

    def _look(self) -> None:
        tails = [self._words[tail] for tail in self._tails]
        if min(tails) < self._slowest or max(tails) > self._head:
            raise TransportError(f"the shared memory is damaged: {self._head} bytes written, read by ranks: {tails}")
        self._slowest = min(tails)
        self._fence()  # nothing is written over before the readers' words say that they are done with it


class RingReader(_Mapped):
    """A follower's side of the memory `fd` (the caller closes it), for `rank`."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        length = os.fstat(fd).st_size
        with mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as start, memoryview(start) as view:
            magic, capacity, ranks = view[: 3 * _WORD].cast("Q")
        if magic != _MAGIC or ranks != size or length != _data_offset(size) + capacity:
            raise ConnectFailed(f"the leader's shared memory is not that of a control plane for {size} ranks")
        super().__init__(fd, size, capacity)
        self._tail = 0
        self._own = _FIRST + _STRIDE * rank

    def available(self) -> int:
        """How many bytes can be read."""  # hot path
        count = self._words[_HEAD] - self._tail
        if not 0 <= count <= self.capacity:
            raise TransportError(f"the shared memory is damaged: {count} bytes to read of {self.capacity}")
        return count

    def read(self, count: int) -> bytes:
        """The next `count` bytes, which must be available."""  # hot path
        self._fence()
        at = self._tail % self.capacity
        first = min(count, self.capacity - at)
        data = bytes(self._data[at : at + first])
        if first < count:
            data += self._data[: count - first]
        self._tail += count
        return data

    def release(self) -> None:
        """Give the room of what was read back to the writer."""  # hot path
        self._fence()
        self._words[self._own + _TAIL] = self._tail

    def want_bell(self, wanted: bool) -> None:
        """Ask for a bell at the next `show`, or no more; look at `available` once more before sleeping."""
        self._words[self._own + _SLEEPING] = int(wanted)
        self._fence()

    def ended(self) -> bool:
        """Whether the writer has said that nothing will follow; what it wrote before is available then."""
        closed = bool(self._words[_CLOSED])
        self._fence()
        return closed

    def leave(self) -> None:
        """Say that this rank has left."""
        self._words[self._own + _LEFT] = 1
        self._fence()
