"""From hidden states to tokens in the kernels of a GPU: the head, sampling of any mix, token feedback and lengths.

Every mix ends in the same kernels, so that a row's token does not depend on what its neighbours ask for. Owns the
kernels' scratch. Legend: S sampled rows, D hidden, V vocabulary, v the rank's part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.engine.adjustment import adjust
from stretto.engine.graphs import FILTERED, FORWARD, WHOLE
from stretto.engine.logprobs import write_logprobs
from stretto.engine.runner import RunnerParts
from stretto.engine.sampling_rows import SamplingMix
from stretto.kernels.sampling import SampleScratch, mask_stop_ids, sample_rows
from stretto.kernels.sampling_filters import FilterScratch, RowFilters
from stretto.kernels.split_sampling import AgreedMaxima, sample_split_rows
from stretto.models.fused import FusedDecoder


# hot path
def kind_of(mix: SamplingMix) -> int:
    """The kind of graphs that serves `mix`."""
    if not mix.only_chooses:
        return FORWARD
    return FILTERED if mix.filters else WHOLE


class FusedChoice:
    """Chooses the tokens of rows; all calls are work on the engine stream. hot path"""

    def __init__(self, parts: RunnerParts, model: FusedDecoder) -> None:
        config, device, tables = parts.config, parts.tables.length_R.device, parts.tables
        self._parts = parts
        self._model = model
        self._tables = (
            tables.temperature_R,
            tables.seed_R,
            tables.token_ids_RL,
            tables.length_R,
            parts.sampled.tokens_S,
            SampleScratch.allocate(config.max_rows, model.config.vocab_size, device),
        )
        """What sampling reads and writes beside the step's rows, whichever ranks have their logits."""
        found = FilterScratch.allocate(config.max_rows, device)
        self._filters = RowFilters(tables.top_k_R, tables.top_p_R, tables.min_p_R, found)
        self._agreed = AgreedMaxima.allocate(config.max_rows, device)
        self._peers = model.group.peers_for(torch.empty(config.max_rows, 2, device=device))
        """Through which ranks exchange candidates; None: this is the only one, or logits have to be gathered."""

    def run(
        self, residual_SD: Tensor, update_SD: Tensor | None, slot_S: Tensor, position_S: Tensor, kind: int
    ) -> Tensor:
        """Logits of what `FusedDecoder.forward` gave. In a step that is not FORWARD, rows are sampled from them."""
        if kind == WHOLE and self._peers is not None:
            return self._sample_split(residual_SD, update_SD, slot_S, position_S)
        logits_SV = self._model.logits(residual_SD, update_SD)
        if kind != FORWARD:
            self._sample(logits_SV, slot_S, position_S, filters=kind == FILTERED)
        return logits_SV

    def finish(self, mix: SamplingMix, logits_SV: Tensor, slot_S: Tensor, position_S: Tensor) -> None:
        """The rest of a FORWARD step: sample from logits that nobody else needs, and report.

        The order of things is `engine.sampler.sample`'s.
        """
        tables, out = self._parts.tables, self._parts.sampled
        raw_SV = logits_SV.float() if mix.adjusts or mix.num_logprobs >= 0 else logits_SV
        if mix.adjusts:
            logits_SV = adjust(raw_SV, tables.adjustment, tables.token_ids_RL, slot_S, position_S, mix, out.scratch)
        elif logits_SV is raw_SV and mix.any_min_tokens and mix.num_logprobs >= 0:
            logits_SV = raw_SV.clone()
        if mix.any_min_tokens:
            mask_stop_ids(logits_SV, slot_S, position_S, tables.min_position_R, tables.stop_ids_RE)
        self._sample(logits_SV, slot_S, position_S, filters=mix.filters)
        if mix.num_logprobs >= 0:
            rows = raw_SV.shape[0]
            write_logprobs(
                raw_SV,
                out.tokens_S[:rows],
                mix.num_logprobs,
                logprob_S=out.logprob_S[:rows],
                rank_S=out.rank_S[:rows],
                top_ids_SL=out.top_ids_SL[:rows],
                top_logprobs_SL=out.top_logprobs_SL[:rows],
            )

    def _sample(self, logits_SV: Tensor, slot_S: Tensor, position_S: Tensor, *, filters: bool) -> None:
        sample_rows(logits_SV, slot_S, position_S, *self._tables, filters=self._filters if filters else None)

    def _sample_split(
        self, residual_SD: Tensor, update_SD: Tensor | None, slot_S: Tensor, position_S: Tensor
    ) -> Tensor:
        """Sample rows without filters from this rank's part of their logits, which it returns, and the others'."""
        assert self._peers is not None
        model = self._model
        logits_Sv = model.own_logits(residual_SD, update_SD)
        sample_split_rows(logits_Sv, model.token_ids, slot_S, position_S, *self._tables, self._agreed, self._peers)
        return logits_Sv
