"""Counter-based random numbers: each one is a pure function of (seed, position, token id), with no state to keep.

Owns the hash and the seeds; knows nothing about logits. The numbers are the same on every device, in every batch and
whether they are asked for one token id or for the whole vocabulary, because only 32- and 64-bit integer operations
that wrap around produce them. Legend: S sampled rows, X any number of token ids.

* A row's 64-bit key: SplitMix64's finaliser over seed and position (Steele, Lea, Flood: "Fast splittable pseudorandom
  number generators", OOPSLA 2014; constants of Stafford's variant 13).
* A token's 32 bits: the two-round multiply-xorshift "lowbias32" of C. Wellons' hash-prospector, with one half of the
  key going in before each round.

Every function takes torch tensors or numpy arrays alike; the latter is the host's reference.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import numpy as np
import torch

Array = TypeVar("Array", torch.Tensor, np.ndarray[Any, Any])

_U64 = (1 << 64) - 1


def wrap_int64(value: int) -> int:
    """The signed 64-bit integer that any Python integer is congruent to (modulo 2**64)."""
    return ((value + (1 << 63)) & _U64) - (1 << 63)


_GOLDEN_64 = wrap_int64(0x9E3779B97F4A7C15)
_MIX_64 = (wrap_int64(0xBF58476D1CE4E5B9), wrap_int64(0x94D049BB133111EB))
_SAMPLE_64 = wrap_int64(0xD1B54A32D192ED03)
_GOLDEN_32 = 0x9E3779B1 - (1 << 32)
_MIX_32 = (0x7FEB352D, 0x846CA68B - (1 << 32))

# (h + 0.5) * this lies in (0, 1 - 2**-24] for every 31-bit h: float32 never rounds it to 1.
_TO_UNIT = (1.0 - 2.0**-24) * 2.0**-31


def fresh_seed() -> int:
    """A signed 64-bit seed from the operating system's entropy: for a request that names none."""
    return int.from_bytes(os.urandom(8), "little", signed=True)


def derive_seed(seed: int, sample_index: int) -> int:
    """The signed 64-bit seed of sample `sample_index` of a request; sample 0 keeps `seed` (wrapped to 64 bits).

    So the first of n samples is the one that n=1 gives, and the others are independent of it.
    """
    if sample_index == 0:
        return wrap_int64(seed)
    mixed = _mix64(np.array([wrap_int64(sample_index * _SAMPLE_64)], dtype=np.int64))
    return int(_mix64(mixed ^ np.int64(wrap_int64(seed)))[0])


def row_keys(seed_S: Array, position_S: Array) -> Array:
    """One 64-bit key per row from its seed and the position of the token to be sampled (int64 [S] each; int64 [S])."""
    # The seed is mixed first: else seed + GOLDEN at position p would repeat seed at position p + 1.
    key_S: Array = _mix64(seed_S ^ _SAMPLE_64)
    return _mix64(key_S + (position_S + 1) * _GOLDEN_64)


def token_lanes(token_ids_X: Array) -> Array:
    """What the hash takes of token ids (int32 in, int32 out, any shape); shared by all rows of a step."""
    lanes: Array = token_ids_X * _GOLDEN_32
    return lanes


# hot path
def hash_bits(keys_S: Array, lanes_X: Array, out_SX: Array, spare_SX: Array) -> Array:
    """31 random bits per (row, token id), not negative: written to `out_SX` (int32 [S, X]) and returned.

    `keys_S` from `row_keys`; `lanes_X` from `token_lanes`, [X] (the same ids for all rows) or [S, X]; `spare_SX` is
    overwritten.
    """
    low_S, high_S = _halves(keys_S)
    out_SX[:] = lanes_X
    out_SX ^= low_S[:, None]
    _shift_right(out_SX, 16, spare_SX)
    spare_SX &= 0xFFFF
    out_SX ^= spare_SX
    out_SX *= _MIX_32[0]
    out_SX += high_S[:, None]
    _shift_right(out_SX, 15, spare_SX)
    spare_SX &= 0x1FFFF
    out_SX ^= spare_SX
    out_SX *= _MIX_32[1]
    # The last shift may stay arithmetic: the sign cancels itself, and exactly two of 2**32 values share a result.
    _shift_right(out_SX, 16, spare_SX)
    out_SX ^= spare_SX
    return out_SX


# hot path
def negative_uniforms(keys_S: Array, lanes_X: Array, bits_SX: Array, spare_SX: Array) -> Array:
    """Uniform numbers, negated: float32 [S, X] in (-1, 0), on 2**31 levels from -(1 - 2**-24) to -(2**-32).

    Finest near 0, which is what sampling needs: with plain 24-bit uniforms one token in 2**24 would draw exactly 0, an
    infinitely good number, and at 50,000 tokens a step that soon lets a hopeless one win.

    `bits_SX` and `spare_SX` (int32 [S, X]) are overwritten; the result lies in the memory of `spare_SX`.
    """
    hash_bits(keys_S, lanes_X, bits_SX, spare_SX)
    u_SX: Array = spare_SX.view(torch.float32 if isinstance(spare_SX, torch.Tensor) else np.float32)
    u_SX[:] = bits_SX
    u_SX += 0.5
    u_SX *= -_TO_UNIT
    return u_SX


# hot path
def negative_exponentials(
    keys_S: torch.Tensor, lanes_X: torch.Tensor, bits_SX: torch.Tensor, spare_SX: torch.Tensor
) -> torch.Tensor:
    """Exponential(1) numbers, negated: log1p of `negative_uniforms` (float32 [S, X] in (-17, 0)), in its memory."""
    return negative_uniforms(keys_S, lanes_X, bits_SX, spare_SX).log1p_()


def _shift_right(x: Array, by: int, out: Array) -> None:
    """Arithmetic shift into `out`."""
    if isinstance(x, torch.Tensor):
        torch.bitwise_right_shift(x, by, out=out)
    else:
        np.right_shift(x, by, out=out)


def _mix64(z: Array) -> Array:
    """SplitMix64's finaliser on int64, whose shifts must be made logical by hand."""
    mixed: Array = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_64[0]
    mixed = (mixed ^ ((mixed >> 27) & ((1 << 37) - 1))) * _MIX_64[1]
    mixed ^= (mixed >> 31) & ((1 << 33) - 1)
    return mixed


def _halves(keys_S: Array) -> tuple[Array, Array]:
    """The low and the high 32 bits of each key, int32 [S] each."""
    if isinstance(keys_S, torch.Tensor):
        # Reinterpreting is free, where narrowing an out-of-range int64 is left undefined.
        pair_S2 = keys_S.contiguous().view(torch.int32).view(-1, 2)
        return pair_S2[:, 0], pair_S2[:, 1]
    halves_S2 = np.ascontiguousarray(keys_S).view(np.int32).reshape(-1, 2)
    return halves_S2[:, 0], halves_S2[:, 1]
