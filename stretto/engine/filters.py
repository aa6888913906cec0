"""Which tokens top-k, top-p and min-p keep. Owns the kept set; the sampler owns the draw from it.

All three keep a prefix of one order: smallest distance below the row's best logit first, lowest id among equals, where
distance = (best - logit) / temperature >= 0. Its float32 bits, read as int32, sort as the distances do. So a kept set
is a boundary: the rank and id of the last token kept. Masses are integers (held in float64, below 2**53), so that
sums are exact in any order, and a row keeps the same tokens whichever of the two paths below its neighbours force.
Legend: S sampled rows, V vocabulary (padded to whole blocks), C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stretto.engine.ordering import BLOCK, block_token_ids
from stretto.engine.scratch import Scratch

MAX_VOCABULARY = 2**18
"""Up to this many tokens all sums of weights are exact."""
_WEIGHT_ONE = 2.0**34
"""The integer weight of a row's best token: as fine as an exact float64 sum over `MAX_VOCABULARY` allows."""
_ALL = torch.iinfo(torch.int64).max
"""The boundary behind every token."""
_LEVELS = ((20, 11), (10, 10), (0, 10))
"""(shift, bits) of the digits of a rank, most significant first; ranks have 31 bits."""


# hot path
def distances(
    best_S1: torch.Tensor, logits_SX: torch.Tensor, temperature_S1: torch.Tensor, out_SX: torch.Tensor | None = None
) -> torch.Tensor:
    """How far logits lie below their row's best one, scaled: float32 >= 0 [S, X], inf for impossible tokens.

    The best one is subtracted before the division, so nothing overflows; -0.0 and the sign of a NaN are removed.
    """
    return torch.sub(best_S1, logits_SX, out=out_SX).div_(temperature_S1).abs_()


def integer_weights(probability: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Relative probabilities (best token: 1) as whole numbers in float32: exact to add up in float64."""
    return torch.mul(probability, _WEIGHT_ONE, out=out).round_()


def min_p_rank(min_p_S: torch.Tensor) -> torch.Tensor:
    """The largest rank that min-p keeps (int32 [S]): probability >= min_p * best <=> distance <= -log(min_p)."""
    return min_p_S.log().clamp_(max=0.0).abs_().view(torch.int32)


# hot path
def kept_candidates(
    rank_SC: torch.Tensor,
    probability_SC: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor | None,
    min_p_S: torch.Tensor | None,
) -> torch.Tensor:
    """Which of a row's best tokens, given in order, its filters keep: bool [S, C].

    The candidates must include every token that top-k keeps. None: no row has that filter.
    """
    kept_SC = torch.arange(rank_SC.shape[1], device=rank_SC.device) < top_k_S.unsqueeze(1)
    if min_p_S is not None:
        kept_SC &= rank_SC <= min_p_rank(min_p_S).unsqueeze(1)
    if top_p_S is not None:
        weight_SC = integer_weights(probability_SC).to(torch.float64).mul_(kept_SC)
        mass_SC = weight_SC.cumsum(1)
        target_S = _target_mass(top_p_S, mass_SC[:, -1])
        kept_SC &= ((mass_SC - weight_SC) < target_S.unsqueeze(1)) | (top_p_S >= 1.0).unsqueeze(1)
    return kept_SC


# hot path
def drop_filtered(
    rank_SV: torch.Tensor,
    probability_SV: torch.Tensor,
    top_k_S: torch.Tensor | None,
    top_p_S: torch.Tensor | None,
    min_p_S: torch.Tensor | None,
    scratch: Scratch,
) -> None:
    """Set the probability of every token that a filter drops to 0, in place, over a vocabulary of whole blocks.

    `top_k_S` must already be V or more where it is off. None: no row has that filter.
    """
    temporaries = _Temporaries.of(rank_SV, scratch)
    weight_SV = temporaries.weight_SV
    boundary_S: torch.Tensor | None = None
    if min_p_S is not None:
        boundary_S = _boundary(min_p_rank(min_p_S), rank_SV.shape[1])
    if top_k_S is not None:
        top_k_boundary_S = _find_boundary(rank_SV, weight_SV.fill_(1.0), top_k_S.to(torch.float64), temporaries)
        boundary_S = top_k_boundary_S if boundary_S is None else torch.minimum(boundary_S, top_k_boundary_S)
    if boundary_S is not None:
        _drop_behind(rank_SV, probability_SV, boundary_S, temporaries)
    if top_p_S is not None:
        integer_weights(probability_SV, weight_SV)
        target_S = _target_mass(top_p_S, weight_SV.sum(1, dtype=torch.float64))
        top_p_boundary_S = _find_boundary(rank_SV, weight_SV, target_S, temporaries)
        top_p_boundary_S.masked_fill_(top_p_S >= 1.0, _ALL)
        _drop_behind(rank_SV, probability_SV, top_p_boundary_S, temporaries)


@dataclass(frozen=True, slots=True)
class _Temporaries:
    """Memory for the passes over the vocabulary."""

    weight_SV: torch.Tensor
    ints_SV: torch.Tensor
    more_ints_SV: torch.Tensor
    index_SV: torch.Tensor
    mass_SV: torch.Tensor

    @classmethod
    def of(cls, rank_SV: torch.Tensor, scratch: Scratch) -> _Temporaries:
        shape, device = (rank_SV.shape[0], rank_SV.shape[1]), rank_SV.device
        return cls(
            weight_SV=scratch.take("filters.weight", shape, torch.float32, device),
            ints_SV=scratch.take("filters.ints", shape, torch.int32, device),
            more_ints_SV=scratch.take("filters.more_ints", shape, torch.int32, device),
            index_SV=scratch.take("filters.index", shape, torch.int64, device),
            mass_SV=scratch.take("filters.mass", shape, torch.float64, device),
        )


def _target_mass(top_p_S: torch.Tensor, total_S: torch.Tensor) -> torch.Tensor:
    """The whole-number mass at which a prefix is large enough, at least 1 so that one token is always kept."""
    return (top_p_S.to(torch.float64) * total_S).ceil_().clamp_(min=1.0)


def _boundary(rank_S: torch.Tensor, last_id: int | torch.Tensor) -> torch.Tensor:
    return (rank_S.to(torch.int64) << 32) | last_id


def _find_boundary(
    rank_SV: torch.Tensor, weight_SV: torch.Tensor, target_S: torch.Tensor, temporaries: _Temporaries
) -> torch.Tensor:
    """The boundary of the smallest prefix whose weight reaches the target (everything, if none does): int64 [S].

    A radix select: three histograms, each over the next digit of the ranks, instead of a sort. On a CPU it is some
    ten times faster than sorting 50,000 tokens.
    """
    num_rows = rank_SV.shape[0]
    ints_SV, index_SV, mass_SV = temporaries.ints_SV, temporaries.index_SV, temporaries.mass_SV
    weight_bits_SV = weight_SV.view(torch.int32)
    target_S1 = target_S.unsqueeze(1)
    above_S1 = torch.zeros_like(target_S1)
    prefix_S1 = torch.zeros((num_rows, 1), dtype=torch.int32, device=rank_SV.device)
    for shift, bits in _LEVELS:
        if shift + bits < 31:
            # Weights of other prefixes become 0 by their bits, which beats a select on a CPU.
            torch.bitwise_right_shift(rank_SV, shift + bits, out=ints_SV)
            _minus_one_where_equal(ints_SV, prefix_S1, ints_SV).bitwise_and_(weight_bits_SV)
            mass_SV.copy_(ints_SV.view(torch.float32))
        else:
            mass_SV.copy_(weight_SV)
        torch.bitwise_right_shift(rank_SV, shift, out=ints_SV)
        index_SV.copy_(ints_SV.bitwise_and_((1 << bits) - 1))
        bins_SX = torch.zeros((num_rows, 1 << bits), dtype=torch.float64, device=rank_SV.device)
        bins_SX.scatter_add_(1, index_SV, mass_SV)
        total_SX = bins_SX.cumsum(1).add_(above_S1)
        crossing_S1 = (total_SX < target_S1).sum(1, keepdim=True).clamp_(max=(1 << bits) - 1)
        above_S1 = total_SX.gather(1, crossing_S1) - bins_SX.gather(1, crossing_S1)
        prefix_S1 = (prefix_S1 << bits) | crossing_S1.to(torch.int32)
    # Tokens of the boundary's rank weigh the same (or 0, behind an earlier filter): how many of them are needed?
    equal_SV = _minus_one_where_equal(rank_SV, prefix_S1, ints_SV)
    own_SV = torch.bitwise_and(equal_SV, weight_bits_SV, out=temporaries.more_ints_SV)
    # Rows with NaN come along (they fail later), so every divisor is kept positive and every index in range.
    weight_S1 = own_SV.amax(1, keepdim=True).view(torch.float32).nan_to_num_(1.0).to(torch.int64).clamp_(min=1)
    missing_S1 = (target_S1 - above_S1).nan_to_num_(0.0).to(torch.int64)
    needed_S1 = torch.div(missing_S1 + weight_S1 - 1, weight_S1, rounding_mode="floor").clamp_(min=1)
    # The id of the last one needed: its block first, then its place in there.
    per_block_SG = equal_SV.view(num_rows, -1, BLOCK).sum(2, dtype=torch.int32).neg_().to(torch.int64)
    count_SG = per_block_SG.cumsum(1)
    block_S1 = (count_SG < needed_S1).sum(1, keepdim=True).clamp_(max=count_SG.shape[1] - 1)
    needed_S1 -= count_SG.gather(1, block_S1) - per_block_SG.gather(1, block_S1)
    ids_SW = block_token_ids(block_S1, rank_SV.shape[1])
    inside_SW = equal_SV.gather(1, ids_SW).neg_().cumsum(1)
    last_S = ids_SW[:, 0] + (inside_SW < needed_S1).sum(1).clamp_(max=BLOCK - 1)
    return _boundary(prefix_S1.squeeze(1), last_S)


def _drop_behind(
    rank_SV: torch.Tensor, probability_SV: torch.Tensor, boundary_S: torch.Tensor, temporaries: _Temporaries
) -> None:
    """Zero the probabilities behind the boundary, in place: kept is rank < limit, or rank = limit and id <= last."""
    limit_S1 = (boundary_S >> 32).to(torch.int32).unsqueeze(1)
    last_S1 = (boundary_S & 0x7FFFFFFF).to(torch.int32).unsqueeze(1)
    ids_V = torch.arange(rank_SV.shape[1], dtype=torch.int32, device=rank_SV.device)
    # All in sign bits of int32 differences, which cannot overflow: ranks and ids are not negative.
    keep_SV = torch.sub(ids_V, last_S1, out=temporaries.ints_SV)
    keep_SV.sub_(1).bitwise_right_shift_(31)
    keep_SV.add_(rank_SV).sub_(limit_S1).bitwise_right_shift_(31)
    probability_SV.view(torch.int32).bitwise_and_(keep_SV)


def _minus_one_where_equal(x_SV: torch.Tensor, y_S1: torch.Tensor, out_SV: torch.Tensor) -> torch.Tensor:
    """int32 -1 (all bits) where equal and 0 elsewhere, for arguments that are not negative."""
    return torch.bitwise_xor(x_SV, y_S1, out=out_SV).sub_(1).bitwise_right_shift_(31)
