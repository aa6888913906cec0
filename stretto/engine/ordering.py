"""The one order of tokens that everything in sampling uses: by value, best first, and by lowest id among equals.

Owns argmax and top-k under that order, which `torch.topk` leaves open on ties. Both look at the maxima of blocks of
the vocabulary first, so that most of it is read once, at memory speed. Legend: S sampled rows, V vocabulary, G blocks,
W tokens of a block, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 64
"""Tokens of a block of the vocabulary."""

RankOf = Callable[[torch.Tensor], torch.Tensor]
"""Maps values [S, ...] to int32 ranks of the same shape, smaller for larger values: what candidates are sorted by."""

_LOW_32 = 0xFFFFFFFF


# hot path
def block_maxima(x_SV: torch.Tensor) -> torch.Tensor:
    """The largest value of each block of `BLOCK` tokens, [S, G]; the last block may be short. NaN wins its block."""
    vocabulary = x_SV.shape[1]
    whole = vocabulary - vocabulary % BLOCK
    if whole == 0:
        return x_SV.amax(1, keepdim=True)
    maxima_SG: torch.Tensor = x_SV[:, :whole].view(-1, whole // BLOCK, BLOCK).amax(2)
    if whole == vocabulary:
        return maxima_SG
    return torch.cat((maxima_SG, x_SV[:, whole:].amax(1, keepdim=True)), 1)


# hot path
def first_argmax(x_SV: torch.Tensor, maxima_SG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row and the lowest id that has it: values [S], int64 ids [S] in [0, V).

    `maxima_SG` is `block_maxima(x_SV)`. A NaN counts as largest, so the value alone tells a row that cannot be used.
    """
    ids_SW = block_token_ids(maxima_SG.argmax(1, keepdim=True), x_SV.shape[1])
    values_SW = x_SV.gather(1, ids_SW)
    within_S1 = values_SW.argmax(1, keepdim=True)
    return values_SW.gather(1, within_S1).squeeze(1), ids_SW.gather(1, within_S1).squeeze(1)


# hot path
def best_candidates(x_SV: torch.Tensor, maxima_SG: torch.Tensor, count: int, rank_of: RankOf) -> torch.Tensor:
    """The ids of the `count` best tokens of each row in order (rank, then lowest id): int64 [S, count], all in [0, V).

    `rank_of` must never rank a smaller value better than a larger one; `count` is at most V.
    """
    num_rows, vocabulary = x_SV.shape
    num_blocks = maxima_SG.shape[1]
    # The best `count` tokens lie in the `count` blocks whose best tokens are best.
    if count < num_blocks:
        keys_SG = _pack(rank_of(maxima_SG), torch.arange(num_blocks, device=x_SV.device))
        blocks_SB = keys_SG.topk(count, dim=1, largest=False).values & _LOW_32
        ids_SX = block_token_ids(blocks_SB, vocabulary, clamp=False)
        # Ids past the end of a short last block must not come twice: they rank behind everything.
        outside_SX = ids_SX >= vocabulary
        ranks_SX = rank_of(x_SV.gather(1, ids_SX.clamp(max=vocabulary - 1)))
        keys_SX = _pack(ranks_SX, ids_SX).masked_fill_(outside_SX, torch.iinfo(torch.int64).max)
    else:
        keys_SX = _pack(rank_of(x_SV), torch.arange(vocabulary, device=x_SV.device).expand(num_rows, -1))
    return keys_SX.topk(count, dim=1, largest=False, sorted=True).values & _LOW_32


def descending_rank(x: torch.Tensor) -> torch.Tensor:
    """A `RankOf` by the value itself: int32, smaller for larger float32 values, equal for -0.0 and 0.0."""
    bits = (x + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).bitwise_not_()


def block_token_ids(blocks_SB: torch.Tensor, vocabulary: int, *, clamp: bool = True) -> torch.Tensor:
    """The token ids of whole blocks, int64 [S, B * BLOCK]; with `clamp`, those past the end repeat the last id."""
    within_W = torch.arange(BLOCK, device=blocks_SB.device)
    ids_SX = (blocks_SB.unsqueeze(2) * BLOCK + within_W).flatten(1)
    return ids_SX.clamp_(max=vocabulary - 1) if clamp else ids_SX


def _pack(ranks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort by rank, then by id (< 2**32); distinct, so that no sort is left a choice."""
    return (ranks.to(torch.int64) << 32) | ids
