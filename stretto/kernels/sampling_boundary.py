"""Device functions of the filters' search: bisection among a row's candidates, or, if need be, over the whole row.

A boundary is the last token kept: its rank and, among equals, its id. Owns no kernel: `find_boundary` is the last step
of the search, in the kernel that draws. Legend: V vocabulary, C candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stretto.kernels.sampling_ranks import ALL, is_within, token_ranks, token_weights

_ALL_KEYS: tl.constexpr = tl.constexpr(0x7FFFFFFF7FFFFFFF)
_COUNT_SHIFT: tl.constexpr = tl.constexpr(48)
_ONE_TOKEN: tl.constexpr = tl.constexpr(1 << 48)


@triton.jit
def _target_mass(top_p, total):
    """The weight at which a prefix is large enough, at least 1 so that one token is always kept: int64."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _row_prefix(
    limit, last, logits_ptr, best, temperature, BY_COUNT: tl.constexpr,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Tokens of a row, or their weight, that do not lie behind the boundary: int64."""
    limit, last = limit.to(tl.int32), last.to(tl.int32)
    total = tl.zeros([TILE], dtype=tl.int64)
    for tile in range(TILES):
        v = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
        rank = token_ranks(x, best, temperature)
        is_inside = is_within(rank, v, limit, last)
        if BY_COUNT:
            total += is_inside.to(tl.int64)
        else:
            total += tl.where(is_inside, token_weights(rank), 0)
    return tl.sum(total, 0)


@triton.jit
def _search_row(
    target, high, logits_ptr, best, temperature, BY_COUNT: tl.constexpr,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The boundary (rank up to `high`, id; int64) of the smallest prefix whose weight reaches the target.

    If none does, that of all up to `high`. A filter that came before needs no look: what it keeps is a prefix too, and
    reaches the target.
    """
    low = high * 0
    while low < high:
        middle = (low + high) >> 1
        reached = _row_prefix(middle, low * 0 + ALL, logits_ptr, best, temperature, BY_COUNT, VOCABULARY, TILE, TILES)
        low = tl.where(reached < target, middle + 1, low)
        high = tl.where(reached < target, high, middle)
    first = low * 0
    last = first + (VOCABULARY - 1)
    while first < last:
        middle = (first + last) >> 1
        reached = _row_prefix(low, middle, logits_ptr, best, temperature, BY_COUNT, VOCABULARY, TILE, TILES)
        first = tl.where(reached < target, middle + 1, first)
        last = tl.where(reached < target, last, middle)
    return low, first


@triton.jit
def _least_reaching(target, low, high, values, weight, WAYS: tl.constexpr):
    """The least number in [low, high] up to which `values` weigh at least `target` together; `high` if none is."""
    if WAYS == 2:
        while low < high:
            middle = (low + high) >> 1
            is_less = tl.sum(tl.where(values <= middle.to(tl.int32), weight, 0), 0) < target
            low = tl.where(is_less, middle + 1, low)
            high = tl.where(is_less, high, middle)
    else:
        i = tl.arange(0, WAYS) + 1
        while low < high:
            middle_I = low + ((high - low) * i) // WAYS
            reached_I = tl.sum(tl.where(values[:, None] <= middle_I.to(tl.int32)[None, :], weight[:, None], 0), 0)
            part = tl.minimum(tl.sum((reached_I < target).to(tl.int64), 0), WAYS - 1)
            width = high - low
            high = low + (width * (part + 1)) // WAYS
            low = tl.where(part > 0, low + (width * part) // WAYS + 1, low)
    return low


@triton.jit
def _search(target, low, high, rank, ids, weight, WAYS: tl.constexpr):
    """`_search_row` among candidates, for a boundary in [low, high]."""
    low = _least_reaching(target, low, high, rank, weight, WAYS)
    # Mostly the boundary's rank is one token's.
    is_equal = rank == low.to(tl.int32)
    first = tl.min(tl.where(is_equal, ids, ALL), 0).to(tl.int64)
    last = tl.max(tl.where(is_equal, ids, -1), 0).to(tl.int64)
    if first < last:
        target -= tl.sum(tl.where(rank < low.to(tl.int32), weight, 0), 0)
        first = _least_reaching(target, first, last, ids, tl.where(is_equal, weight, 0), WAYS)
    return low, first


@triton.jit
def load_candidates(candidate_ptr, size, CANDIDATES: tl.constexpr):
    """(place, rank, id) of a row's candidates, behind everything where there are fewer."""
    c = tl.arange(0, CANDIDATES)
    key = tl.load(candidate_ptr + c, mask=c < size, other=_ALL_KEYS)
    return c, (key >> 32).to(tl.int32), (key & ALL).to(tl.int32)


@triton.jit
def _search_candidates(
    candidate_ptr, size, high, has_last, weight_below, count_below, total, top_k, has_top_k, top_p, has_top_p,
    CANDIDATES: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """(rank, id) int64 of the last token kept, and whether it is among the candidates or, with `has_last`, behind all.

    `high`: the largest rank that they could have.
    """
    c, rank, ids = load_candidates(candidate_ptr, size, CANDIDATES)
    first = tl.minimum(tl.min(rank, 0).to(tl.int64), high)
    high = tl.maximum(tl.max(tl.where(c < size, rank, 0), 0).to(tl.int64), first)
    limit = high
    last = high * 0 + ALL
    is_found = size <= CANDIDATES
    if has_top_k:
        is_found = is_found & (count_below < top_k) & (has_last | (top_k <= count_below + size))
        if is_found:
            limit, last = _search(top_k - count_below, first, high, rank, ids, (c < size).to(tl.int64), WAYS)
    if is_found & has_top_p:
        weight = tl.where(c < size, token_weights(rank), 0)
        if has_top_k:
            # Here the candidates begin with the best token.
            high = limit
            total = tl.sum(tl.where(is_within(rank, ids, limit.to(tl.int32), last.to(tl.int32)), weight, 0), 0)
        target = _target_mass(top_p, total)
        reaches = has_top_k | has_last | (target <= weight_below + tl.sum(weight, 0))
        is_found = (weight_below < target) & reaches
        if is_found:
            limit, last = _search(target - weight_below, first, high, rank, ids, weight, WAYS)
    return limit, last, is_found


@triton.jit
def _narrow(
    candidate_ptr, few_ptr, size, high, weight_below, count_below, total, top_k, has_top_k, top_p,
    CANDIDATES: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """Bisect until few candidates are left, and write these down: a step among few takes less than half of the time.

    (Whether it did, how many they are, the largest rank, the weight and the number of the tokens before them.) Only for
    one filter: with both, all tokens up to top-k's boundary are needed.
    """
    c, rank, ids = load_candidates(candidate_ptr, size, CANDIDATES)
    weight = tl.where(c < size, token_weights(rank), 0)
    target = _target_mass(top_p, total) - weight_below
    if has_top_k:
        weight = (c < size).to(tl.int64)
        target = top_k - count_below
    # Weights add up to 2**47 at most: counts go above, so that one sum adds up both.
    weight += tl.where(c < size, _ONE_TOKEN, 0)
    low = tl.min(rank, 0).to(tl.int64)
    largest = tl.max(tl.where(c < size, rank, 0), 0).to(tl.int64)
    before = low * 0
    upto = tl.sum(weight, 0)
    while (low < largest) & ((upto >> _COUNT_SHIFT) - (before >> _COUNT_SHIFT) > FEW):
        middle = (low + largest) >> 1
        both = tl.sum(tl.where(rank <= middle.to(tl.int32), weight, 0), 0)
        is_less = (both & (_ONE_TOKEN - 1)) < target
        low = tl.where(is_less, middle + 1, low)
        before = tl.where(is_less, both, before)
        largest = tl.where(is_less, largest, middle)
        upto = tl.where(is_less, upto, both)
    left = (upto >> _COUNT_SHIFT) - (before >> _COUNT_SHIFT)
    is_few = left <= FEW
    if is_few:
        is_left = ((rank >= low.to(tl.int32)) & (rank <= largest.to(tl.int32))).to(tl.int32)
        place = tl.cumsum(is_left, 0) - 1
        tl.store(few_ptr + place, (rank.to(tl.int64) << 32) | ids.to(tl.int64), mask=(is_left > 0) & (place < FEW))
        tl.debug_barrier()  # before threads read what others have written
        high = largest
        size = left
        count_below += before >> _COUNT_SHIFT
        if has_top_k == 0:
            weight_below += before & (_ONE_TOKEN - 1)
    return is_few, size, high, weight_below, count_below


@triton.jit
def find_boundary(
    logits_ptr, best, temperature, top_k, has_top_k, top_p, has_top_p, last_rank, state_ptr, candidate_ptr, few_ptr,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr, FEW: tl.constexpr,
    FEW_WAYS: tl.constexpr
):  # fmt: skip
    """(rank, id) int64 of the last token that a row's filters keep, and whether it and all before it are candidates."""
    low, high = tl.load(state_ptr), tl.load(state_ptr + 1)
    size, total = tl.load(state_ptr + 2), tl.load(state_ptr + 3)
    weight_below, count_below = tl.load(state_ptr + 4), tl.load(state_ptr + 5)
    last_rank = last_rank.to(tl.int64)
    has_last = high == last_rank
    is_few = size <= FEW
    few_ptr = tl.where(is_few, candidate_ptr, few_ptr)
    if (is_few == 0) & (size <= CANDIDATES) & ((has_top_k & has_top_p) == 0):
        is_few, size, high, weight_below, count_below = _narrow(
            candidate_ptr, few_ptr, size, high, weight_below, count_below, total, top_k, has_top_k, top_p,
            CANDIDATES, FEW
        )  # fmt: skip
    if is_few:
        limit, last, is_found = _search_candidates(
            few_ptr, size, high, has_last, weight_below, count_below, total, top_k, has_top_k, top_p, has_top_p,
            FEW, FEW_WAYS
        )  # fmt: skip
    else:
        limit, last, is_found = _search_candidates(
            candidate_ptr, size, high, has_last, weight_below, count_below, total, top_k, has_top_k, top_p, has_top_p,
            CANDIDATES, 2
        )  # fmt: skip
    if is_found == 0:
        # The sample has misled, or more equal tokens, or nearly equal ones, are candidates than fit.
        low = low * 0
        limit = last_rank
        last = low + ALL
        if has_top_k:
            limit, last = _search_row(top_k, limit, logits_ptr, best, temperature, True, VOCABULARY, TILE, TILES)
            if has_top_p:
                total = _row_prefix(limit, last, logits_ptr, best, temperature, False, VOCABULARY, TILE, TILES)
        if has_top_p:
            target = _target_mass(top_p, total)
            limit, last = _search_row(target, limit, logits_ptr, best, temperature, False, VOCABULARY, TILE, TILES)
    return limit, last, (is_found != 0) & (low == 0)
