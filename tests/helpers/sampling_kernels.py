"""Rows sampled by the kernels, and the tokens that plain torch says their filters keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from stretto.engine.filters import distances, drop_filtered
from stretto.engine.ordering import BLOCK
from stretto.engine.scratch import Scratch
from stretto.kernels.sampling import SampleScratch, sample_rows
from stretto.kernels.sampling_filters import FilterScratch, RowFilters
from tests.helpers.sampling import Row, tensors_of


def by_slot(values_S: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table whose slot 0 is 0 and whose slots 1, 2, ... have the values."""
    return F.pad(values_S, (0, 0) * (values_S.dim() - 1) + (1, 0)).to(device)


class KernelRows:
    """Rows in the slots 1, 2, ...; `sample` runs the kernels on logits of theirs, on the logits' device."""

    def __init__(
        self,
        rows: Sequence[Row],
        vocabulary: int,
        device: torch.device,
        *,
        block: int = 4096,
        candidates: int = 8192,
        programs: int | None = None,
        sampled: int = 16384,
    ) -> None:
        tensors, count = tensors_of(rows), len(rows)
        self.slot_S = torch.arange(1, count + 1, device=device)
        self.position_S = tensors.position_S.to(device)
        self.temperature_R = by_slot(tensors.temperature_S, device)
        self.seed_R = by_slot(tensors.seed_S, device)
        self.filters = RowFilters(
            by_slot(tensors.top_k_S, device),
            by_slot(tensors.top_p_S, device),
            by_slot(tensors.min_p_S, device),
            FilterScratch.allocate(count, device, candidates=candidates, programs=programs, sampled=sampled),
        )
        self.scratch = SampleScratch.allocate(count, vocabulary, device, block=block)
        self.token_ids_RL = torch.zeros(count + 1, 64, dtype=torch.int64, device=device)
        self.length_R = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.tokens_S = torch.full((count,), -9, dtype=torch.int64, device=device)

    def sample(self, logits_SV: torch.Tensor, *, filtered: bool = True) -> torch.Tensor:
        """The rows' tokens [S]; the boundaries are in the scratch afterwards."""
        sample_rows(
            logits_SV,
            self.slot_S,
            self.position_S,
            self.temperature_R,
            self.seed_R,
            self.token_ids_RL,
            self.length_R,
            self.tokens_S,
            self.scratch,
            filters=self.filters if filtered else None,
        )
        return self.tokens_S

    def kept(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Which possible tokens lie within the boundaries that the kernels have found: bool [S, V]."""
        rank_SV, _ = self._ranks(logits_SV)
        limit_S1, last_S1 = self.filters.scratch.limit_S[:, None], self.filters.scratch.last_S[:, None]
        ids_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
        kept_SV = (rank_SV < limit_S1) | ((rank_SV == limit_S1) & (ids_V <= last_S1))
        return kept_SV & (self._probabilities(rank_SV) > 0)

    def kept_by_reference(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Which possible tokens `engine.filters` keeps: bool [S, V]. Greedy rows keep all."""
        vocabulary = logits_SV.shape[1]
        rank_SV, random_S = self._ranks(logits_SV)
        rank_SV = F.pad(rank_SV, (0, -vocabulary % BLOCK), value=0x7F800000)
        probability_SV = self._probabilities(rank_SV)
        top_k_S, top_p_S, min_p_S = (
            table[1:] for table in (self.filters.top_k_R, self.filters.top_p_R, self.filters.min_p_R)
        )
        drop_filtered(
            rank_SV,
            probability_SV,
            torch.where((top_k_S > 0) & random_S, top_k_S, vocabulary),
            top_p_S.masked_fill(~random_S, 1.0),
            min_p_S.masked_fill(~random_S, 0.0),
            Scratch(),
        )
        return probability_SV[:, :vocabulary] > 0

    def _ranks(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ranks [S, V], is random [S])."""
        logits_SV, temperature_S = logits_SV.float(), self.temperature_R[1:]
        random_S = temperature_S >= 1e-5
        divisor_S1 = temperature_S.masked_fill(~random_S, 1.0)[:, None]
        rank_SV = distances(logits_SV.amax(1, keepdim=True), logits_SV, divisor_S1)
        return rank_SV.view(torch.int32), random_S

    def _probabilities(self, rank_SV: torch.Tensor) -> torch.Tensor:
        negated_SV = -rank_SV.view(torch.float32)
        if negated_SV.is_cuda:
            return negated_SV.exp_()
        # The interpreter's exp, which may differ from torch's in the last bit.
        return torch.from_numpy(np.exp(negated_SV.numpy()))
