"""Finds which tokens top-k, top-p and min-p keep, without a sort: the kept set of `engine/filters.py`, to the token.

The boundary of a kept set is found by selection over the ranks from a sample (Floyd, Rivest: "Expected time bounds for
selection", 1975), for top-p weighted by whole-number probabilities:

* `_bracket`: one program a row guesses, from the best token of each piece of the row and all tokens of some pieces, an
  interval of ranks that holds the boundary among few enough tokens.
* `_collect`: several programs a row read all its logits once: they add up the weights of all tokens and of those before
  the interval, and write down the interval's. All sums are of integers, so that neither their order nor the number of
  programs matters.
* `find_boundary` (`sampling_boundary.py`, in the kernel that draws) bisects among these, or, should the guess have been
  wrong or thousands be equal, over the row: slow, but as exact.

A row that asks for no filter costs programs that look at its parameters and end. Legend: S sampled rows, V vocabulary,
G tiles of it, P pieces of those, R slots, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, num_multiprocessors, options
from stretto.kernels.sampling_ranks import (
    STATE,
    has_quick_ranks,
    parameters,
    quick_ranks,
    row_best,
    split_weights,
    token_ranks,
    whole_weight,
)

_CANDIDATES = 8192
_SAMPLED_TOKENS = 16384
_PROGRAMS_PER_MULTIPROCESSOR = 8
_MAX_VOCABULARY = 1 << 18
"""Up to this, weights add up exactly in `engine/filters.py`."""
_COLLECT_TILE = 1024
_BRACKET_WARPS = 16
_COLLECT_WARPS = 4

_STEPS: tl.constexpr = tl.constexpr(20)
"""Bisections of a guess: ranks have 31 bits, of which a guess needs no more."""
_ZERO_FROM: tl.constexpr = tl.constexpr(0x41C40000)
"""The rank of a distance of 24.5, beyond which weights are 0."""
_MARGIN: tl.constexpr = tl.constexpr(500.0)
"""By so many tokens, and as many again as it keeps, the guess for a small set may be wrong."""


@dataclass(frozen=True, slots=True)
class FilterScratch:
    """What the kernels leave for each other, at fixed addresses, and the boundaries that they find."""

    limit_S: Tensor
    """int32: the rank of the last token kept; beyond any rank: no filter."""
    last_S: Tensor
    """int32: its id."""
    state_S: Tensor
    """int64, see `sampling_ranks.STATE`."""
    candidate_SC: Tensor
    """int64: rank, and in the lower half id."""
    few_SF: Tensor
    """The same of those of them that are left when there are only few."""
    programs: int
    """How many programs share the work, about."""
    sampled: int
    """How many tokens of a row are looked at for a guess, about."""

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        device: torch.device,
        *,
        candidates: int = _CANDIDATES,
        programs: int | None = None,
        sampled: int = _SAMPLED_TOKENS,
    ) -> FilterScratch:
        """Room for `max_rows` rows. `candidates` (a power of two), `programs`, `sampled` change speed, no result."""
        long, short = torch.int64, torch.int32
        return cls(
            limit_S=torch.zeros(max_rows, dtype=short, device=device),
            last_S=torch.zeros(max_rows, dtype=short, device=device),
            state_S=torch.zeros(max_rows, STATE.value, dtype=long, device=device),
            candidate_SC=torch.zeros(max_rows, candidates, dtype=long, device=device),
            few_SF=torch.zeros(max_rows, max(1, candidates // 8), dtype=long, device=device),
            programs=programs or _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device),
            sampled=sampled,
        )


@dataclass(frozen=True, slots=True)
class RowFilters:
    """The slots' filters, as `engine.tables.DeviceTables` holds them, and what their search works in."""

    top_k_R: Tensor
    """int64: 0 and less, or V and more, is off."""
    top_p_R: Tensor
    """float32 in (0, 1]: 1 is off."""
    min_p_R: Tensor
    """float32 in [0, 1]: 0 is off."""
    scratch: FilterScratch


# hot path
def collect_candidates(
    logits_SV: Tensor,
    slot_S: Tensor,
    temperature_R: Tensor,
    filters: RowFilters,
    maximum_SG: Tensor,
    tile: int,
    piece_maximum_SP: Tensor,
    piece: int,
) -> None:
    """Write into the scratch what `find_boundary` needs of the rows that ask for top-k or top-p. Never blocks.

    Logits of any float dtype; `maximum_SG` has the best of each `tile` of them, `piece_maximum_SP` of each `piece`. A
    row whose best logit is not finite gets numbers without meaning: it fails anyway. Raises ValueError if V is beyond
    2**18.
    """
    rows, vocabulary = logits_SV.shape
    if vocabulary > _MAX_VOCABULARY:
        raise ValueError(f"{vocabulary} tokens; probabilities are added up exactly up to {_MAX_VOCABULARY}")
    scratch = filters.scratch
    launch = options(logits_SV.device)
    tiles, pieces = cdiv(vocabulary, tile), cdiv(vocabulary, piece)
    inputs = (logits_SV, slot_S, temperature_R, filters.top_k_R, filters.top_p_R, filters.min_p_R, maximum_SG)
    strides = (logits_SV.stride(0), maximum_SG.stride(0))
    sizes = {"VOCABULARY": vocabulary, "TILES": tiles, "CANDIDATES": scratch.candidate_SC.shape[1]}
    _bracket[(rows,)](
        *inputs,
        piece_maximum_SP,
        scratch.state_S,
        *strides,
        piece_maximum_SP.stride(0),
        PIECE=piece,
        PIECES=pieces,
        SAMPLED=max(2, next_power_of_2(min(scratch.sampled // piece, pieces) // 2 + 1)),
        num_warps=_BRACKET_WARPS,
        **sizes,
        **launch,
    )
    collect_tile = min(tile, _COLLECT_TILE)
    collect_tiles = cdiv(vocabulary, collect_tile)
    parts = min(cdiv(scratch.programs, rows), collect_tiles)
    _collect[(parts, rows)](
        *inputs,
        scratch.state_S,
        scratch.candidate_SC,
        *strides,
        parts,
        COLLECT_TILE=collect_tile,
        COLLECT_TILES=collect_tiles,
        num_warps=_COLLECT_WARPS,
        **sizes,
        **launch,
    )


@triton.jit
def _bisected(low, high, is_less):
    """(low, high) of the next step of a bisection; `is_less`: what the middle gives is less than wanted."""
    middle = low + ((high - low) >> 1)
    return tl.where(is_less, tl.minimum(middle + 1, high), low), tl.where(is_less, high, middle)


@triton.jit
def _sampled_ranks(
    logits_ptr, first, best, temperature, VOCABULARY: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    SAMPLED: tl.constexpr
):  # fmt: skip
    """The ranks of the tokens of every other sampled piece, from the first or the second on."""
    s = tl.arange(0, SAMPLED // 2) * 2 + first
    v = (s * PIECES // SAMPLED)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x = tl.load(logits_ptr + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
    return tl.reshape(token_ranks(x, best, temperature), [SAMPLED // 2 * PIECE])


@triton.jit
def _weights(rank, last_rank):
    """Relative probabilities, roughly."""
    return tl.where(rank <= last_rank, tl.exp(-rank.to(tl.float32, bitcast=True)), 0.0)


@kernel
def _bracket(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maximum_ptr,
    piece_maximum_ptr,
    state_ptr,
    logits_stride,
    maximum_stride,
    piece_stride,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    SAMPLED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature, top_k, has_top_k, top_p, has_top_p, last_rank, searches = parameters(
        tl.load(slot_ptr + row), temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY
    )
    if searches:
        best = row_best(maximum_ptr, row, maximum_stride, TILES)
        logits_ptr += row * logits_stride
        rank = _sampled_ranks(logits_ptr, 0, best, temperature, VOCABULARY, PIECE, PIECES, SAMPLED)
        more_rank = _sampled_ranks(logits_ptr, 1, best, temperature, VOCABULARY, PIECE, PIECES, SAMPLED)
        each: tl.constexpr = PIECES / SAMPLED
        count = tl.minimum(top_k, VOCABULARY).to(tl.float32)
        if has_top_k == 0:
            # Most of the weight is that of the pieces' best tokens, all of which are known: the sample is to tell only
            # the rest, so that the best tokens of sampled pieces are taken off as often as these stand for others.
            weight, more_weight = _weights(rank, last_rank), _weights(more_rank, last_rank)
            p = tl.arange(0, triton.next_power_of_2(PIECES))
            known = tl.load(piece_maximum_ptr + row * piece_stride + p, mask=p < PIECES, other=float("-inf"))
            known_rank = token_ranks(known, best, temperature)
            sample = (p * SAMPLED + (PIECES - 1)) // PIECES
            is_sampled = (sample * PIECES // SAMPLED == p) & (sample < SAMPLED)
            known_weight = _weights(known_rank, last_rank) * tl.where(is_sampled, 1.0 - each, 1.0)
            target = top_p * (tl.sum(weight + more_weight, 0) * each + tl.sum(known_weight, 0))
            low = last_rank * 0
            high = tl.minimum(last_rank, _ZERO_FROM)
            for _ in range(_STEPS):
                middle = low + ((high - low) >> 1)
                inside = tl.where(rank <= middle, weight, 0.0) + tl.where(more_rank <= middle, more_weight, 0.0)
                reached = tl.sum(inside, 0) * each
                reached += tl.sum(tl.where(known_rank <= middle, known_weight, 0.0), 0)
                low, high = _bisected(low, high, reached < target)
            # Counted among those that the ends are looked for in, so that what is odd about them cancels.
            count = tl.sum((rank <= high).to(tl.int32), 0).to(tl.float32) * (2 * each)
        # Half of the interval. With half of the candidates they would be too many if the sample is a little off.
        half = tl.minimum(count + _MARGIN, CANDIDATES * 3 // 8)
        # For its ends every other piece of the sample will do.
        least = ((count - half) / (2 * each)).to(tl.int32)
        most = ((count + half) / (2 * each)).to(tl.int32) + 1
        low = last_rank * 0
        low_end = last_rank
        high = last_rank * 0
        high_end = last_rank
        for _ in range(_STEPS):
            low_middle = low + ((low_end - low) >> 1)
            high_middle = high + ((high_end - high) >> 1)
            both = tl.sum((rank <= low_middle).to(tl.int32) + ((rank <= high_middle).to(tl.int32) << 16), 0)
            low, low_end = _bisected(low, low_end, (both & 0xFFFF) < least)
            high, high_end = _bisected(high, high_end, (both >> 16) < most)
        # The mass of which top-p takes its part is that of all that top-k keeps.
        low = tl.where((least <= 0) | (has_top_k & has_top_p), 0, low)
        state_ptr += row * STATE
        tl.store(state_ptr, low.to(tl.int64))
        tl.store(state_ptr + 1, high_end.to(tl.int64))
        tl.store(state_ptr + 2 + tl.arange(0, 4), tl.zeros([4], tl.int64))


@kernel(do_not_specialize=["parts"])
def _collect(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maximum_ptr,
    state_ptr,
    candidate_ptr,
    logits_stride,
    maximum_stride,
    parts,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    COLLECT_TILE: tl.constexpr,
    COLLECT_TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature, _top_k, has_top_k, _top_p, has_top_p, last_rank, searches = parameters(
        tl.load(slot_ptr + row), temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY
    )
    if searches:
        best = row_best(maximum_ptr, row, maximum_stride, TILES)
        state_ptr += row * STATE
        candidate_ptr += row * CANDIDATES
        low, high = tl.load(state_ptr).to(tl.int32), tl.load(state_ptr + 1).to(tl.int32)
        has_mass = has_top_p & (has_top_k == 0)
        is_quick = has_quick_ranks(best, temperature)
        inverse = tl.div_rn(tl.full([], 1.0, tl.float32), temperature)
        # Sums of each thread's 8 tokens: registers enough for ten programs on a multiprocessor.
        WIDTH: tl.constexpr = 8
        LANES: tl.constexpr = COLLECT_TILE // WIDTH
        t = tl.arange(0, LANES)
        i = tl.arange(0, WIDTH)
        coarse_T = tl.zeros([LANES], tl.int32)
        fine_T = tl.zeros([LANES], tl.int32)
        coarse_below_T = tl.zeros([LANES], tl.int32)
        fine_below_T = tl.zeros([LANES], tl.int32)
        count_below_T = tl.zeros([LANES], tl.int32)
        share = (COLLECT_TILES + parts - 1) // parts
        begin = part * share
        end = tl.minimum(begin + share, COLLECT_TILES)
        for tile in range(begin, end):
            v = tile * COLLECT_TILE + t[:, None] * WIDTH + i[None, :]
            x = tl.load(logits_ptr + row * logits_stride + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
            if is_quick:  # noqa: SIM108 - not an expression in a kernel
                rank = quick_ranks(x, best, temperature, inverse)
            else:
                rank = token_ranks(x, best, temperature)
            is_below = rank < low
            count_below_T += tl.sum(is_below.to(tl.int32), 1)
            if has_mass:
                coarse, fine = split_weights(rank, last_rank)
                coarse_T += tl.sum(coarse, 1)
                fine_T += tl.sum(fine, 1)
                coarse_below_T += tl.sum(tl.where(is_below, coarse, 0), 1)
                fine_below_T += tl.sum(tl.where(is_below, fine, 0), 1)
            # In whichever order the threads come here, they leave the same set, and no more is asked.
            is_wanted = ((rank >= low) & (rank <= high)).to(tl.int32)
            count_T = tl.sum(is_wanted, 1)
            taken_T = tl.atomic_add(state_ptr + 2 + t * 0, count_T.to(tl.int64), mask=count_T > 0, sem="relaxed")
            place_T = taken_T.to(tl.int32)
            key = (rank.to(tl.int64) << 32) | v.to(tl.int64)
            for column in tl.static_range(WIDTH):
                is_here_T = tl.sum(tl.where(i[None, :] == column, is_wanted, 0), 1)
                key_T = tl.sum(tl.where(i[None, :] == column, key, 0), 1)
                tl.store(candidate_ptr + place_T, key_T, mask=(is_here_T > 0) & (place_T < CANDIDATES))
                place_T += is_here_T
        if has_mass:
            count = tl.maximum(end - begin, 0) * WIDTH
            total = tl.sum(whole_weight(coarse_T, fine_T, count), 0)
            below = tl.sum(whole_weight(coarse_below_T, fine_below_T, count_below_T), 0)
            tl.atomic_add(state_ptr + 3, total, sem="relaxed")
            tl.atomic_add(state_ptr + 4, below, sem="relaxed")
        tl.atomic_add(state_ptr + 5, tl.sum(count_below_T, 0).to(tl.int64), sem="relaxed")
