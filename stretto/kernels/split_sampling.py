"""Sampling from logits of which every rank of a host has a part: ranks exchange candidates, never the logits.

The tokens are, to the bit, those that `kernels/sampling.py` chooses from the whole logits of rows without filters: the
ranks first agree on each row's largest logit, which all scores are relative to, and then on the best score. Both are
exchanged inside the kernels (`exchange.py`), two words a row each time. Legend: S sampled rows, v the rank's part of
the vocabulary, G blocks of it, R slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options
from stretto.kernels.peer_buffers import PeerBuffers, await_flagged, begin_call, end_call, push_flagged, take_piece
from stretto.kernels.sampling import SampleScratch, scan
from stretto.kernels.sampling_draw import best_draw, feed_back, first_best
from stretto.kernels.sampling_ranks import GREEDY_BELOW, row_best


@dataclass(frozen=True, slots=True)
class AgreedMaxima:
    """What the ranks agree on before they draw, and what each would choose, at fixed addresses."""

    maximum_S: Tensor
    """float32: the largest logit of all ranks'."""
    own_S: Tensor
    """float32: this rank's largest logit of a greedy row, and its best score of a random one."""
    own_id_S: Tensor
    """int32: the token that has it."""

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> AgreedMaxima:
        """Room for `max_rows` rows."""
        return cls(
            torch.zeros(max_rows, dtype=torch.float32, device=device),
            torch.zeros(max_rows, dtype=torch.float32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )


# hot path
def sample_split_rows(
    logits_Sv: Tensor,
    token_ids: range,
    slot_S: Tensor,
    position_S: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    token_ids_RL: Tensor,
    length_R: Tensor,
    tokens_S: Tensor,
    scratch: SampleScratch,
    agreed: AgreedMaxima,
    peers: PeerBuffers,
) -> None:
    """`sampling.sample_rows` without filters, of logits whose first columns are those of `token_ids`. Never blocks.

    Columns behind them are padding. Every rank makes the same call, with its own ids.
    """
    rows = logits_Sv.shape[0]
    blocks = cdiv(max(1, len(token_ids)), scratch.block)
    launch = options(logits_Sv.device)
    strides = (logits_Sv.stride(0), scratch.maximum_SG.stride(0))
    inputs = (logits_Sv, slot_S, position_S, temperature_R, seed_R)
    columns = {"FIRST_ID": token_ids.start, "VOCABULARY": len(token_ids), "BLOCK": scratch.block}
    world = {"RANK": peers.rank, "SIZE": peers.size, "FLAGGED": peers.flagged}
    scan[(blocks, rows)](
        *inputs,
        scratch.maximum_SG,
        scratch.reach_SG,
        scratch.piece_maximum_SP,
        *strides,
        scratch.piece_maximum_SP.stride(0),
        PIECE=scratch.piece,
        GREEDY_ONLY=False,
        FILTERED=False,
        num_warps=4,
        **columns,
        **launch,
    )
    _agree_on_maxima[(rows,)](
        scratch.maximum_SG,
        agreed.maximum_S,
        peers.address_R,
        peers.state,
        scratch.maximum_SG.stride(0),
        BLOCKS=blocks,
        num_warps=1,
        **world,
        **launch,
    )
    _choose_own[(rows,)](
        *inputs,
        scratch.maximum_SG,
        scratch.reach_SG,
        agreed.maximum_S,
        agreed.own_S,
        agreed.own_id_S,
        *strides,
        BLOCKS=blocks,
        BLOCKS_PAD=next_power_of_2(blocks),
        num_warps=8,
        **columns,
        **launch,
    )
    _agree_on_tokens[(rows,)](
        slot_S,
        position_S,
        agreed.maximum_S,
        agreed.own_S,
        agreed.own_id_S,
        token_ids_RL,
        length_R,
        tokens_S,
        peers.address_R,
        peers.state,
        token_ids_RL.stride(0),
        num_warps=1,
        **world,
        **launch,
    )


@triton.jit
def _best_of_ranks(
    value, token, row, address_ptr, state_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, FLAGGED: tl.constexpr
):
    """The largest of all ranks' float32 values, and the lowest of the ids that come with it."""
    call = begin_call(state_ptr)
    i = tl.arange(0, 2)
    inside = i < 2
    own = tl.where(i == 0, value.to(tl.int32, bitcast=True), token)
    at = row * 2 + i
    push_flagged(own, at, inside, call, address_ptr, RANK, SIZE, FLAGGED)
    for source in tl.static_range(SIZE):
        if source != RANK:
            words = await_flagged(source, at, inside, call, address_ptr, state_ptr, RANK, SIZE, FLAGGED)
            their_value = tl.sum(tl.where(i == 0, words, 0), 0).to(tl.float32, bitcast=True)
            their_token = tl.sum(tl.where(i == 1, words, 0), 0)
            better = (their_value > value) | ((their_value == value) & (their_token < token))
            value = tl.where(better, their_value, value)
            token = tl.where(better, their_token, token)
    end_call(state_ptr, call)
    return value, token


@kernel
def _agree_on_maxima(
    maximum_ptr,
    agreed_ptr,
    address_ptr,
    state_ptr,
    stride,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = take_piece(state_ptr).to(tl.int64)
    best = row_best(maximum_ptr, row, stride, BLOCKS)
    best, _ = _best_of_ranks(best, 0, row, address_ptr, state_ptr, RANK, SIZE, FLAGGED)
    tl.store(agreed_ptr + row, best)


@kernel
def _choose_own(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    maximum_ptr,
    reach_ptr,
    agreed_ptr,
    own_ptr,
    own_id_ptr,
    logits_stride,
    stride,
    FIRST_ID: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCKS_PAD)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    logits_ptr += row * logits_stride
    if temperature >= GREEDY_BELOW:
        reach_G = tl.load(reach_ptr + row * stride + g, mask=g < BLOCKS, other=float("-inf"))
        token, own = best_draw(
            logits_ptr, reach_G, tl.load(agreed_ptr + row), temperature, tl.load(seed_ptr + slot),
            tl.load(position_ptr + row), 0, 0, False, FIRST_ID, VOCABULARY, BLOCK, BLOCKS_PAD
        )  # fmt: skip
    else:
        maximum_G = tl.load(maximum_ptr + row * stride + g, mask=g < BLOCKS, other=float("-inf"))
        own = tl.max(maximum_G, 0)
        token = first_best(logits_ptr, maximum_G, own, FIRST_ID, VOCABULARY, BLOCK, BLOCKS, BLOCKS_PAD)
    tl.store(own_ptr + row, own)
    tl.store(own_id_ptr + row, token)


@kernel
def _agree_on_tokens(
    slot_ptr,
    position_ptr,
    agreed_ptr,
    own_ptr,
    own_id_ptr,
    token_ids_ptr,
    length_ptr,
    tokens_ptr,
    address_ptr,
    state_ptr,
    token_stride,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = take_piece(state_ptr).to(tl.int64)
    own, token = tl.load(own_ptr + row), tl.load(own_id_ptr + row)
    _, token = _best_of_ranks(own, token, row, address_ptr, state_ptr, RANK, SIZE, FLAGGED)
    best = tl.load(agreed_ptr + row)
    slot, position = tl.load(slot_ptr + row), tl.load(position_ptr + row)
    feed_back(token, best, row, slot, position, token_ids_ptr, length_ptr, tokens_ptr, token_stride)
