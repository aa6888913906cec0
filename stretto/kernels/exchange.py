"""Sums of small tensors over the GPUs of one host, in one kernel, through memory that the ranks write directly.

Every rank writes its words into a buffer of each other rank, each word beside the number of the call, and waits for
the others' words in its own: data and flag arrive in one 8-byte store, so nothing has to be signalled or fenced (the
idea of NCCL's LL protocol). All ranks add in the order of the ranks, in float32: results are equal on all to the bit.

Buffers alternate between two halves. A rank writes a half again two calls later; it has then got every other rank's
words of the call in between, which that rank writes only after its earlier call has ended.

Legend: T rows, D hidden, R ranks; a word is 4 bytes of data: one float32, or two bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.launch import options

_CALLS: tl.constexpr = tl.constexpr(0)
_ENDED: tl.constexpr = tl.constexpr(1)
ABORTED = 2
_ABORTED: tl.constexpr = tl.constexpr(ABORTED)
STATE_WORDS = 4
"""int32: calls so far; programs of the running call that have ended; not 0: wait for nobody any more; unused."""

_SUM, _ADD, _ADD_NORM = 0, 1, 2
_FLAT_BLOCK = 512
_WIDE_BLOCK = 2048
_MANY_WORDS = 2**16


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """Where this rank finds the buffers of all ranks.

    A buffer is int64 [2, R, capacity]: for each half, the words of each rank.
    """

    address_R: Tensor
    """int64: address of each rank's buffer, in this rank's address space."""
    state: Tensor
    """int32 [STATE_WORDS], zeros at first."""
    rank: int
    size: int
    capacity: int
    """Words of one call."""

    def holds(self, x: Tensor) -> bool:
        """Whether a call can take `x`. hot path"""
        if x.dtype == torch.bfloat16:
            return x.shape[-1] % 2 == 0 and x.numel() <= 2 * self.capacity
        return x.dtype == torch.float32 and x.numel() <= self.capacity


# hot path
def sum_ranks(x: Tensor, peers: PeerBuffers) -> Tensor:
    """`x` becomes the sum over all ranks; returns it. Contiguous, `peers.holds(x)`. Never blocks the host."""
    _flat(x, x, peers, _SUM)
    return x


# hot path
def add_sum(residual_TD: Tensor, update_TD: Tensor, peers: PeerBuffers) -> None:
    """residual += the sum of all ranks' updates. Contiguous. Never blocks the host."""
    _flat(residual_TD, update_TD, peers, _ADD)


# hot path
def add_sum_rms_norm(
    residual_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float, peers: PeerBuffers
) -> Tensor:
    """residual += the sum of all ranks' updates; returns its RMS norm. Never blocks the host.

    All contiguous and of one dtype.
    """
    rows, width = residual_TD.shape
    out_TD = torch.empty_like(residual_TD)
    words = width // 2 if residual_TD.dtype == torch.bfloat16 else width
    block = triton.next_power_of_2(words)
    _exchange[(rows,)](
        update_TD.view(torch.int32),
        residual_TD.view(torch.int32),
        weight_D.view(torch.int32),
        out_TD.view(torch.int32),
        peers.address_R,
        peers.state,
        rows * words,
        eps,
        peers.capacity,
        RANK=peers.rank,
        SIZE=peers.size,
        WORDS=words,
        BLOCK=block,
        WHOLE=True,
        PAIRS=residual_TD.dtype == torch.bfloat16,
        MODE=_ADD_NORM,
        num_warps=4 if block <= 1024 else 8,
        **options(residual_TD.device),
    )
    return out_TD


def _flat(into: Tensor, update: Tensor, peers: PeerBuffers, mode: int) -> None:
    pairs = update.dtype == torch.bfloat16
    words = update.numel() // 2 if pairs else update.numel()
    block = _FLAT_BLOCK if words <= _MANY_WORDS else _WIDE_BLOCK
    into_words = into.view(torch.int32)
    _exchange[(triton.cdiv(words, block),)](
        update.view(torch.int32),
        into_words,
        into_words,
        into_words,
        peers.address_R,
        peers.state,
        words,
        0.0,
        peers.capacity,
        RANK=peers.rank,
        SIZE=peers.size,
        WORDS=block,
        BLOCK=block,
        WHOLE=words % block == 0,
        PAIRS=pairs,
        MODE=mode,
        num_warps=4 if block <= 1024 else 8,
        **options(update.device),
    )


@triton.jit
def push_words(words, at, inside, call, address_ptr, capacity, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write int32 `words` to places `at` of every other rank's buffer."""
    flagged = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    half = (call & 1).to(tl.int64) * SIZE * capacity
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(address_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.store(theirs + half + RANK * capacity + at, flagged, mask=inside)


@triton.jit
def await_words(source, at, inside, call, address_ptr, state_ptr, capacity, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The int32 words that rank `source` has written for this rank in this call; any after an abort."""
    half = (call & 1).to(tl.int64) * SIZE * capacity
    own = tl.load(address_ptr + RANK).to(tl.pointer_type(tl.int64)) + half + source * capacity + at
    here = call.to(tl.int64) << 32
    found = tl.load(own, mask=inside, other=here, volatile=True)
    missing = tl.max(((found >> 32).to(tl.int32) != call).to(tl.int32), 0)
    while missing != 0:
        found = tl.load(own, mask=inside, other=here, volatile=True)
        missing = tl.max(((found >> 32).to(tl.int32) != call).to(tl.int32), 0)
        missing = tl.where(tl.load(state_ptr + _ABORTED, volatile=True) != 0, 0, missing)
    return found.to(tl.int32)


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


@triton.jit(do_not_specialize=["num_words"])
def _exchange(
    update_ptr,
    into_ptr,
    weight_ptr,
    out_ptr,
    address_ptr,
    state_ptr,
    num_words,
    eps,
    capacity,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
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
    push_words(own, at, inside, call, address_ptr, capacity, RANK, SIZE)
    if MODE != 0:
        before = tl.load(into_ptr + at, mask=inside, other=0)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = own
        else:
            word = await_words(source, at, inside, call, address_ptr, state_ptr, capacity, RANK, SIZE)
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
