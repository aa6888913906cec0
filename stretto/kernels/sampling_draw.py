"""Device functions of the draw: the counter-based numbers of `engine/random.py`, scores, and who may have the best.

A token's score is p / E with p = exp(-distance below the row's best logit) and E = -log1p(-u) >= u, u its uniform
number. So log2 p - log2 u, which costs a few instructions, is at least the score's logarithm: `best_reach` computes it
for all tokens when they are read first, and `best_draw` computes the scores of only those blocks whose reach is not
below the best score so far; mostly that is one. Owns no kernel. Legend: V vocabulary, G blocks of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stretto.kernels.launch import INTERPRETED
from stretto.kernels.sampling_ranks import HIGHEST_TEMPERATURE, is_within, token_ranks

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_SAMPLE_64: tl.constexpr = tl.constexpr(0xD1B54A32D192ED03)
_GOLDEN_64: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_64_0: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_64_1: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_GOLDEN_32: tl.constexpr = tl.constexpr(0x9E3779B1)
_MIX_32_0: tl.constexpr = tl.constexpr(0x7FEB352D)
_MIX_32_1: tl.constexpr = tl.constexpr(0x846CA68B)
_TO_UNIT: tl.constexpr = tl.constexpr((1.0 - 2.0**-24) * 2.0**-31)
_LOG2_OF_UNIT: tl.constexpr = tl.constexpr(31.0)
"""log2 of a random number is up to this before it is scaled to (0, 1)."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LEAST_REACH: tl.constexpr = tl.constexpr(-3.0e38)
NO_ID: tl.constexpr = tl.constexpr(2147483647)
"""Behind every token id."""


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * _MIX_64_0
    z = (z ^ (z >> 27)) * _MIX_64_1
    return z ^ (z >> 31)


@triton.jit
def _random_bits(seed, position, ids):
    """31 bits of the number of (seed, position, token id): int32, for int64 scalars and int32 ids."""
    key = _mix64(seed.to(tl.uint64, bitcast=True) ^ _SAMPLE_64)
    key = _mix64(key + (position + 1).to(tl.uint64) * _GOLDEN_64)
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    h = (ids.to(tl.uint32) * _GOLDEN_32) ^ low
    h = (h ^ (h >> 16)) * _MIX_32_0
    h = h + high
    h = (h ^ (h >> 15)) * _MIX_32_1
    signed = h.to(tl.int32, bitcast=True)
    return signed ^ (signed >> 16)


@triton.jit
def _exponential(seed, position, ids):
    """-log1p(-u) of the number of (seed, position, token id): float32."""
    u = (_random_bits(seed, position, ids).to(tl.float32) + 0.5) * _TO_UNIT
    # -log1p(-u): rounding 1 - u costs a large u nothing, and a small one has its series.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.03125, series, -tl.log(1.0 - u))


@triton.jit
def token_scores(x, best, temperature, seed, position, ids):
    """What a row's draw takes the largest of: float32, -1 for impossible tokens."""
    distance = tl.abs((best - x) * (1.0 / tl.minimum(temperature, HIGHEST_TEMPERATURE)))
    score = tl.exp(-distance) / _exponential(seed, position, ids)
    return tl.where(score == score, score, -1.0)


@triton.jit
def _quick_log2(x):
    if _INTERPRETED:
        return tl.log2(x)
    else:  # noqa: RET505 - decided when the kernel is compiled
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _log2_scale(temperature):
    return _LOG2_E / tl.minimum(temperature, HIGHEST_TEMPERATURE)


@triton.jit
def best_reach(x, temperature, seed, position, ids):
    """The largest of the logarithms that scores of these tokens may have, but for what all of a row have in common."""
    uniform = _random_bits(seed, position, ids).to(tl.float32) + 0.5
    return tl.maximum(tl.max(x * _log2_scale(temperature) - _quick_log2(uniform)), _LEAST_REACH)


@triton.jit
def first_best(
    logits_ptr, maximum_G, best, FIRST_ID: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr
):  # fmt: skip
    """The first token of a row that has its best logit; some token if that is not finite."""
    g = tl.arange(0, BLOCKS_PAD)
    v = tl.min(tl.where(maximum_G == best, g, BLOCKS - 1), 0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(x == best, v + FIRST_ID, NO_ID), 0)


@triton.jit
def best_draw(
    logits_ptr, reach_G, best, temperature, seed, position, limit, last, FILTERED: tl.constexpr,
    FIRST_ID: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr
):  # fmt: skip
    """(token, its score) of a row's best score, the lowest id among equals, up to the boundary (`limit`, `last`).

    `reach_G`: of each block of logits, `best_reach`; -inf: it has no token that may be drawn.
    """
    g = tl.arange(0, BLOCKS_PAD)
    token = tl.full([], NO_ID, tl.int32)
    top = tl.full([], -1.0, tl.float32)
    least = tl.full([], _LEAST_REACH, tl.float32)
    # A score of 1 as a reach, and how far rounding may have moved either.
    one = best * _log2_scale(temperature) - _LOG2_OF_UNIT
    slack = (tl.abs(one) + 100.0) * 2.0**-16
    farthest = tl.max(reach_G, 0)
    # Where `one` has overflowed, `least` is no number, and every block is looked at.
    while (farthest > float("-inf")) & ((farthest < least) == 0):
        block = tl.min(tl.where(reach_G == farthest, g, BLOCKS_PAD), 0)
        v = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
        score = tl.where(v < VOCABULARY, token_scores(x, best, temperature, seed, position, v + FIRST_ID), -1.0)
        if FILTERED:
            score = tl.where(is_within(token_ranks(x, best, temperature), v, limit, last), score, -1.0)
        block_top = tl.max(score, 0)
        block_token = tl.min(tl.where(score == block_top, v + FIRST_ID, NO_ID), 0)
        is_better = (block_top > top) | ((block_top == top) & (block_token < token))
        top = tl.where(is_better, block_top, top)
        token = tl.where(is_better, block_token, token)
        reach_G = tl.where(g == block, float("-inf"), reach_G)
        farthest = tl.max(reach_G, 0)
        if top > 0.0:
            least = tl.log2(top) + one - slack
    return token, top


@triton.jit
def feed_back(token, best, row, slot, position, token_ids_ptr, length_ptr, tokens_ptr, token_stride):
    """Write a row's token where `sample_rows` says; a row whose best logit is not finite fails."""
    is_usable = (best < float("inf")) & (best > float("-inf"))
    tl.store(tokens_ptr + row, tl.where(is_usable, token, -1).to(tl.int64))
    if slot != 0:
        tl.store(token_ids_ptr + slot * token_stride + position, tl.where(is_usable, token, 0).to(tl.int64))
        tl.store(length_ptr + slot, position)
