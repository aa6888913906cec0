"""Device functions of the filters' search: ranks and weights of tokens as `engine/filters.py` defines them, bisection.

A boundary is the last token kept: its rank and, among equals, its id. Owns no kernel but the last one of the search,
which finds the boundary among few candidates, or, if need be, over the whole row. Legend: V vocabulary, C candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from stretto.kernels.jit import kernel
from stretto.kernels.launch import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)
_HIGHEST_TEMPERATURE: tl.constexpr = tl.constexpr(2.0**60)
_WEIGHT_ONE: tl.constexpr = tl.constexpr(2.0**34)
_WHOLE_FROM: tl.constexpr = tl.constexpr(2.0**23)
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
_LAST_RANK: tl.constexpr = tl.constexpr(0x7F7FFFFF)
"""Of the largest finite distance: a token beyond it is impossible, kept or not."""
ALL: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Behind every rank, and every id."""

# What the passes have found of a row.
SEARCHING: tl.constexpr = tl.constexpr(0)
FEW: tl.constexpr = tl.constexpr(1)
EVERYTHING: tl.constexpr = tl.constexpr(2)


@triton.jit
def _precise_exp(x):
    # The function that torch calls on a GPU; Triton's own is faster and less exact, so that boundaries could differ.
    if _INTERPRETED:
        return tl.exp(x)
    else:  # noqa: RET505 - decided when the kernel is compiled
        return libdevice.exp(x)


@triton.jit
def _precise_log(x):
    if _INTERPRETED:
        return tl.log(x)
    else:  # noqa: RET505
        return libdevice.log(x)


@triton.jit
def token_ranks(x, best, temperature):
    """The bits of the float32 |best - x| / temperature: int32 that sort as the distances do."""
    distance = tl.abs(tl.div_rn(best - x, tl.minimum(temperature, _HIGHEST_TEMPERATURE)))
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def token_weights(rank):
    """Relative probabilities as whole numbers up to 2**34, halves rounded to even: int64."""
    # Behind infinity are NaNs, whose weight nobody uses, but which are no whole numbers either.
    distance = tl.minimum(rank, _INFINITY).to(tl.float32, bitcast=True)
    x = _precise_exp(-distance) * _WEIGHT_ONE
    # From 2**23 on every float32 is whole; below, this sum has no place for a fraction.
    return tl.where(x < _WHOLE_FROM, (x + _WHOLE_FROM) - _WHOLE_FROM, x).to(tl.int64)


@triton.jit
def target_mass(top_p, total):
    """The weight at which a prefix is large enough, at least 1 so that one token is always kept: int64."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def parameters(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY: tl.constexpr):
    """(temperature, is random, top-k, has one, top-p, has one, last rank that min-p keeps, searches) of a slot."""
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    is_random = temperature >= _GREEDY_BELOW
    has_top_k = (top_k > 0) & (top_k < VOCABULARY)
    has_top_p = top_p < 1.0
    min_p = tl.load(min_p_ptr + slot)
    farthest = tl.abs(tl.minimum(_precise_log(tl.where(min_p > 0.0, min_p, 1.0)), 0.0)).to(tl.int32, bitcast=True)
    last_rank = tl.where(min_p > 0.0, farthest, _LAST_RANK).to(tl.int64)
    return temperature, is_random, top_k, has_top_k, top_p, has_top_p, last_rank, is_random & (has_top_k | has_top_p)


@triton.jit
def row_best(maximum_ptr, row, stride, TILES: tl.constexpr):
    """The best logit of a row from those of its tiles."""
    g = tl.arange(0, triton.next_power_of_2(TILES))
    return tl.max(tl.load(maximum_ptr + row * stride + g, mask=g < TILES, other=float("-inf")), 0)


@triton.jit
def tile_ranks(data, tile, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """(ids, ranks) of a tile; behind the vocabulary's end ranks are those of impossible tokens.

    `data`: (logits, row, their stride, best logit, temperature).
    """
    logits_ptr, row, stride, best, temperature = data
    v = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * stride + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
    return v, token_ranks(x, best, temperature)


@triton.jit
def _prefix(
    last_rank, last_id, data, BY_COUNT: tl.constexpr, OVER_ROW: tl.constexpr,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Tokens, or weight, of what does not lie behind the boundary: int64.

    `data`: (ranks, ids, weights) of candidates, or what `tile_ranks` takes.
    """
    last_rank, last_id = last_rank.to(tl.int32), last_id.to(tl.int32)
    if OVER_ROW:
        total = tl.zeros([TILE], dtype=tl.int64)
        for tile in range(TILES):
            ids, rank = tile_ranks(data, tile, VOCABULARY, TILE)
            inside = (rank < last_rank) | ((rank == last_rank) & (ids <= last_id))
            if BY_COUNT:
                total += inside.to(tl.int64)
            else:
                total += tl.where(inside, token_weights(rank), 0)
        return tl.sum(total, 0)
    else:  # noqa: RET505
        rank, ids, weight = data
        return tl.sum(tl.where((rank < last_rank) | ((rank == last_rank) & (ids <= last_id)), weight, 0), 0)


@triton.jit
def _search(
    target, low, high, data, BY_COUNT: tl.constexpr, OVER_ROW: tl.constexpr,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The boundary (rank in [low, high], id; int64) of the smallest prefix whose weight reaches the target.

    A filter that came before needs no look: what it keeps is a prefix too, and reaches the target.
    """
    all_ids = low * 0 + ALL
    while low < high:
        middle = (low + high) >> 1
        reached = _prefix(middle, all_ids, data, BY_COUNT, OVER_ROW, VOCABULARY, TILE, TILES)
        low = tl.where(reached < target, middle + 1, low)
        high = tl.where(reached < target, high, middle)
    first = low * 0
    last = first + (VOCABULARY - 1)
    if not OVER_ROW:
        # Mostly the boundary's rank is one token's.
        rank, ids, _ = data
        equal = rank == low.to(tl.int32)
        first = tl.min(tl.where(equal, ids, ALL), 0).to(tl.int64)
        last = tl.max(tl.where(equal, ids, -1), 0).to(tl.int64)
    while first < last:
        middle = (first + last) >> 1
        reached = _prefix(low, middle, data, BY_COUNT, OVER_ROW, VOCABULARY, TILE, TILES)
        first = tl.where(reached < target, middle + 1, first)
        last = tl.where(reached < target, last, middle)
    return low, first


@kernel
def finish(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maximum_ptr,
    state_ptr,
    candidate_ptr,
    limit_ptr,
    last_ptr,
    logits_stride,
    maximum_stride,
    max_rows,
    PASSES: tl.constexpr,
    STATE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel, one program a row: the boundary, from what the passes have found and collected."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + row)
    temperature, is_random, _top_k, _has_top_k, top_p, has_top_p, last_rank, searches = parameters(
        slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY
    )
    last = last_rank * 0 + ALL
    limit = tl.where(searches | (is_random & (tl.load(min_p_ptr + slot) > 0.0)), last_rank, last)
    if searches:
        at = state_ptr + (PASSES * max_rows + row) * STATE
        low, high = tl.load(at), tl.load(at + 1)
        count_below, weight_below = tl.load(at + 2), tl.load(at + 3)
        target, by_count = tl.load(at + 4), tl.load(at + 5)
        found, size = tl.load(at + 6), tl.load(at + 7)
        if found == FEW:
            c = tl.arange(0, CANDIDATES)
            rank = tl.load(candidate_ptr + row * 2 * CANDIDATES + c, mask=c < size, other=ALL)
            ids = tl.load(candidate_ptr + (row * 2 + 1) * CANDIDATES + c, mask=c < size, other=ALL)
            low = tl.maximum(low, tl.min(rank, 0))
            high = tl.minimum(high, tl.max(tl.where(c < size, rank, 0), 0))
            if by_count != 0:
                data = (rank, ids, (c < size).to(tl.int64))
                limit, last = _search(target - count_below, low, high, data, True, False, VOCABULARY, TILE, TILES)
            if has_top_p:
                weight = tl.where(c < size, token_weights(rank), 0)
                if by_count != 0:
                    kept = (rank < limit) | ((rank == limit) & (ids <= last))
                    target = target_mass(top_p, tl.sum(tl.where(kept, weight, 0), 0))
                    high = limit
                limit, last = _search(
                    target - weight_below, low, high, (rank, ids, weight), False, False,
                    VOCABULARY, TILE, TILES
                )  # fmt: skip
        if found == SEARCHING:
            # More equal, or nearly equal, tokens than fit.
            best = row_best(maximum_ptr, row, maximum_stride, TILES)
            whole = (logits_ptr, row, logits_stride, best, temperature)
            if by_count != 0:
                limit, last = _search(target, low, high, whole, True, True, VOCABULARY, TILE, TILES)
            if has_top_p:
                if by_count != 0:
                    total = _prefix(limit, last, whole, False, True, VOCABULARY, TILE, TILES)
                    target = target_mass(top_p, total)
                    low = low * 0
                    high = limit
                limit, last = _search(target, low, high, whole, False, True, VOCABULARY, TILE, TILES)
    tl.store(limit_ptr + row, limit.to(tl.int32))
    tl.store(last_ptr + row, last.to(tl.int32))
