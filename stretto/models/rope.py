"""Rotary position embeddings: the frequencies of every scaling kind, and the order of the head dimension.

Owns what a model's config says about positions. The table of turns and how it is applied are layers/rope.py's.

Order of the head dimension: inside Stretto the two coordinates that one frequency turns stand side by side
(0, 1), (2, 3), ..., so that a rotation is one complex product; HF checkpoints keep them half a head apart,
(0, H/2), (1, H/2 + 1), ... Rows of q and k are brought into this order when weights are loaded; q.k does not change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.models.config import ModelConfig, RopeConfig


def inverse_frequencies(config: ModelConfig, max_model_len: int) -> Tensor:
    """Radians per position of each coordinate pair: float32 [head_dim / 2], equal to transformers' rope functions.

    `dynamic` (NTK) scaling is defined there by the longest sequence *of the running batch so far*, which would make a
    result depend on its neighbours and on timing. Here it is always that of a sequence of `max_model_len` tokens: equal
    to unscaled rope when that fits the original context, otherwise equal to transformers for a sequence that long.
    """
    rope, dim = config.rope, config.head_dim
    match rope.kind:
        case "linear":
            return _unscaled(rope.theta, dim) / rope.factor
        case "dynamic":
            stretch = max(max_model_len, config.max_position_embeddings) / config.max_position_embeddings
            # A head of two dimensions has one frequency, theta ** 0, which no base changes.
            exponent = dim / (dim - 2) if dim > 2 else 0.0
            return _unscaled(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** exponent, dim)
        case "llama3":
            return _llama3(rope, dim)
        case "yarn":
            return _yarn(rope, dim)
        case "default":
            return _unscaled(rope.theta, dim)
        case kind:
            raise ValueError(f"rope kind {kind!r} in a parsed config")


def halves_as_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """A view of q or k rows [heads * head_dim, ...] in HF order as [heads, head_dim / 2, 2, ...] in pair order."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2)


def _unscaled(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(rope: RopeConfig, dim: int) -> Tensor:
    """Llama 3.1: keep short wavelengths, stretch long ones, blend in between."""
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    kept = _unscaled(rope.theta, dim)
    turns = rope.original_context * kept / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep * kept + (1 - keep) * kept / rope.factor


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): like llama3's blend, but linear in the dimension, not in the turns."""

    def dimension_turning(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        return dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = _unscaled(rope.theta, dim)
    return kept * (1 - stretch) + kept / rope.factor * stretch
