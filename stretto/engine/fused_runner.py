"""The runner of a GPU: steps in few kernels, decode steps whole in a CUDA graph.

A step whose rows all decode is derived from the device's tables alone, padded to a size of the ladder and replayed; if
its rows are those of the step before, the host has nothing to send. Padding rows are slot 0 and touch page 0 only.
The layers of short steps with prompt chunks are in graphs too (`prompt_graphs.py`); those of longer ones are launched
kernel by kernel, the host far ahead of them.

Legend: T tokens, B rows, S sampled rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from stretto.attention.triton_paged import PagedStep, TritonPagedAttention
from stretto.engine.adjustment import adjust
from stretto.engine.graphs import FILTERED, FORWARD, NUM_KINDS, WHOLE, CudaRecorder, StepGraphs, ladder, token_ladder
from stretto.engine.logprobs import write_logprobs
from stretto.engine.prompt_graphs import PromptGraphs
from stretto.engine.runner import MakeRunner, RunnerParts, score_prompts
from stretto.engine.sampling_rows import SamplingMix
from stretto.engine.staging import PlanLayout, pack
from stretto.kernels.plan import StepInputs, apply_plan, derive_decode, derive_mixed
from stretto.kernels.prefill_attention import query_block, query_blocks
from stretto.kernels.prefill_work import PrefillWork
from stretto.kernels.sampling import SampleScratch, mask_stop_ids, sample_rows
from stretto.kernels.sampling_filters import FilterScratch, RowFilters
from stretto.kernels.split_sampling import AgreedMaxima, sample_split_rows
from stretto.models.fused import FusedDecoder, rows_of
from stretto.scheduler.batch import IntArray, StepPlan


def fused_runner(model: FusedDecoder, *, graphs: bool) -> MakeRunner:
    """Makes runners for `model`; with `graphs`, `prepare` captures the ladder up to `max_num_seqs`."""
    return partial(FusedRunner, model=model, graphs=graphs)


class FusedRunner:
    """`StepRunner` over a `FusedDecoder` and `TritonPagedAttention`."""

    def __init__(self, parts: RunnerParts, *, model: FusedDecoder, graphs: bool) -> None:
        config, device = parts.config, parts.tables.length_R.device
        self._parts = parts
        self._model = model
        self._attention = cast(TritonPagedAttention, parts.attention)
        self._kv_heads = model.config.num_kv_heads
        self._inputs = StepInputs.allocate(config.max_rows, config.max_num_batched_tokens, device)
        self._scratch = SampleScratch.allocate(config.max_rows, model.config.vocab_size, device)
        tables = parts.tables
        found = FilterScratch.allocate(config.max_rows, device)
        self._filters = RowFilters(tables.top_k_R, tables.top_p_R, tables.min_p_R, found)
        self._agreed = AgreedMaxima.allocate(config.max_rows, device)
        self._peers = model.group.peers_for(torch.empty(config.max_rows, 2, device=device))
        """Through which ranks exchange candidates; None: this is the only one, or logits have to be gathered."""
        sizes = ladder(config.max_rows)
        self.graphs = StepGraphs(sizes, NUM_KINDS, self._capture) if graphs else None
        tokens = config.max_num_batched_tokens
        self._prefill_works = {
            block_q: PrefillWork.allocate(tokens, config.max_rows, block_q, device)
            for block_q in query_blocks(model.config.head_dim)
        }
        self.prompt_graphs = PromptGraphs(
            model,
            self._attention,
            self._inputs,
            self._prefill_works,
            tables.page_table_RM,
            token_ladder(model.weights_per_layer, tokens) if graphs else (),
        )
        self._logits_SV = torch.empty(
            config.max_rows if graphs else 0, model.config.vocab_size, dtype=model.dtype, device=device
        )
        """Where graphs leave the logits of a FORWARD step: all sizes in one place, as no two are wanted at once."""
        self._rows_known: IntArray | None = None
        """The rows that `inputs.slot_B` holds; the very array, as an unchanged batch keeps it."""

    def prepare(self) -> None:
        """Compile the kernels and capture the graphs. Blocks."""
        if self.graphs is not None:
            self._warm_up()
            record = CudaRecorder()
            self.graphs.capture(record)
            self.prompt_graphs.capture(record)

    def close(self) -> None:
        """See `StepRunner`."""
        if self.graphs is not None:
            self.prompt_graphs.release()
            self.graphs.release()

    def _warm_up(self) -> None:
        """Run each path of a step with prompt chunks once, on the padding row: compiles its kernels."""
        config = self._parts.config
        several = config.max_rows - 1
        runs = ((0, 0, _PLAIN), (1, 0, _PLAIN), (0, 1, _PLAIN), (0, several, _PLAIN), (0, 0, _BIASED), (0, 0, _ALL))
        lengths = (_SHORT,) * len(runs) + (_LONG,)
        for length, (past, decodes, mix) in zip(lengths, (*runs, (1, 0, _PLAIN)), strict=True):
            tokens = min(length, config.max_model_len - 1, config.max_num_batched_tokens - decodes)
            plan = _padding_plan(tokens, past, decodes, mix)
            layout = PlanLayout.of(plan, config.max_stop_ids)
            words = np.zeros(layout.num_words, np.int32)
            pack(plan, layout, words)
            self.run(plan, layout, torch.from_numpy(words).to(self._inputs.slot_B.device))
        self._parts.tables.length_R[0] = 0

    def knows(self, plan: StepPlan) -> bool:
        """See `StepRunner`. hot path"""
        return plan.slots_B is self._rows_known and not len(plan.page_id_U) and not plan.admitted and not plan.adjusted

    def run(self, plan: StepPlan, layout: PlanLayout, staged: Tensor) -> None:
        """See `StepRunner`. hot path"""
        parts, rows = self._parts, layout.num_rows
        if self._attention.wants_lengths:
            self._attention.expect(plan.num_new_B, plan.start_B + plan.num_new_B)
        if not self.knows(plan):
            apply_plan(staged, layout, parts.tables, self._inputs)
            if layout.adjusted:
                tables = parts.tables
                tables.adjustment.admit(staged[: layout.num_words], layout.adjusted, tables.token_ids_RL)
            self._rows_known = plan.slots_B if not layout.num_prefill else None
        if layout.num_prefill:
            self._run_mixed(plan, layout, staged)
        else:
            mix, inputs = plan.mix, self._inputs
            kind = (FILTERED if mix.filters else WHOLE) if mix.only_chooses else FORWARD
            logits_SV = self._decode_step(rows, kind)
            if kind == FORWARD:
                self._choose(mix, logits_SV[:rows], inputs.slot_B[:rows], inputs.context_B[:rows])
        if parts.lengths_B is not None:
            parts.lengths_B[:rows] = parts.tables.length_R[self._inputs.slot_B[:rows]]

    def _decode_step(self, rows: int, kind: int) -> Tensor:
        """Logits of at least `rows` rows, if it is a FORWARD step."""
        if self.graphs is None:
            return self._decode(rows, kind)
        self.graphs.replay(rows, kind)
        return self._logits_SV

    def _capture(self, rows: int, kind: int) -> None:
        """`_decode` as graphs hold it."""
        logits_SV = self._decode(rows, kind)
        if kind == FORWARD:
            self._logits_SV[:rows].copy_(logits_SV)

    def _decode(self, rows: int, kind: int) -> Tensor:
        """A decode step of `rows` rows, padding included, from `inputs.slot_B` and the tables."""
        parts, model, inputs = self._parts, self._model, self._inputs
        tables, attention = parts.tables, self._attention
        residual_BD = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=inputs.slot_B.device)
        derive_decode(
            rows,
            parts.config.page_size,
            tables,
            inputs,
            attention.work_for(rows),
            self._kv_heads,
            model.embedding_VD,
            residual_BD,
            model.first_id,
        )
        model.embed_split(residual_BD)
        attention.begin(self._decode_step_of(rows))
        hidden = model.forward(residual_BD, attention.attend_projected, decodes=True)
        if kind == WHOLE and self._peers is not None:
            return self._sample_split(*hidden, inputs.slot_B, inputs.context_B)
        logits_SV = model.logits(*hidden)
        if kind != FORWARD:
            self._sample(logits_SV, inputs.slot_B, inputs.context_B, filters=kind == FILTERED)
        return logits_SV

    def _run_mixed(self, plan: StepPlan, layout: PlanLayout, staged: Tensor) -> None:
        parts, model, inputs = self._parts, self._model, self._inputs
        tables, attention, rows = parts.tables, self._attention, layout.num_rows
        padded = self.prompt_graphs.padded(plan.num_tokens)
        prefill = self._prefill_works[query_block(model.config.head_dim, padded or plan.num_tokens)]
        derive_mixed(
            staged,
            layout,
            plan.num_decode,
            padded or plan.num_tokens,
            parts.config.page_size,
            tables,
            inputs,
            attention.work_for(plan.num_decode),
            self._kv_heads,
            prefill,
        )
        last_S = inputs.last_token_S[: layout.num_sampled]
        hidden: tuple[Tensor, Tensor | None]
        if padded is not None:
            hidden = self.prompt_graphs.forward(plan.num_tokens, plan.num_decode)
            sampled = rows_of(*hidden, last_S)
        else:
            attention.begin(self._mixed_step(plan, prefill))
            residual_TD = model.embed(inputs.input_ids_T[: plan.num_tokens])
            wanted_S = None if layout.num_scored else last_S
            hidden = model.forward(residual_TD, attention.attend_projected, wanted_S=wanted_S)
            sampled = rows_of(*hidden, last_S) if layout.num_scored else hidden
        if layout.num_sampled:
            slot_S, position_S = inputs.slot_S[: layout.num_sampled], inputs.position_S[: layout.num_sampled]
            if self._peers is not None and plan.mix.only_chooses and not plan.mix.filters:
                self._sample_split(*sampled, slot_S, position_S)
            else:
                self._choose(plan.mix, model.logits(*sampled), slot_S, position_S)
        if layout.num_scored:

            def logits_of(index_S: Tensor) -> Tensor:
                return model.logits(*rows_of(*hidden, index_S)).float()

            score_prompts(parts, plan, layout, staged, logits_of)
        tables.length_R[inputs.slot_B[:rows]] = inputs.context_B[:rows]

    def _choose(self, mix: SamplingMix, logits_SV: Tensor, slot_S: Tensor, position_S: Tensor) -> None:
        """Sample from logits that nobody else needs, any mix; the order of things is `engine.sampler.sample`'s.

        Every mix ends in the same kernels, so that a row's token does not depend on what its neighbours ask for.
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
        tables = self._parts.tables
        sample_rows(
            logits_SV,
            slot_S,
            position_S,
            tables.temperature_R,
            tables.seed_R,
            tables.token_ids_RL,
            tables.length_R,
            self._parts.sampled.tokens_S,
            self._scratch,
            filters=self._filters if filters else None,
        )

    def _sample_split(
        self, residual_SD: Tensor, update_SD: Tensor | None, slot_S: Tensor, position_S: Tensor
    ) -> Tensor:
        """Sample rows without filters from this rank's part of their logits, which it returns, and the others'."""
        assert self._peers is not None
        model, tables = self._model, self._parts.tables
        logits_Sv = model.own_logits(residual_SD, update_SD)
        sample_split_rows(
            logits_Sv,
            model.token_ids,
            slot_S,
            position_S,
            tables.temperature_R,
            tables.seed_R,
            tables.token_ids_RL,
            tables.length_R,
            self._parts.sampled.tokens_S,
            self._scratch,
            self._agreed,
            self._peers,
        )
        return logits_Sv

    def _mixed_step(self, plan: StepPlan, prefill: PrefillWork) -> PagedStep:
        """That of a step with prompt chunks, for launching it kernel by kernel."""
        num_new_B = plan.num_new_B[plan.num_decode :]
        longest = int(num_new_B.max())
        return replace(
            self._decode_step_of(plan.num_decode),
            num_rows=len(plan.slots_B),
            prefill=prefill,
            prefill_programs=prefill.most_blocks(len(plan.prefill_tokens), len(num_new_B)),
            fresh=not plan.start_B[plan.num_decode :].any(),
            longest_chunk=longest,
            uniform=bool((num_new_B == longest).all()),
        )

    def _decode_step_of(self, rows: int) -> PagedStep:
        """That of a step whose rows all decode."""
        inputs = self._inputs
        return PagedStep(
            page_table_RM=self._parts.tables.page_table_RM,
            slot_B=inputs.slot_B,
            context_B=inputs.context_B,
            query_end_B=inputs.query_end_B,
            positions_T=inputs.positions_T,
            location_T=inputs.location_T,
            num_rows=rows,
            num_decode=rows,
            prefill=None,
            prefill_programs=0,
            fresh=True,
            longest_chunk=1,
        )


_PLAIN = SamplingMix(False, False, 0, False, False, False, -1)
_BIASED = replace(_PLAIN, max_biases=1)
_ALL = replace(_BIASED, any_top_p=True, any_min_tokens=True, num_logprobs=0)
"""With adjusted logits sampling runs in float32, which are kernels of their own."""
_SHORT, _LONG = 32, 1024
"""Chunks whose queries are cut into small and into large blocks."""


def _padding_plan(tokens: int, past: int, decodes: int, mix: SamplingMix) -> StepPlan:
    """A prompt chunk of the padding row after `past` tokens, behind `decodes` decode rows of it."""
    rows, none = decodes + 1, np.empty(0, np.int64)
    zeros_B = np.zeros(rows, np.int64)
    return StepPlan(
        index=0,
        slots_B=zeros_B,
        num_new_B=np.array([1] * decodes + [tokens]),
        start_B=zeros_B + past,
        num_decode=decodes,
        prefill_tokens=np.zeros(tokens, np.int32),
        sampled_S=np.arange(rows),
        position_S=zeros_B + past + 1,
        is_last_S=np.zeros(rows, np.bool_),
        admitted=(),
        page_slot_U=none,
        page_index_U=none,
        page_id_U=none,
        max_pages=1,
        page_table_BM=None,
        mix=mix,
    )
