"""Samples from logits of which every rank of a tensor group has a part, without bringing the parts together.

For steps of greedy rows and plain temperatures: each rank finds its own best candidates, and four numbers a row are
exchanged (benchmarks/tp_sampling.py compares). Any other mix is sampled from gathered logits, by `sampler`. Legend: S
sampled rows, v the rank's tokens, R ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stretto.distributed.group import TensorGroup
from stretto.engine.ordering import BLOCK, block_maxima, first_argmax
from stretto.engine.random import negative_exponentials, row_keys, token_lanes
from stretto.engine.sampler import HIGHEST_TEMPERATURE, SampledOut, rows_at_once
from stretto.engine.sampling_rows import GREEDY_BELOW, SamplingMix, SamplingRows
from stretto.engine.scratch import Scratch


class SplitModel(Protocol):
    """A model whose ranks each have a part of the logits."""

    @property
    def group(self) -> TensorGroup:
        """The ranks."""

    @property
    def token_ids(self) -> range:
        """The ids whose logits this rank has; parts follow each other in the order of the ranks."""

    def own_logits(self, hidden_SD: Tensor) -> Tensor:
        """Their logits: float32 [S, v], and perhaps padding behind them. hot path"""


# hot path
def sample_split(
    logits_Sv: Tensor,
    token_ids: range,
    rows: SamplingRows,
    mix: SamplingMix,
    out: SampledOut,
    group: TensorGroup,
) -> None:
    """Sample one token for each row into `out.tokens_S`, the same on every rank; as `sample` does.

    `logits_Sv`: float32 [S, v], this rank's; `token_ids` are the ids of its first columns, any others are padding.
    `mix` must be plain. Of two tokens whose random scores differ in the last bit, `sample` may choose the other one, as
    it rounds relative to the vocabulary's best logit, not to the rank's. Waits for the other ranks on a CPU, as
    collectives do.
    """
    num_rows = logits_Sv.shape[0]
    # Largest logit, its id, best random score, its id; all exact in float64.
    mine_S4 = torch.full((num_rows, 4), -torch.inf, dtype=torch.float64, device=logits_Sv.device)
    if len(token_ids):
        step = num_rows if mix.all_greedy else rows_at_once(num_rows, len(token_ids), logits_Sv.device)
        for start in range(0, num_rows, max(1, step)):
            part = slice(start, min(start + step, num_rows))
            _find_candidates(
                logits_Sv[part, : len(token_ids)],
                token_ids.start,
                rows.slice(part.start, part.stop),
                mix,
                mine_S4[part],
                out.scratch,
            )
    all_SR4 = group.all_gather(mine_S4, 4 * group.size).view(num_rows, group.size, 4)
    # Ranks are in the order of their ids, so the first of equals is the lowest id. A NaN counts as largest.
    logit_SR = all_SR4[:, :, 0]
    best_S1 = logit_SR.amax(1, keepdim=True)
    chosen_S = _id_at(all_SR4[:, :, 1], logit_SR.argmax(1, keepdim=True))
    if not mix.all_greedy:
        greedy_S, temperature_S1 = _temperatures(rows)
        score_SR = all_SR4[:, :, 2] * ((best_S1 - logit_SR) / temperature_S1).exp_()
        score_SR = score_SR.masked_fill_(logit_SR == -torch.inf, -torch.inf)
        drawn_S = _id_at(all_SR4[:, :, 3], score_SR.argmax(1, keepdim=True))
        chosen_S = torch.where(greedy_S, chosen_S, drawn_S)
    out.tokens_S[:num_rows] = chosen_S.masked_fill(~best_S1.squeeze(1).isfinite(), -1.0).to(torch.int64)


def _find_candidates(
    logits_Sv: Tensor, first_id: int, rows: SamplingRows, mix: SamplingMix, out_S4: Tensor, scratch: Scratch
) -> None:
    """Write this rank's best token and, for a random row, its best draw."""
    best_S, index_S = first_argmax(logits_Sv, block_maxima(logits_Sv))
    out_S4[:, 0] = best_S
    out_S4[:, 1] = index_S + first_id
    if mix.all_greedy:
        return
    num_rows, width = logits_Sv.shape
    device = logits_Sv.device
    _, temperature_S1 = _temperatures(rows)
    shape = (num_rows, width + -width % BLOCK)
    probability_Sv = scratch.take("sampler.probability", shape, torch.float32, device)
    probability_Sv[:, width:].fill_(0.0)
    own_Sv = torch.sub(logits_Sv, best_S.unsqueeze(1), out=probability_Sv[:, :width])
    own_Sv.div_(temperature_S1).exp_()
    ids_v = torch.arange(first_id, first_id + shape[1], dtype=torch.int32, device=device)
    bits_Sv = scratch.take("sampler.bits", shape, torch.int32, device)
    spare_Sv = scratch.take("sampler.spare", shape, torch.int32, device)
    keys_S = row_keys(rows.seed_S, rows.position_S)
    score_Sv = negative_exponentials(keys_S, token_lanes(ids_v), bits_Sv, spare_Sv).div_(probability_Sv)
    score_S, drawn_S = first_argmax(score_Sv, block_maxima(score_Sv))
    out_S4[:, 2] = score_S
    out_S4[:, 3] = drawn_S + first_id


def _temperatures(rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Which rows are greedy [S], and by what logits are divided [S, 1]."""
    greedy_S = rows.temperature_S < GREEDY_BELOW
    return greedy_S, rows.temperature_S.clamp(max=HIGHEST_TEMPERATURE).masked_fill_(greedy_S, 1.0).unsqueeze(1)


def _id_at(ids_SR: Tensor, rank_S1: Tensor) -> Tensor:
    return ids_SR.gather(1, rank_S1).squeeze(1)
