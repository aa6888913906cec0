"""Sums of small tensors over the GPUs of one host, in one kernel, through memory that the ranks write directly.

Every rank writes its words into a buffer of each other rank and waits for the others' words in its own. There are two
ways: few words are *flagged*, each is written beside the number of the call in one 8-byte store, so nothing has to be
fenced (the idea of NCCL's LL protocol). Many words are *signalled*: half as many bytes, then a barrier and one number
for each program. All ranks add in the order of the ranks, in float32: results are equal on all to the bit.

What no call holds is summed in pieces. Buffers alternate between two halves. A rank writes a half again two calls
later; it has then got every other rank's words of the call in between, which that rank writes only after its earlier
call has ended.

Legend: T rows, D hidden, R ranks; a word is 4 bytes of data: one float32, or two bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options

_CALLS: tl.constexpr = tl.constexpr(0)
_ENDED: tl.constexpr = tl.constexpr(1)
ABORTED = 2
_ABORTED: tl.constexpr = tl.constexpr(ABORTED)
STATE_WORDS = 4
"""int32: calls so far; programs of the running call that have ended; not 0: wait for nobody any more; unused."""

MOST_PROGRAMS = 4096
"""Of a signalled call."""
_SIGNAL_WORDS = 8
"""int32 words from one program's signal to the next one's: a sector of memory for each."""

_SUM, _ADD, _ADD_NORM = 0, 1, 2
_FLAT_BLOCK = 512
_WIDE_BLOCK = 2048
_MANY_WORDS = 2**16


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
    """Words of a call up to which they are flagged."""
    signalled: int
    """Words of the largest call; more are several calls."""

    @staticmethod
    def bytes_of(size: int, flagged: int, signalled: int) -> int:
        """Bytes of a buffer of a group of `size` ranks."""
        return 2 * size * (8 * flagged + 4 * signalled + 4 * _SIGNAL_WORDS * MOST_PROGRAMS)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` [T, D] can be summed: there is something, in whole words, and a row fits. hot path"""
        return 0 < _num_words(x) <= self.signalled * x.shape[0]

    def pieces(self, first_TD: Tensor, *others_TD: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """The rows of the given tensors, which are of one shape and dtype, that one call each can take. hot path"""
        num_rows = first_TD.shape[0]
        most_rows = min(MOST_PROGRAMS, self.signalled * num_rows // _num_words(first_TD))
        if num_rows <= most_rows:
            return ((first_TD, *others_TD),)
        return zip(first_TD.split(most_rows), *(other_TD.split(most_rows) for other_TD in others_TD), strict=True)


# hot path
def sum_ranks(x_TD: Tensor, peers: PeerBuffers) -> Tensor:
    """`x_TD` becomes the sum over all ranks; returns it. Contiguous, `peers.holds(x_TD)`. Never blocks the host."""
    for (piece_TD,) in peers.pieces(x_TD):
        _flat(piece_TD, piece_TD, peers, _SUM)
    return x_TD


# hot path
def add_sum(residual_TD: Tensor, update_TD: Tensor, peers: PeerBuffers) -> None:
    """residual += the sum of all ranks' updates. Contiguous. Never blocks the host."""
    for into_TD, piece_TD in peers.pieces(residual_TD, update_TD):
        _flat(into_TD, piece_TD, peers, _ADD)


# hot path
def add_sum_rms_norm(
    residual_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float, peers: PeerBuffers
) -> Tensor:
    """residual += the sum of all ranks' updates; returns its RMS norm. Never blocks the host.

    All contiguous and of one dtype.
    """
    out_TD = torch.empty_like(residual_TD)
    for into_TD, piece_TD, normed_TD in peers.pieces(residual_TD, update_TD, out_TD):
        _add_norm(into_TD, piece_TD, normed_TD, weight_D, eps, peers)
    return out_TD


def _add_norm(
    residual_TD: Tensor, update_TD: Tensor, out_TD: Tensor, weight_D: Tensor, eps: float, peers: PeerBuffers
) -> None:
    rows = residual_TD.shape[0]
    words = _num_words(residual_TD) // rows
    block = next_power_of_2(words)
    _exchange[(rows,)](
        update_TD.view(torch.int32),
        residual_TD.view(torch.int32),
        weight_D.view(torch.int32),
        out_TD.view(torch.int32),
        peers.address_R,
        peers.state,
        rows * words,
        eps,
        RANK=peers.rank,
        SIZE=peers.size,
        FLAGGED=peers.flagged,
        SIGNALLED=peers.signalled if rows * words > peers.flagged else 0,
        PROGRAMS=MOST_PROGRAMS,
        WORDS=words,
        BLOCK=block,
        WHOLE=True,
        PAIRS=residual_TD.dtype == torch.bfloat16,
        MODE=_ADD_NORM,
        num_warps=4 if block <= 1024 else 8,
        **options(residual_TD.device),
    )


def _flat(into: Tensor, update: Tensor, peers: PeerBuffers, mode: int) -> None:
    pairs = update.dtype == torch.bfloat16
    words = _num_words(update)
    block = _FLAT_BLOCK if words <= _MANY_WORDS else _WIDE_BLOCK
    into_words = into.view(torch.int32)
    _exchange[(cdiv(words, block),)](
        update.view(torch.int32),
        into_words,
        into_words,
        into_words,
        peers.address_R,
        peers.state,
        words,
        0.0,
        RANK=peers.rank,
        SIZE=peers.size,
        FLAGGED=peers.flagged,
        SIGNALLED=peers.signalled if words > peers.flagged else 0,
        PROGRAMS=MOST_PROGRAMS,
        WORDS=block,
        BLOCK=block,
        WHOLE=words % block == 0,
        PAIRS=pairs,
        MODE=mode,
        num_warps=4 if block <= 1024 else 8,
        **options(update.device),
    )


def _num_words(x: Tensor) -> int:
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
    address, source, call, SIZE: tl.constexpr, FLAGGED: tl.constexpr, SIGNALLED: tl.constexpr, PROGRAMS: tl.constexpr
):
    """In the buffer at `address`: the words of rank `source` in this call, and this program's signal of it."""
    part = (call & 1) * SIZE + source
    words = tl.multiple_of((address + 16 * SIZE * FLAGGED).to(tl.pointer_type(tl.int32)), 16)
    signals = words + 2 * SIZE * SIGNALLED
    return words + part * SIGNALLED, signals + (part * PROGRAMS + tl.program_id(0)) * 8


@triton.jit
def _push_signalled(
    words,
    at,
    inside,
    call,
    address_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    SIGNALLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs, signal = _signalled_places(
                tl.load(address_ptr + peer), RANK, call, SIZE, FLAGGED, SIGNALLED, PROGRAMS
            )
            tl.store(theirs + at, words, mask=inside)
    tl.debug_barrier()  # all threads' words come before the signal, which one thread gives
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs, signal = _signalled_places(
                tl.load(address_ptr + peer), RANK, call, SIZE, FLAGGED, SIGNALLED, PROGRAMS
            )
            tl.atomic_xchg(signal, call, sem="release", scope="sys")


@triton.jit
def _await_signalled(
    source,
    at,
    inside,
    call,
    address_ptr,
    state_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    SIGNALLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    own, signal = _signalled_places(tl.load(address_ptr + RANK), source, call, SIZE, FLAGGED, SIGNALLED, PROGRAMS)
    missing = tl.atomic_add(signal, 0, sem="acquire", scope="sys") != call
    while missing:
        missing = tl.atomic_add(signal, 0, sem="acquire", scope="sys") != call
        missing = missing & (tl.load(state_ptr + _ABORTED, volatile=True) == 0)
    tl.debug_barrier()
    return tl.load(own + at, mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def begin_call(state_ptr):
    """Number of the call that this kernel is; 1 is the first. Equal on all ranks."""
    return tl.load(state_ptr + _CALLS, volatile=True) + 1


@triton.jit
def end_call(state_ptr, call):
    """Each program, at its end: the last one makes the next call another one."""
    if tl.atomic_add(state_ptr + _ENDED, 1) == tl.num_programs(0) - 1:
        tl.store(state_ptr + _ENDED, 0)
        tl.store(state_ptr + _CALLS, call)


@triton.jit
def _low(word, PAIRS: tl.constexpr):
    return (word << 16).to(tl.float32, bitcast=True) if PAIRS else word.to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _packed(low, high, PAIRS: tl.constexpr):
    if PAIRS:
        low_half = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = low_half | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        word = low.to(tl.int32, bitcast=True)
    return word


@kernel(do_not_specialize=["num_words"])
def _exchange(
    update_ptr,
    into_ptr,
    weight_ptr,
    out_ptr,
    address_ptr,
    state_ptr,
    num_words,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    SIGNALLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * WORDS + i
    inside = i < WORDS
    if not WHOLE:
        inside = inside & (at < num_words)
    if MODE == 2:
        weight = tl.load(weight_ptr + i, mask=i < WORDS, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    call = begin_call(state_ptr)
    own = tl.load(update_ptr + at, mask=inside, other=0)
    if SIGNALLED:
        _push_signalled(own, at, inside, call, address_ptr, RANK, SIZE, FLAGGED, SIGNALLED, PROGRAMS)
    else:
        push_flagged(own, at, inside, call, address_ptr, RANK, SIZE, FLAGGED)
    if MODE != 0:
        before = tl.load(into_ptr + at, mask=inside, other=0)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = own
        elif SIGNALLED:
            word = _await_signalled(
                source, at, inside, call, address_ptr, state_ptr, RANK, SIZE, FLAGGED, SIGNALLED, PROGRAMS
            )
        else:
            word = await_flagged(source, at, inside, call, address_ptr, state_ptr, RANK, SIZE, FLAGGED)
        low += _low(word, PAIRS)
        if PAIRS:
            high += _high(word)
    total = _packed(low, high, PAIRS)
    if MODE != 0:
        # Rounded before it is added, as where the sum is NCCL's.
        low = _low(total, PAIRS) + _low(before, PAIRS)
        if PAIRS:
            high = _high(total) + _high(before)
        total = _packed(low, high, PAIRS)
    tl.store(into_ptr + at, total, mask=inside)
    if MODE == 2:
        low = tl.where(inside, _low(total, PAIRS), 0.0)
        square = low * low
        count = WORDS
        if PAIRS:
            high = tl.where(inside, _high(total), 0.0)
            square += high * high
            count = 2 * WORDS
            high_weight = _high(weight)
        factor = 1.0 / tl.sqrt(tl.sum(square, 0) / count + eps)
        low = low * factor * _low(weight, PAIRS)
        if PAIRS:
            high = high * factor * high_weight
        tl.store(out_ptr + at, _packed(low, high, PAIRS), mask=inside)
    end_call(state_ptr, call)
