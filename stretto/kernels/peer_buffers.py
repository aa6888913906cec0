"""Memory that the GPUs of one host write each other: how it is laid out, and how a kernel passes words through it.

Every rank writes its words into a buffer of each other rank and waits for the others' words in its own. There are two
ways: few words are *flagged*, each is written beside the number of the call in one 8-byte store, so nothing has to be
fenced (the idea of NCCL's LL protocol). Many words are *signalled*: half as many bytes, then a barrier and one number
for each program.

Buffers alternate between two halves. A rank writes a half again two calls later; it has then got every other rank's
words of the call in between, which that rank writes only after its earlier call has ended.

Legend: T rows, D columns, R ranks; a word is 4 bytes of data: one float32, or two bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CALLS: tl.constexpr = tl.constexpr(0)
_ENDED: tl.constexpr = tl.constexpr(1)
ABORTED = 2
_ABORTED: tl.constexpr = tl.constexpr(ABORTED)
_TAKEN: tl.constexpr = tl.constexpr(3)
STATE_WORDS = 4
"""int32: calls so far; programs of the running call that have ended; not 0: wait for nobody any more; pieces taken."""
_AT_ONCE: tl.constexpr = tl.constexpr(128)
"""Programs that run at once on any GPU that has peers."""

MOST_PROGRAMS = 4096
"""Of a signalled call."""
_SIGNAL_WORDS = 8
"""int32 words from one program's signal to the next one's: a sector of memory for each."""


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """Where this rank finds the buffers of all ranks.

    A buffer is int64 [2, R, flagged], then int32 [2, R, signalled], then int32 [2, R, MOST_PROGRAMS, 8]: in both halves
    the words of each rank, and its signals. Zeros at first.
    """

    address_R: Tensor
    """int64: address of each rank's buffer, in this rank's address space."""
    state: Tensor
    """int32 [STATE_WORDS], zeros at first."""
    rank: int
    size: int
    flagged: int
    """Words of a call up to which they are flagged; a multiple of 2."""
    signalled: int
    """Words of the largest call; more are several calls. A multiple of 4, so that four are written at once."""

    @staticmethod
    def bytes_of(size: int, flagged: int, signalled: int) -> int:
        """Bytes of a buffer of a group of `size` ranks."""
        return 2 * size * (8 * flagged + 4 * signalled + 4 * _SIGNAL_WORDS * MOST_PROGRAMS)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` [T, D] can be summed: there is something, in whole words, and a row fits. hot path"""
        return 0 < words_of(x) <= self.signalled * x.shape[0]

    def pieces(self, first_TD: Tensor, *others_TD: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """The rows of the given tensors, which are of one shape and dtype, that one call each can take. hot path"""
        num_rows = first_TD.shape[0]
        most_rows = min(MOST_PROGRAMS, self.signalled * num_rows // words_of(first_TD))
        if num_rows <= most_rows:
            return ((first_TD, *others_TD),)
        return zip(first_TD.split(most_rows), *(other_TD.split(most_rows) for other_TD in others_TD), strict=True)


def words_of(x: Tensor) -> int:
    """Words of `x`; 0 if it is of a dtype, or width, that has none."""
    if x.dtype == torch.bfloat16:
        return x.numel() // 2 if x.shape[-1] % 2 == 0 else 0
    return x.numel() if x.dtype == torch.float32 else 0


@triton.jit
def push_flagged(words, at, inside, call, address_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, FLAGGED: tl.constexpr):
    """Write int32 `words` to places `at` of every other rank's buffer."""
    flagged = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    place = ((call & 1) * SIZE + RANK) * FLAGGED
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(address_ptr + peer).to(tl.pointer_type(tl.int64)), 16)
            tl.store(theirs + place + at, flagged, mask=inside)


@triton.jit
def await_flagged(
    source, at, inside, call, address_ptr, state_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, FLAGGED: tl.constexpr
):
    """The int32 words that rank `source` has written for this rank in this call; any after an abort."""
    place = ((call & 1) * SIZE + source) * FLAGGED
    own = tl.multiple_of(tl.load(address_ptr + RANK).to(tl.pointer_type(tl.int64)), 16) + place + at
    here = call.to(tl.int64) << 32
    found = tl.load(own, mask=inside, other=here, volatile=True)
    missing = tl.max(((found >> 32).to(tl.int32) != call).to(tl.int32), 0)
    while missing != 0:
        found = tl.load(own, mask=inside, other=here, volatile=True)
        missing = tl.max(((found >> 32).to(tl.int32) != call).to(tl.int32), 0)
        missing = tl.where(tl.load(state_ptr + _ABORTED, volatile=True) != 0, 0, missing)
    return found.to(tl.int32)


@triton.jit
def _signalled_places(
    address,
    source,
    call,
    piece,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    SIGNALLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """In the buffer at `address`: the words of rank `source` in this call, and the signal of this piece of them."""
    part = (call & 1) * SIZE + source
    words = tl.multiple_of((address + 16 * SIZE * FLAGGED).to(tl.pointer_type(tl.int32)), 16)
    signals = words + 2 * SIZE * SIGNALLED
    return words + part * SIGNALLED, signals + (part * PROGRAMS + piece) * 8


@triton.jit
def push_signalled(
    words,
    at,
    inside,
    call,
    piece,
    address_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    SIGNALLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Write int32 `words` to places `at` of every other rank's buffer, and then this piece's signals."""
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs, signal = _signalled_places(
                tl.load(address_ptr + peer), RANK, call, piece, SIZE, FLAGGED, SIGNALLED, PROGRAMS
            )
            tl.store(tl.multiple_of(theirs, 16) + at, words, mask=inside)
    tl.debug_barrier()  # all threads' words come before the signal, which one thread gives
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs, signal = _signalled_places(
                tl.load(address_ptr + peer), RANK, call, piece, SIZE, FLAGGED, SIGNALLED, PROGRAMS
            )
            tl.atomic_xchg(signal, call, sem="release", scope="sys")


@triton.jit
def await_signalled(
    source,
    at,
    inside,
    call,
    piece,
    address_ptr,
    state_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    SIGNALLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The int32 words of this piece that rank `source` has written for this rank; any after an abort."""
    own, signal = _signalled_places(
        tl.load(address_ptr + RANK), source, call, piece, SIZE, FLAGGED, SIGNALLED, PROGRAMS
    )
    missing = tl.atomic_add(signal, 0, sem="acquire", scope="sys") != call
    while missing:
        missing = tl.atomic_add(signal, 0, sem="acquire", scope="sys") != call
        missing = missing & (tl.load(state_ptr + _ABORTED, volatile=True) == 0)
    tl.debug_barrier()
    return tl.load(tl.multiple_of(own, 16) + at, mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def begin_call(state_ptr):
    """Number of the call that this kernel is; 1 is the first. Equal on all ranks."""
    return tl.load(state_ptr + _CALLS, volatile=True) + 1


@triton.jit
def take_piece(state_ptr):
    """Number of the piece of a call that this program is to do.

    Where not all programs can run at once, those that have begun take the first ones. So whatever order GPUs begin
    programs in, the first piece that is not done on all ranks is being done on each of them, and none waits for ever.
    """
    piece = tl.program_id(0)
    if tl.num_programs(0) > _AT_ONCE:
        piece = tl.atomic_add(state_ptr + _TAKEN, 1)
    return piece


@triton.jit
def end_call(state_ptr, call):
    """Each program, at its end: the last one makes the next call another one."""
    if tl.atomic_add(state_ptr + _ENDED, 1) == tl.num_programs(0) - 1:
        tl.store(state_ptr + _ENDED, 0)
        tl.store(state_ptr + _TAKEN, 0)
        tl.store(state_ptr + _CALLS, call)
