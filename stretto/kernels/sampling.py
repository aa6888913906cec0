"""Sampling in small kernels that read the logits in their own dtype: once and a block again, if no row has a filter.

The same choice as `engine/sampler.py` makes: argmax p / E with E = -log1p(-u), u from the counter-based numbers of
`engine/random.py`. The random bits are equal to the bit; exp and log differ in last bits, so a token could differ only
where two scores are that close; what a row gets depends, to the bit, on nothing but its own logits and parameters. The
arithmetic is `sampling_draw`'s, and which tokens filters keep `sampling_filters`'. Legend: S sampled rows, V
vocabulary, G blocks of it, P pieces of those, R slots, E stop ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options
from stretto.kernels.sampling_boundary import find_boundary, load_candidates
from stretto.kernels.sampling_draw import NO_ID, best_draw, best_reach, feed_back, first_best, token_scores
from stretto.kernels.sampling_filters import RowFilters, collect_candidates
from stretto.kernels.sampling_ranks import ALL, GREEDY_BELOW, STATE, is_within, parameters, token_ranks

_BLOCK = 4096
_PIECE = 64
_SCAN_WARPS = 4
_CHOOSE_WARPS = 8
_SEARCH_WARPS = 16
_FEW_WAYS = 4


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """What the kernels leave for each other, at fixed addresses."""

    maximum_SG: Tensor
    """float32: the largest logit of each block."""
    reach_SG: Tensor
    """float32: `sampling_draw.best_reach` of each block."""
    piece_maximum_SP: Tensor
    """float32: the largest logit of each piece, written where rows may have filters."""
    block: int
    """Tokens of a block."""
    piece: int
    """Tokens of a piece."""

    @classmethod
    def allocate(cls, max_rows: int, vocabulary: int, device: torch.device, *, block: int = _BLOCK) -> SampleScratch:
        """Room for `max_rows` rows of `vocabulary` logits. `block` (a power of two, 8 or more) changes no result."""
        blocks, piece = cdiv(vocabulary, block), min(block, _PIECE)
        return cls(
            torch.zeros(max_rows, blocks, dtype=torch.float32, device=device),
            torch.zeros(max_rows, blocks, dtype=torch.float32, device=device),
            torch.zeros(max_rows, blocks * (block // piece), dtype=torch.float32, device=device),
            block,
            piece,
        )


# hot path
def mask_stop_ids(
    logits_SV: Tensor, slot_S: Tensor, position_S: Tensor, min_position_R: Tensor, stop_ids_RE: Tensor
) -> None:
    """Set the logits of the stop tokens of rows still before their `min_position` to -inf, in place. Never blocks.

    Stop ids as in `engine.tables.DeviceTables`: padded with -1. A stop token whose logit is NaN or +inf keeps it, so
    that its row fails as it would without a mask.
    """
    ids = stop_ids_RE.shape[1]
    if ids:
        _mask_stop_ids[(logits_SV.shape[0],)](
            logits_SV,
            slot_S,
            position_S,
            min_position_R,
            stop_ids_RE,
            logits_SV.stride(0),
            stop_ids_RE.stride(0),
            VOCABULARY=logits_SV.shape[1],
            IDS=ids,
            IDS_PAD=next_power_of_2(ids),
            num_warps=1,
            **options(logits_SV.device),
        )


# hot path
def sample_rows(
    logits_SV: Tensor,
    slot_S: Tensor,
    position_S: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    token_ids_RL: Tensor,
    length_R: Tensor,
    tokens_S: Tensor,
    scratch: SampleScratch,
    *,
    greedy_only: bool = False,
    filters: RowFilters | None = None,
) -> None:
    """Choose a token for each row of logits (any float dtype), feed it back, advance the row's length. Never blocks.

    Writes `tokens_S` (int64; -1: the row failed, as in `engine.sampler.sample`), `token_ids[slot, position]` (0 for a
    failed row) and `length[slot] = position`. Rows of slot 0 are padding: only their `tokens_S` is written.
    `greedy_only`: the host knows that no row is random. Without `filters` it knows that no random row has any.
    """
    rows, vocabulary = logits_SV.shape
    block = scratch.block
    blocks = cdiv(vocabulary, block)
    launch = options(logits_SV.device)
    strides = (logits_SV.stride(0), scratch.maximum_SG.stride(0))
    is_filtered = filters is not None and not greedy_only
    scan[(blocks, rows)](
        logits_SV,
        slot_S,
        position_S,
        temperature_R,
        seed_R,
        scratch.maximum_SG,
        scratch.reach_SG,
        scratch.piece_maximum_SP,
        *strides,
        scratch.piece_maximum_SP.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=block,
        PIECE=scratch.piece,
        FIRST_ID=0,
        GREEDY_ONLY=greedy_only,
        FILTERED=is_filtered,
        num_warps=_SCAN_WARPS,
        **launch,
    )
    # Without filters nobody looks at these.
    asked: tuple[Tensor, ...] = (slot_S,) * 8
    candidates, few = 0, 0
    if filters is not None and is_filtered:
        collect_candidates(
            logits_SV,
            slot_S,
            temperature_R,
            filters,
            scratch.maximum_SG,
            block,
            scratch.piece_maximum_SP,
            scratch.piece,
        )
        found = filters.scratch
        asked = (filters.top_k_R, filters.top_p_R, filters.min_p_R, found.state_S, found.candidate_SC)
        asked += (found.few_SF, found.limit_S, found.last_S)
        candidates, few = found.candidate_SC.shape[1], found.few_SF.shape[1]
    _choose[(rows,)](
        logits_SV,
        slot_S,
        position_S,
        temperature_R,
        seed_R,
        scratch.maximum_SG,
        scratch.reach_SG,
        *asked,
        token_ids_RL,
        length_R,
        tokens_S,
        *strides,
        token_ids_RL.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=block,
        BLOCKS=blocks,
        BLOCKS_PAD=next_power_of_2(blocks),
        CANDIDATES=candidates,
        FEW=few,
        FEW_WAYS=_FEW_WAYS,
        GREEDY_ONLY=greedy_only,
        num_warps=_SEARCH_WARPS if is_filtered else _CHOOSE_WARPS,
        **launch,
    )


@kernel
def _mask_stop_ids(
    logits_ptr,
    slot_ptr,
    position_ptr,
    min_position_ptr,
    stop_ids_ptr,
    logits_stride,
    ids_stride,
    VOCABULARY: tl.constexpr,
    IDS: tl.constexpr,
    IDS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, IDS_PAD)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + row)
    if tl.load(position_ptr + row) < tl.load(min_position_ptr + slot):
        ids = tl.load(stop_ids_ptr + slot * ids_stride + e, mask=e < IDS, other=-1)
        is_id = (ids >= 0) & (ids < VOCABULARY)
        at = logits_ptr + row * logits_stride + ids
        # Neither NaN nor +inf is less than it.
        is_usable = tl.load(at, mask=is_id, other=float("inf")).to(tl.float32) < float("inf")
        tl.store(at, float("-inf"), mask=is_id & is_usable)


@kernel
def scan(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    maximum_ptr,
    reach_ptr,
    piece_maximum_ptr,
    logits_stride,
    stride,
    piece_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    FIRST_ID: tl.constexpr,
    GREEDY_ONLY: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel, one program a block of a row: the largest logits, and how far random rows' scores may reach."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    PIECES: tl.constexpr = BLOCK // PIECE
    p = tl.arange(0, PIECES)
    v = block * BLOCK + p[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if not GREEDY_ONLY:
        # Before the logits, so that nobody waits for these in turn.
        slot = tl.load(slot_ptr + row)
        position = tl.load(position_ptr + row)
        temperature = tl.load(temperature_ptr + slot)
        seed = tl.load(seed_ptr + slot)
    x = tl.load(logits_ptr + row * logits_stride + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
    # A NaN must not get lost in the maximum: it makes the row fail like an infinity does.
    x = tl.where(x != x, float("inf"), x)
    if FILTERED:
        piece_best = tl.max(x, 1)
        tl.store(piece_maximum_ptr + row * piece_stride + block * PIECES + p, piece_best)
        tl.store(maximum_ptr + row * stride + block, tl.max(piece_best, 0))
    else:
        tl.store(maximum_ptr + row * stride + block, tl.max(x))
    if not GREEDY_ONLY:  # noqa: SIM102 - the first is known when the kernel is compiled
        if temperature >= GREEDY_BELOW:
            reach = best_reach(x, temperature, seed, position, v + FIRST_ID)
            tl.store(reach_ptr + row * stride + block, reach)


@kernel
def _choose(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    maximum_ptr,
    reach_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    state_ptr,
    candidate_ptr,
    few_ptr,
    limit_ptr,
    last_ptr,
    token_ids_ptr,
    length_ptr,
    tokens_ptr,
    logits_stride,
    stride,
    token_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    FEW_WAYS: tl.constexpr,
    GREEDY_ONLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. `CANDIDATES` 0: no row has filters."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCKS_PAD)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + row)
    position = tl.load(position_ptr + row)
    maximum_G = tl.load(maximum_ptr + row * stride + g, mask=g < BLOCKS, other=float("-inf"))
    best = tl.max(maximum_G, 0)
    logits_ptr += row * logits_stride
    token = tl.full([], NO_ID, tl.int32)
    limit = tl.full([], ALL, tl.int64)
    last = limit
    is_random = False
    if not GREEDY_ONLY:
        temperature = tl.load(temperature_ptr + slot)
        is_random = temperature >= GREEDY_BELOW
    if is_random:
        if not GREEDY_ONLY:
            seed = tl.load(seed_ptr + slot)
            is_whole = False
            reach_G = tl.load(reach_ptr + row * stride + g, mask=g < BLOCKS, other=float("-inf"))
            if CANDIDATES > 0:
                _, top_k, has_top_k, top_p, has_top_p, last_rank, searches = parameters(
                    slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY
                )
                if tl.load(min_p_ptr + slot) > 0.0:
                    limit = last_rank.to(tl.int64)
                if searches:
                    limit, last, is_whole = find_boundary(
                        logits_ptr, best, temperature, top_k, has_top_k, top_p, has_top_p, last_rank,
                        state_ptr + row * STATE, candidate_ptr + row * CANDIDATES, few_ptr + row * FEW,
                        VOCABULARY, BLOCK, BLOCKS, CANDIDATES, FEW, FEW_WAYS
                    )  # fmt: skip
            if is_whole:
                if CANDIDATES > 0:
                    # All that may be drawn are candidates.
                    size = tl.load(state_ptr + row * STATE + 2)
                    c, rank, ids = load_candidates(candidate_ptr + row * CANDIDATES, size, CANDIDATES)
                    is_kept = is_within(rank, ids, limit.to(tl.int32), last.to(tl.int32)) & (c < size)
                    x = tl.load(logits_ptr + ids, mask=is_kept, other=float("-inf")).to(tl.float32)
                    score = tl.where(is_kept, token_scores(x, best, temperature, seed, position, ids), -1.0)
                    token = tl.min(tl.where(score == tl.max(score, 0), ids, NO_ID), 0)
            else:
                if CANDIDATES > 0:
                    is_near = token_ranks(maximum_G, best, temperature) <= limit.to(tl.int32)
                    reach_G = tl.where(is_near, reach_G, float("-inf"))
                token, _ = best_draw(
                    logits_ptr, reach_G, best, temperature, seed, position, limit.to(tl.int32), last.to(tl.int32),
                    CANDIDATES > 0, 0, VOCABULARY, BLOCK, BLOCKS_PAD
                )  # fmt: skip
    else:
        token = first_best(logits_ptr, maximum_G, best, 0, VOCABULARY, BLOCK, BLOCKS, BLOCKS_PAD)
    if CANDIDATES > 0:
        tl.store(limit_ptr + row, limit.to(tl.int32))
        tl.store(last_ptr + row, last.to(tl.int32))
    feed_back(token, best, row, slot, position, token_ids_ptr, length_ptr, tokens_ptr, token_stride)
