"""Sampling in small kernels that read the logits in their own dtype: at most twice, if no row has a filter.

The same choice as `engine/sampler.py` makes: argmax p / E with E = -log1p(-u), u from the
counter-based numbers of `engine/random.py`. The random bits are equal to the bit; exp and log differ in last bits, so a
token could differ only where two scores are that close; what a row gets depends, to the bit, on nothing but its own
logits and parameters. Which tokens filters keep is `sampling_filters`'. Legend: S sampled rows, V vocabulary, G blocks
of it, R slots, E stop ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options
from stretto.kernels.sampling_boundary import token_ranks
from stretto.kernels.sampling_filters import RowFilters, find_boundaries

_BLOCK = 4096

_SAMPLE_64: tl.constexpr = tl.constexpr(0xD1B54A32D192ED03)
_GOLDEN_64: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_64_0: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_64_1: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_GOLDEN_32: tl.constexpr = tl.constexpr(0x9E3779B1)
_MIX_32_0: tl.constexpr = tl.constexpr(0x7FEB352D)
_MIX_32_1: tl.constexpr = tl.constexpr(0x846CA68B)
_TO_UNIT: tl.constexpr = tl.constexpr((1.0 - 2.0**-24) * 2.0**-31)
_GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)
_HIGHEST_TEMPERATURE: tl.constexpr = tl.constexpr(2.0**60)


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Best values of each block, at fixed addresses."""

    maximum_SG: Tensor
    maximum_id_SG: Tensor
    score_SG: Tensor
    score_id_SG: Tensor
    block: int
    """Tokens of a block."""

    @classmethod
    def allocate(cls, max_rows: int, vocabulary: int, device: torch.device, *, block: int = _BLOCK) -> SampleScratch:
        """Room for `max_rows` rows of `vocabulary` logits. `block` (a power of two up to 4096) changes no result."""
        shape = (max_rows, cdiv(vocabulary, block))
        return cls(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            block,
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
    stride = scratch.maximum_SG.stride(0)
    _row_maxima[(blocks, rows)](
        logits_SV,
        scratch.maximum_SG,
        scratch.maximum_id_SG,
        logits_SV.stride(0),
        stride,
        VOCABULARY=vocabulary,
        BLOCK=block,
        num_warps=8,
        **launch,
    )
    if not greedy_only:
        # Without filters nobody looks at a boundary.
        limit_S, last_S = scratch.score_id_SG, scratch.score_id_SG
        if filters is not None:
            find_boundaries(logits_SV, slot_S, temperature_R, filters, scratch.maximum_SG, block)
            limit_S, last_S = filters.scratch.limit_S, filters.scratch.last_S
        _draw[(blocks, rows)](
            logits_SV,
            slot_S,
            position_S,
            temperature_R,
            seed_R,
            scratch.maximum_SG,
            limit_S,
            last_S,
            scratch.score_SG,
            scratch.score_id_SG,
            logits_SV.stride(0),
            stride,
            VOCABULARY=vocabulary,
            BLOCK=block,
            BLOCKS=blocks,
            BLOCKS_PAD=next_power_of_2(blocks),
            FILTERED=filters is not None,
            num_warps=8,
            **launch,
        )
    _choose[(rows,)](
        slot_S,
        position_S,
        temperature_R,
        scratch.maximum_SG,
        scratch.maximum_id_SG,
        scratch.score_SG,
        scratch.score_id_SG,
        token_ids_RL,
        length_R,
        tokens_S,
        stride,
        token_ids_RL.stride(0),
        BLOCKS=blocks,
        BLOCKS_PAD=next_power_of_2(blocks),
        GREEDY_ONLY=greedy_only,
        num_warps=1,
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
def _row_maxima(
    logits_ptr,
    maximum_ptr,
    maximum_id_ptr,
    logits_stride,
    stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    v = block * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits_ptr + row * logits_stride + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
    # A NaN must not get lost in the maximum: it makes the row fail like an infinity does.
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, 0)
    first = tl.min(tl.where(x == best, v, VOCABULARY), 0)
    tl.store(maximum_ptr + row * stride + block, best)
    tl.store(maximum_id_ptr + row * stride + block, first)


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * _MIX_64_0
    z = (z ^ (z >> 27)) * _MIX_64_1
    return z ^ (z >> 31)


@triton.jit
def exponential(seed, position, ids):
    """-log1p(-u) of the number of (seed, position, token id): float32, for int64 scalars and int32 ids."""
    key = _mix64(seed.to(tl.uint64, bitcast=True) ^ _SAMPLE_64)
    key = _mix64(key + (position + 1).to(tl.uint64) * _GOLDEN_64)
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    h = (ids.to(tl.uint32) * _GOLDEN_32) ^ low
    h = (h ^ (h >> 16)) * _MIX_32_0
    h = h + high
    h = (h ^ (h >> 15)) * _MIX_32_1
    signed = h.to(tl.int32, bitcast=True)
    bits = signed ^ (signed >> 16)
    u = (bits.to(tl.float32) + 0.5) * _TO_UNIT
    # -log1p(-u): rounding 1 - u costs a large u nothing, and a small one has its series.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.03125, series, -tl.log(1.0 - u))


@kernel
def _draw(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    maximum_ptr,
    limit_ptr,
    last_ptr,
    score_ptr,
    score_id_ptr,
    logits_stride,
    stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    FILTERED: tl.constexpr,
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
        b = tl.arange(0, BLOCKS_PAD)
        best = tl.max(tl.load(maximum_ptr + row * stride + b, mask=b < BLOCKS, other=float("-inf")), 0)
        x = tl.load(logits_ptr + row * logits_stride + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
        distance = tl.abs((best - x) * (1.0 / tl.minimum(temperature, _HIGHEST_TEMPERATURE)))
        noise = exponential(tl.load(seed_ptr + slot), tl.load(position_ptr + row), v)
        score = tl.exp(-distance) / noise
        score = tl.where((v < VOCABULARY) & (score == score), score, -1.0)
        if FILTERED:
            limit = tl.load(limit_ptr + row)
            rank = token_ranks(x, best, temperature)
            kept = (rank < limit) | ((rank == limit) & (v <= tl.load(last_ptr + row)))
            score = tl.where(kept, score, -1.0)
        top = tl.max(score, 0)
        tl.store(score_ptr + row * stride + block, top)
        tl.store(score_id_ptr + row * stride + block, tl.min(tl.where(score == top, v, VOCABULARY), 0))


@kernel
def _choose(
    slot_ptr,
    position_ptr,
    temperature_ptr,
    maximum_ptr,
    maximum_id_ptr,
    score_ptr,
    score_id_ptr,
    token_ids_ptr,
    length_ptr,
    tokens_ptr,
    stride,
    token_stride,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    GREEDY_ONLY: tl.constexpr,
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
    value = tl.load(maximum_ptr + row * stride + b, mask=inside, other=float("-inf"))
    best = tl.max(value, 0)
    usable = (best < float("inf")) & (best > float("-inf"))
    ids = tl.load(maximum_id_ptr + row * stride + b, mask=inside, other=2147483647)
    token = tl.min(tl.where(value == best, ids, 2147483647), 0)
    if not GREEDY_ONLY:  # noqa: SIM102 - the first is known when the kernel is compiled
        if tl.load(temperature_ptr + slot) >= _GREEDY_BELOW:
            score = tl.load(score_ptr + row * stride + b, mask=inside, other=-1.0)
            top = tl.max(score, 0)
            drawn = tl.load(score_id_ptr + row * stride + b, mask=inside, other=2147483647)
            token = tl.min(tl.where(score == top, drawn, 2147483647), 0)
    tl.store(tokens_ptr + row, tl.where(usable, token, -1).to(tl.int64))
    if slot != 0:
        tl.store(token_ids_ptr + slot * token_stride + position, tl.where(usable, token, 0).to(tl.int64))
        tl.store(length_ptr + slot, position)
