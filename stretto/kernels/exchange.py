"""Sums of tensors over the GPUs of one host, with the addition and the norm that follow, in one kernel.

The words go through `peer_buffers.py`; what no call holds is summed in pieces. All ranks add in the order of the ranks,
in float32: results are equal on all to the bit.

Legend: T rows, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options
from stretto.kernels.peer_buffers import (
    MOST_PROGRAMS,
    PeerBuffers,
    await_flagged,
    await_signalled,
    begin_call,
    end_call,
    push_flagged,
    push_signalled,
    take_piece,
    words_of,
)

_SUM, _ADD, _ADD_NORM = 0, 1, 2
_FLAT_BLOCK = 512
_WIDE_BLOCK = 2048
_MANY_WORDS = 2**16


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
    words = words_of(residual_TD) // rows
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
    words = words_of(update)
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
    if MODE == 2:
        weight = tl.load(weight_ptr + i, mask=i < WORDS, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    call = begin_call(state_ptr)
    piece = take_piece(state_ptr)
    at = piece * WORDS + i
    inside = i < WORDS
    if not WHOLE:
        inside = inside & (at < num_words)
    own = tl.load(update_ptr + at, mask=inside, other=0)
    if SIGNALLED:
        push_signalled(own, at, inside, call, piece, address_ptr, RANK, SIZE, FLAGGED, SIGNALLED, PROGRAMS)
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
            word = await_signalled(
                source, at, inside, call, piece, address_ptr, state_ptr, RANK, SIZE, FLAGGED, SIGNALLED, PROGRAMS
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
