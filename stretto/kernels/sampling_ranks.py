"""Device functions of the filters' search: ranks and weights of tokens as `engine/filters.py` defines them.

Owns no kernel. Legend: V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from stretto.kernels.launch import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)
HIGHEST_TEMPERATURE: tl.constexpr = tl.constexpr(2.0**60)
_WEIGHT_ONE: tl.constexpr = tl.constexpr(2.0**34)
_LAST_RANK: tl.constexpr = tl.constexpr(0x7F7FFFFF)
"""Of the largest finite distance: a token beyond it is impossible, kept or not."""
ALL: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Behind every rank, and every id."""

# Adding one of these, and subtracting it, leaves of a weight the whole multiples of 2**17, and the whole numbers.
_COARSE: tl.constexpr = tl.constexpr(1.5 * 2.0**40)
_FINE: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
_COARSE_BITS: tl.constexpr = tl.constexpr(0x53C00000)
_FINE_BITS: tl.constexpr = tl.constexpr(0x4B400000)

STATE: tl.constexpr = tl.constexpr(8)
"""int64 numbers of a row's search: the least and largest rank of the candidates, how many there are; all weight; the
weight, and the number, of the tokens before the least rank."""


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
    distance = tl.abs(tl.div_rn(best - x, tl.minimum(temperature, HIGHEST_TEMPERATURE)))
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def has_quick_ranks(best, temperature):
    """Whether `quick_ranks` may be used: no step of it underflows. (Distances are 0, or at least best * 2**-25.)"""
    return (tl.abs(best) >= 2.0**-60) & (temperature <= 2.0**30) & (_INTERPRETED == 0)


@triton.jit
def quick_ranks(x, best, temperature, inverse):
    """`token_ranks` in a third of the instructions, for rows that have them; behind every rank for impossible tokens.

    The quotient's remainder is exact with a fused multiplication and addition, and corrects the quotient. The second
    correction rounds correctly as the first has left less than one unit in the last place, and as `inverse`, 1 /
    temperature, is itself correctly rounded (Markstein: "Computation of elementary functions on the IBM RISC
    System/6000 processor", 1990).
    """
    distance = best - x
    quotient = distance * inverse
    quotient = tl.fma(tl.fma(-quotient, temperature, distance), inverse, quotient)
    quotient = tl.fma(tl.fma(-quotient, temperature, distance), inverse, quotient)
    return tl.abs(quotient).to(tl.int32, bitcast=True)


@triton.jit
def split_weights(rank, last_rank):
    """(coarse, fine) int32 of each token's relative probability as a whole number up to 2**34, 0 behind `last_rank`.

    The weight is (coarse - _COARSE_BITS) * 2**17 + (fine - _FINE_BITS): sums of up to 2**14 tokens, whose number
    `whole_weight` takes off again, wrap around without harm. Halves are rounded to even.
    """
    weight = tl.where(rank <= last_rank, _precise_exp(-rank.to(tl.float32, bitcast=True)) * _WEIGHT_ONE, 0.0)
    coarse = weight + _COARSE
    fine = (weight - (coarse - _COARSE)) + _FINE
    return coarse.to(tl.int32, bitcast=True), fine.to(tl.int32, bitcast=True)


@triton.jit
def whole_weight(coarse, fine, count):
    """int64: the weight of `count` tokens from the sums of what `split_weights` gives."""
    coarse = (coarse - count * _COARSE_BITS).to(tl.int64)
    return coarse * 131072 + (fine - count * _FINE_BITS).to(tl.int64)


@triton.jit
def token_weights(rank):
    """int64."""
    coarse, fine = split_weights(rank, _LAST_RANK)
    return whole_weight(coarse, fine, 1)


@triton.jit
def is_within(rank, ids, limit, last):
    """Whether tokens do not lie behind the boundary."""
    return (rank < limit) | ((rank == limit) & (ids <= last))


@triton.jit
def parameters(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCABULARY: tl.constexpr):
    """(temperature, top-k, has one, top-p, has one, last rank that min-p keeps (int32), searches) of a slot."""
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    has_top_k = (top_k > 0) & (top_k < VOCABULARY)
    has_top_p = top_p < 1.0
    min_p = tl.load(min_p_ptr + slot)
    farthest = tl.abs(tl.minimum(_precise_log(tl.where(min_p > 0.0, min_p, 1.0)), 0.0)).to(tl.int32, bitcast=True)
    last_rank = tl.where(min_p > 0.0, farthest, _LAST_RANK)
    searches = (temperature >= GREEDY_BELOW) & (has_top_k | has_top_p)
    return temperature, top_k, has_top_k, top_p, has_top_p, last_rank, searches


@triton.jit
def row_best(maximum_ptr, row, stride, TILES: tl.constexpr):
    """The best logit of a row from those of its tiles."""
    g = tl.arange(0, triton.next_power_of_2(TILES))
    return tl.max(tl.load(maximum_ptr + row * stride + g, mask=g < TILES, other=float("-inf")), 0)
