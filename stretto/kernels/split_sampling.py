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

from stretto.kernels.exchange import PeerBuffers, await_flagged, begin_call, end_call, push_flagged
from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options
from stretto.kernels.sampling import _GREEDY_BELOW, _HIGHEST_TEMPERATURE, SampleScratch, _row_maxima, exponential

_NO_ID: tl.constexpr = tl.constexpr(2147483647)


@dataclass(frozen=True, slots=True)
class AgreedMaxima:
    """What the ranks agree on before they draw, at fixed addresses."""

    maximum_S: Tensor
    """float32: the largest logit."""
    id_S: Tensor
    """int32: the first token that has it."""

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> AgreedMaxima:
        """Room for `max_rows` rows."""
        return cls(
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
    block = scratch.block
    blocks = cdiv(max(1, len(token_ids)), block)
    blocks_pad = next_power_of_2(blocks)
    launch = options(logits_Sv.device)
    stride = scratch.maximum_SG.stride(0)
    _row_maxima[(blocks, rows)](
        logits_Sv,
        scratch.maximum_SG,
        scratch.maximum_id_SG,
        logits_Sv.stride(0),
        stride,
        VOCABULARY=len(token_ids),
        BLOCK=block,
        num_warps=8,
        **launch,
    )
    _agree_on_maxima[(rows,)](
        scratch.maximum_SG,
        scratch.maximum_id_SG,
        agreed.maximum_S,
        agreed.id_S,
        peers.address_R,
        peers.state,
        stride,
        FIRST_ID=token_ids.start,
        BLOCKS=blocks,
        BLOCKS_PAD=blocks_pad,
        RANK=peers.rank,
        SIZE=peers.size,
        FLAGGED=peers.flagged,
        num_warps=1,
        **launch,
    )
    _draw_part[(blocks, rows)](
        logits_Sv,
        slot_S,
        position_S,
        temperature_R,
        seed_R,
        agreed.maximum_S,
        scratch.score_SG,
        scratch.score_id_SG,
        logits_Sv.stride(0),
        stride,
        FIRST_ID=token_ids.start,
        TOKENS=len(token_ids),
        BLOCK=block,
        num_warps=8,
        **launch,
    )
    _agree_on_draws[(rows,)](
        slot_S,
        position_S,
        temperature_R,
        agreed.maximum_S,
        agreed.id_S,
        scratch.score_SG,
        scratch.score_id_SG,
        token_ids_RL,
        length_R,
        tokens_S,
        peers.address_R,
        peers.state,
        stride,
        token_ids_RL.stride(0),
        BLOCKS=blocks,
        BLOCKS_PAD=blocks_pad,
        RANK=peers.rank,
        SIZE=peers.size,
        FLAGGED=peers.flagged,
        num_warps=1,
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
    maximum_id_ptr,
    agreed_maximum_ptr,
    agreed_id_ptr,
    address_ptr,
    state_ptr,
    stride,
    FIRST_ID: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS_PAD)
    inside = b < BLOCKS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(maximum_ptr + row * stride + b, mask=inside, other=float("-inf"))
    ids = tl.load(maximum_id_ptr + row * stride + b, mask=inside, other=0) + FIRST_ID
    best = tl.max(value, 0)
    token = tl.min(tl.where((value == best) & inside, ids, _NO_ID), 0)
    best, token = _best_of_ranks(best, token, row, address_ptr, state_ptr, RANK, SIZE, FLAGGED)
    tl.store(agreed_maximum_ptr + row, best)
    tl.store(agreed_id_ptr + row, token)


@kernel
def _draw_part(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    agreed_maximum_ptr,
    score_ptr,
    score_id_ptr,
    logits_stride,
    stride,
    FIRST_ID: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    v = block * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    if temperature >= _GREEDY_BELOW:
        # The scores of sampling.py's `_draw`, which must be equal to the bit.
        best = tl.load(agreed_maximum_ptr + row)
        x = tl.load(logits_ptr + row * logits_stride + v, mask=v < TOKENS, other=float("-inf")).to(tl.float32)
        distance = tl.abs((best - x) * (1.0 / tl.minimum(temperature, _HIGHEST_TEMPERATURE)))
        noise = exponential(tl.load(seed_ptr + slot), tl.load(position_ptr + row), v + FIRST_ID)
        score = tl.exp(-distance) / noise
        score = tl.where((v < TOKENS) & (score == score), score, -1.0)
        top = tl.max(score, 0)
        tl.store(score_ptr + row * stride + block, top)
        tl.store(score_id_ptr + row * stride + block, tl.min(tl.where(score == top, v + FIRST_ID, _NO_ID), 0))


@kernel
def _agree_on_draws(
    slot_ptr,
    position_ptr,
    temperature_ptr,
    agreed_maximum_ptr,
    agreed_id_ptr,
    score_ptr,
    score_id_ptr,
    token_ids_ptr,
    length_ptr,
    tokens_ptr,
    address_ptr,
    state_ptr,
    stride,
    token_stride,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS_PAD)
    inside = b < BLOCKS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + row)
    position = tl.load(position_ptr + row)
    # Of a greedy row these are left over from others; the exchange is made all the same, so that calls stay alike.
    score = tl.load(score_ptr + row * stride + b, mask=inside, other=-1.0)
    drawn = tl.load(score_id_ptr + row * stride + b, mask=inside, other=_NO_ID)
    top = tl.max(score, 0)
    token = tl.min(tl.where((score == top) & inside, drawn, _NO_ID), 0)
    top, token = _best_of_ranks(top, token, row, address_ptr, state_ptr, RANK, SIZE, FLAGGED)
    if tl.load(temperature_ptr + slot) < _GREEDY_BELOW:
        token = tl.load(agreed_id_ptr + row)
    best = tl.load(agreed_maximum_ptr + row)
    usable = (best < float("inf")) & (best > float("-inf"))
    tl.store(tokens_ptr + row, tl.where(usable, token, -1).to(tl.int64))
    if slot != 0:
        tl.store(token_ids_ptr + slot * token_stride + position, tl.where(usable, token, 0).to(tl.int64))
        tl.store(length_ptr + slot, position)
