"""Finds which tokens top-k, top-p and min-p keep, without a sort: the kept set of `engine/filters.py`, to the token.

The boundary of a kept set is found by selection over the ranks (Blum, Floyd, Pratt, Rivest, Tarjan: "Time bounds for
selection", 1973; with many pivots at once: Alabi, Blanchard, Gordon, Steinbach: "Fast k-selection algorithms for
graphics processing units", 2012), for top-p weighted by whole-number probabilities:

* `_narrow`, `PASSES` times: 16 pivots cut the interval of ranks that holds the boundary; several programs a row count,
  and weigh, the tokens up to each. All sums are of integers, so neither their order nor the number of programs matters.
* `_collect` writes down the tokens of the interval, if they are few enough for one program's registers.
* `finish` (`sampling_boundary.py`) bisects among them, or over the row, should thousands be equal.

A row that asks for no filter costs programs that look at its parameters and end. Legend: S sampled rows, V vocabulary,
G tiles of it, R slots, Q pivots, P parts of rows, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, num_multiprocessors, options
from stretto.kernels.sampling_boundary import (
    EVERYTHING,
    FEW,
    SEARCHING,
    finish,
    parameters,
    row_best,
    target_mass,
    tile_ranks,
    token_ranks,
    token_weights,
)

_CANDIDATES = 4096
_PASSES = 3
_MAX_PARTS = 64
_MAX_VOCABULARY = 1 << 18
"""Up to this, weights add up exactly in `engine/filters.py`."""

_PIVOTS: tl.constexpr = tl.constexpr(16)
_STATE: tl.constexpr = tl.constexpr(8 + 16)
"""Of a row before a pass: what `_interval` gives, and the pass's pivots."""
_COUNT_SHIFT: tl.constexpr = tl.constexpr(47)
"""The weights of a tile of up to 4096 tokens add up to 2**46 at most: counts go above, so that one sum adds up both."""
_ONE_TOKEN: tl.constexpr = tl.constexpr(1 << 47)
_FARTHEST_256TH: tl.constexpr = tl.constexpr(24.5 / 256)
"""The first pivots lie closest near the best token, and up to 24.5 away from it: beyond that weights are 0."""


@dataclass(frozen=True, slots=True)
class FilterScratch:
    """What the kernels leave for each other, at fixed addresses, and the boundaries that they find."""

    limit_S: Tensor
    """int32: the rank of the last token kept; beyond any rank: no filter."""
    last_S: Tensor
    """int32: its id."""
    state_S: Tensor
    partial_P2Q: Tensor
    """int64, by pass: tokens of each part of a row, and their weight, up to each pivot."""
    found_S: Tensor
    candidate_S2C: Tensor
    """int32: ranks and ids."""
    programs: int
    """How many programs share the work, about."""

    @classmethod
    def allocate(
        cls, max_rows: int, device: torch.device, *, candidates: int = _CANDIDATES, programs: int | None = None
    ) -> FilterScratch:
        """Room for `max_rows` rows. `candidates` (a power of two) and `programs` change the speed, never a result."""
        programs = programs or 2 * num_multiprocessors(device)
        long, short = torch.int64, torch.int32
        return cls(
            limit_S=torch.zeros(max_rows, dtype=short, device=device),
            last_S=torch.zeros(max_rows, dtype=short, device=device),
            state_S=torch.zeros(_PASSES + 1, max_rows, _STATE.value, dtype=long, device=device),
            partial_P2Q=torch.zeros(_PASSES, max_rows + programs, 2, _PIVOTS.value, dtype=long, device=device),
            found_S=torch.zeros(max_rows, dtype=short, device=device),
            candidate_S2C=torch.zeros(max_rows, 2, candidates, dtype=short, device=device),
            programs=programs,
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
def find_boundaries(
    logits_SV: Tensor, slot_S: Tensor, temperature_R: Tensor, filters: RowFilters, maximum_SG: Tensor, tile: int
) -> None:
    """Write the boundary of each row's kept tokens into the scratch (`limit_S`, `last_S`). Never blocks.

    Logits of any float dtype; `maximum_SG` has the best of each `tile` (at most 4096) of them. Greedy rows keep
    everything. A row whose best logit is not finite gets a boundary without meaning: it fails anyway.
    Raises ValueError if V is beyond 2**18.
    """
    rows, vocabulary = logits_SV.shape
    if vocabulary > _MAX_VOCABULARY:
        raise ValueError(f"{vocabulary} tokens; probabilities are added up exactly up to {_MAX_VOCABULARY}")
    scratch = filters.scratch
    tiles = cdiv(vocabulary, tile)
    parts = max(1, min(-(-scratch.programs // rows), tiles, _MAX_PARTS))
    launch = options(logits_SV.device)
    max_rows, max_partials = scratch.limit_S.shape[0], scratch.partial_P2Q.shape[1]
    inputs = (logits_SV, slot_S, temperature_R, filters.top_k_R, filters.top_p_R, filters.min_p_R, maximum_SG)
    search = (scratch.state_S, scratch.partial_P2Q, scratch.found_S)
    strides = (logits_SV.stride(0), maximum_SG.stride(0), max_rows)
    sizes = {"VOCABULARY": vocabulary, "TILE": tile, "TILES": tiles, "CANDIDATES": scratch.candidate_S2C.shape[2]}
    shared = {**sizes, "MAX_PARTS": _MAX_PARTS, "num_warps": 8, **launch}
    for index in range(_PASSES):
        _narrow[(parts, rows)](*inputs, *search, *strides, max_partials, parts, index, FIRST=index == 0, **shared)
    _collect[(parts, rows)](
        *inputs, *search, scratch.candidate_S2C, *strides, max_partials, parts, PASSES=_PASSES, **shared
    )
    finish[(rows,)](
        *inputs,
        scratch.state_S,
        scratch.candidate_S2C,
        scratch.limit_S,
        scratch.last_S,
        *strides,
        PASSES=_PASSES,
        STATE=_STATE.value,
        num_warps=8,
        **sizes,
        **launch,
    )


@triton.jit
def _pick(values_Q, index):
    """values[index]; 0 for an index of -1."""
    return tl.sum(tl.where(tl.arange(0, _PIVOTS) == index, values_Q, 0), 0)


@triton.jit
def _pivot(i, low, high, unit, FIRST: tl.constexpr):
    """Pivot `i` of an interval: int64. Any would do; these ones leave the boundary among few tokens soon."""
    if FIRST:
        # Exact up to the division, so that it does not matter where this is computed.
        distance = tl.div_rn((i + 1).to(tl.float32) * (i + 1).to(tl.float32) * _FARTHEST_256TH, unit)
        return tl.where(i == _PIVOTS - 1, high, tl.minimum(distance.to(tl.int32, bitcast=True).to(tl.int64), high))
    else:  # noqa: RET505 - decided when the kernel is compiled
        return low + (((high - low) * (i + 1)) >> 4)


@triton.jit
def _interval(
    row, index, state_ptr, partial_ptr, max_rows, max_partials, parts, top_k, has_top_k, top_p, has_top_p,
    CANDIDATES: tl.constexpr, MAX_PARTS: tl.constexpr
):  # fmt: skip
    """What is known of a row before pass `index` (1 and more): what was known one pass ago, and what that measured.

    (least rank that the boundary may have, largest, tokens below the least, their weight, what the boundary must reach,
    whether that is a count, what has been found, tokens of the interval): int64.
    """
    at = state_ptr + ((index - 1) * max_rows + row) * _STATE
    low, high = tl.load(at), tl.load(at + 1)
    count_below, weight_below = tl.load(at + 2), tl.load(at + 3)
    target, by_count = tl.load(at + 4), tl.load(at + 5)
    found, size = tl.load(at + 6), tl.load(at + 7)
    if found == SEARCHING:
        q = tl.arange(0, _PIVOTS)
        p = tl.arange(0, MAX_PARTS)[:, None]
        measured = partial_ptr + ((index - 1) * max_partials + row * parts + p) * 2 * _PIVOTS + q[None, :]
        count_Q = tl.sum(tl.load(measured, mask=(p < parts) & (q[None, :] >= 0), other=0), 0)
        weight_Q = tl.sum(tl.load(measured + _PIVOTS, mask=(p < parts) & (q[None, :] >= 0), other=0), 0)
        if index == 1:
            # A top-k that drops nothing must not hide a top-p.
            drops = has_top_k & (top_k < _pick(count_Q, _PIVOTS - 1))
            by_count = drops.to(tl.int64)
            target = tl.where(drops, top_k, target_mass(top_p, _pick(weight_Q, _PIVOTS - 1)))
        cell = tl.sum(
            (tl.where(by_count != 0, count_below + count_Q, weight_below + weight_Q) < target).to(tl.int32), 0
        )
        cell = tl.minimum(cell, _PIVOTS - 1)
        high = tl.load(at + 8 + cell)
        low = tl.load(at + 8 + cell - 1, mask=cell > 0, other=low - 1) + 1
        count_before = _pick(count_Q, cell - 1)
        size = _pick(count_Q, cell) - count_before
        count_below += count_before
        weight_below += _pick(weight_Q, cell - 1)
        if (by_count == 0) & (has_top_p == 0):
            found += EVERYTHING
        elif (by_count != 0) & has_top_p:
            # The mass of which top-p takes its part is that of all that top-k keeps.
            if count_below + size <= CANDIDATES:
                size += count_below
                low *= 0
                count_below *= 0
                weight_below *= 0
                found += FEW
        elif size <= CANDIDATES:
            found += FEW
    return low, high, count_below, weight_below, target, by_count, found, size


@triton.jit
def _store(at, low, high, count_below, weight_below, target, by_count, found, size):
    tl.store(at, low)
    tl.store(at + 1, high)
    tl.store(at + 2, count_below)
    tl.store(at + 3, weight_below)
    tl.store(at + 4, target)
    tl.store(at + 5, by_count)
    tl.store(at + 6, found)
    tl.store(at + 7, size)


@kernel(do_not_specialize=["parts", "index"])
def _narrow(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maximum_ptr,
    state_ptr,
    partial_ptr,
    found_ptr,
    logits_stride,
    maximum_stride,
    max_rows,
    max_partials,
    parts,
    index,
    FIRST: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature, _is_random, top_k, has_top_k, top_p, has_top_p, last_rank, searches = parameters(
        tl.load(slot_ptr + row), temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY
    )
    if searches:
        best = row_best(maximum_ptr, row, maximum_stride, TILES)
        q = tl.arange(0, _PIVOTS)
        if FIRST:
            nothing = last_rank * 0
            low, high, count_below, weight_below = nothing, last_rank, nothing, nothing
            target, by_count, found, size = nothing, nothing, nothing, nothing
        else:
            low, high, count_below, weight_below, target, by_count, found, size = _interval(
                row, index, state_ptr, partial_ptr, max_rows, max_partials, parts, top_k, has_top_k, top_p, has_top_p,
                CANDIDATES, MAX_PARTS
            )  # fmt: skip
        # Where top-p cuts depends on distances in units of the temperature, where top-k cuts does not.
        unit = tl.where(has_top_k, tl.minimum(temperature, 1e30), 1.0)
        if part == 0:
            at = state_ptr + (index * max_rows + row) * _STATE
            _store(at, low, high, count_below, weight_below, target, by_count, found, size)
            tl.store(at + 8 + q, _pivot(q, low, high, unit, FIRST))
            if FIRST:
                tl.store(found_ptr + row, 0)
        if found == SEARCHING:
            data = (logits_ptr, row, logits_stride, best, temperature)
            count_Q = tl.zeros([_PIVOTS], dtype=tl.int64)
            weight_Q = tl.zeros([_PIVOTS], dtype=tl.int64)
            share = (TILES + parts - 1) // parts
            for tile in range(part * share, tl.minimum((part + 1) * share, TILES)):
                tile_best = tl.load(maximum_ptr + row * maximum_stride + tile)
                if token_ranks(tile_best, best, temperature) <= high:
                    _, rank = tile_ranks(data, tile, VOCABULARY, TILE)
                    one = tl.full([TILE], _ONE_TOKEN, dtype=tl.int64)
                    if has_top_p:
                        one += token_weights(rank)
                    one = tl.where(rank >= low, one, 0)
                    for i in tl.static_range(_PIVOTS):
                        # `_pivot` of one number.
                        pivot = low + (((high - low) * (i + 1)) >> 4)
                        if FIRST and i < 15:
                            distance = tl.div_rn(unit * 0.0 + (i + 1) * (i + 1) * _FARTHEST_256TH, unit)
                            pivot = tl.minimum(distance.to(tl.int32, bitcast=True).to(tl.int64), high)
                        both = tl.sum(tl.where(rank <= pivot.to(tl.int32), one, 0), 0)
                        count_Q += tl.where(q == i, both >> _COUNT_SHIFT, 0)
                        weight_Q += tl.where(q == i, both & (_ONE_TOKEN - 1), 0)
            into = partial_ptr + (index * max_partials + row * parts + part) * 2 * _PIVOTS + q
            tl.store(into, count_Q)
            tl.store(into + _PIVOTS, weight_Q)


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
    partial_ptr,
    found_ptr,
    candidate_ptr,
    logits_stride,
    maximum_stride,
    max_rows,
    max_partials,
    parts,
    PASSES: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature, _is_random, top_k, has_top_k, top_p, has_top_p, _last_rank, searches = parameters(
        tl.load(slot_ptr + row), temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY
    )
    if searches:
        low, high, count_below, weight_below, target, by_count, found, size = _interval(
            row, PASSES, state_ptr, partial_ptr, max_rows, max_partials, parts, top_k, has_top_k, top_p, has_top_p,
            CANDIDATES, MAX_PARTS
        )  # fmt: skip
        if part == 0:
            at = state_ptr + (PASSES * max_rows + row) * _STATE
            _store(at, low, high, count_below, weight_below, target, by_count, found, size)
        if found == FEW:
            best = row_best(maximum_ptr, row, maximum_stride, TILES)
            data = (logits_ptr, row, logits_stride, best, temperature)
            share = (TILES + parts - 1) // parts
            for tile in range(part * share, tl.minimum((part + 1) * share, TILES)):
                tile_best = tl.load(maximum_ptr + row * maximum_stride + tile)
                if token_ranks(tile_best, best, temperature) <= high:
                    ids, rank = tile_ranks(data, tile, VOCABULARY, TILE)
                    wanted = (rank >= low) & (rank <= high)
                    count = tl.sum(wanted.to(tl.int32), 0)
                    if count > 0:
                        # In whichever order the tiles come here, they leave the same set, and no more is asked.
                        place = tl.atomic_add(found_ptr + row, count) + tl.cumsum(wanted.to(tl.int32), 0) - 1
                        tl.store(candidate_ptr + row * 2 * CANDIDATES + place, rank, mask=wanted)
                        tl.store(candidate_ptr + (row * 2 + 1) * CANDIDATES + place, ids, mask=wanted)
