"""The runner of a GPU: steps in few kernels, decode steps whole in a CUDA graph.

A step whose rows all decode is derived from the device's tables alone, padded to a size of the ladder and replayed; if
its rows are those of the step before, the host has nothing to send. Padding rows are slot 0 and touch page 0 only.
The layers of short steps with prompt chunks, and of steps as large as they may be, are in graphs too
(`prompt_graphs.py`); those of others are launched kernel by kernel, the host far ahead of them.

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
from stretto.engine.fused_choice import FusedChoice, kind_of
from stretto.engine.graphs import FORWARD, NUM_KINDS, CudaRecorder, StepGraphs, choice_ladder, ladder, token_ladder
from stretto.engine.padding_plans import padding_plans
from stretto.engine.prompt_graphs import PromptGraphs
from stretto.engine.runner import MakeRunner, RunnerParts, score_prompts
from stretto.engine.staging import PlanLayout, pack
from stretto.kernels.plan import StepInputs, apply_plan, derive_decode
from stretto.kernels.plan_mixed import derive_mixed
from stretto.kernels.prefill_work import PrefillWork
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
        self._choice = FusedChoice(parts, model)
        self.graphs = StepGraphs(ladder(config.max_rows), NUM_KINDS, self._capture) if graphs else None
        tokens = config.max_num_batched_tokens
        self._prefill_works = {
            block_q: PrefillWork.allocate(tokens, config.max_rows, block_q, device)
            for block_q in self._attention.query_blocks
        }
        prompt_sizes = token_ladder(model.weights_per_layer, tokens) if graphs else ()
        self._equal_lengths = self._attention.equal_lengths(tokens, config.max_model_len - 1) if graphs else ()
        """Of whole prompts, for which attention is prepared in steps that they fill; none where cuDNN turns out not to
        serve them."""
        choices = choice_ladder(config.max_rows) if prompt_sizes else ()
        self.prompt_graphs = PromptGraphs(
            model,
            self._attention,
            self._inputs,
            self._prefill_works,
            parts.tables.page_table_RM,
            prompt_sizes,
            choices,
            self._equal_lengths if prompt_sizes[-1:] == (tokens,) else (),
        )
        self.choice_graphs = StepGraphs(choices, NUM_KINDS, self._choose_wanted)
        """What follows `prompt_graphs`, by the number of sampled rows."""
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
            self.prompt_graphs.capture(record, equal=len(self._equal_lengths) > 0)
            self.choice_graphs.capture(record)
            self._parts.tables.length_R[0] = 0

    @property
    def capture_s(self) -> float:
        """Seconds that `prepare` took to capture graphs, all of whose work had been run before; 0 without graphs."""
        if self.graphs is None:
            return 0.0
        return self.graphs.capture_s + self.prompt_graphs.capture_s + self.choice_graphs.capture_s

    def close(self) -> None:
        """See `StepRunner`."""
        if self.graphs is not None:
            self.choice_graphs.release()
            self.prompt_graphs.release()
            self.graphs.release()

    def _warm_up(self) -> None:
        """Run each path of a step with prompt chunks once, on the padding row: compiles its kernels."""
        config = self._parts.config
        self._model.warm_up(config.max_num_batched_tokens)
        self._equal_lengths = self._attention.prepare_equal(config.max_num_batched_tokens, self._equal_lengths)
        for past, plan in padding_plans(config, self._attention.row_steps):
            layout = PlanLayout.of(plan, config.max_stop_ids)
            words = np.zeros(layout.num_words, np.int32)
            pack(plan, layout, words)
            self._parts.tables.length_R[0] = past  # or the row would outgrow its tables, run by run
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
            kind = kind_of(mix)
            logits_SV = self._decode_step(rows, kind)
            if kind == FORWARD:
                self._choice.finish(mix, logits_SV[:rows], inputs.slot_B[:rows], inputs.context_B[:rows])
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
        return self._choice.run(*hidden, inputs.slot_B, inputs.context_B, kind)

    def _choose_wanted(self, count: int, kind: int) -> None:
        """What follows `prompt_graphs`, as graphs hold it: tokens of `count` sampled rows, padding included, and the
        lengths of all rows."""
        inputs = self._inputs
        residual_SD, update_SD = (result_SD[:count] for result_SD in self.prompt_graphs.results)
        slot_S, position_S = inputs.slot_S[:count], inputs.position_S[:count]
        logits_SV = self._choice.run(residual_SD, update_SD, slot_S, position_S, kind)
        if kind == FORWARD:
            self._logits_SV[:count].copy_(logits_SV)
        self._parts.tables.length_R[inputs.slot_B] = inputs.context_B

    def _run_mixed(self, plan: StepPlan, layout: PlanLayout, staged: Tensor) -> None:
        parts, inputs, attention, rows = self._parts, self._inputs, self._attention, layout.num_rows
        # Scoring prompts takes more than the rows that graphs leave.
        captured = None if layout.num_scored else self.prompt_graphs.padded(plan.num_tokens)
        size = captured or plan.num_tokens
        prefill = self._prefill_works[attention.query_block(size)]
        derive_mixed(
            staged,
            layout,
            plan.num_decode,
            size,
            parts.config.page_size,
            parts.tables,
            inputs,
            attention.work_for(plan.num_decode),
            self._kv_heads,
            prefill,
        )
        count, kind = layout.num_sampled, kind_of(plan.mix)
        slot_S, position_S = inputs.slot_S[:count], inputs.position_S[:count]
        if captured is None:
            hidden = self._launch_layers(plan, layout, prefill)
            if layout.num_scored:
                self._score_prompts(plan, layout, staged, *hidden)
                hidden = rows_of(*hidden, inputs.last_token_S[:count])
            if count:
                logits_SV = self._choice.run(*hidden, slot_S, position_S, kind)
        else:
            self.prompt_graphs.replay(plan.num_tokens, plan.num_decode, self._equal_chunks(plan))
            if count:
                self.choice_graphs.replay(count, kind)
                logits_SV = self._logits_SV[:count]
        if count and kind == FORWARD:
            self._choice.finish(plan.mix, logits_SV, slot_S, position_S)
        if captured is None or not count:
            parts.tables.length_R[inputs.slot_B[:rows]] = inputs.context_B[:rows]

    def _score_prompts(
        self, plan: StepPlan, layout: PlanLayout, staged: Tensor, residual_TD: Tensor, update_TD: Tensor | None
    ) -> None:
        def logits_of(index_S: Tensor) -> Tensor:
            return self._model.logits(*rows_of(residual_TD, update_TD, index_S)).float()

        score_prompts(self._parts, plan, layout, staged, logits_of)

    def _equal_chunks(self, plan: StepPlan) -> int:
        """See `PagedStep`. hot path"""
        length = int(plan.num_new_B[0])
        if plan.num_tokens < self._parts.config.max_num_batched_tokens or length not in self._equal_lengths:
            return 0
        return 0 if plan.start_B.any() or (plan.num_new_B != length).any() else length

    def _launch_layers(self, plan: StepPlan, layout: PlanLayout, prefill: PrefillWork) -> tuple[Tensor, Tensor | None]:
        """(residual, update) of the sampled rows; of all tokens if some of the prompt's are scored."""
        model, inputs, attention = self._model, self._inputs, self._attention
        attention.begin(self._mixed_step(plan, prefill))
        residual_TD = model.embed(inputs.input_ids_T[: plan.num_tokens])
        wanted_S = None if layout.num_scored else inputs.last_token_S[: layout.num_sampled]
        return model.forward(residual_TD, attention.attend_projected, wanted_S=wanted_S)

    def _mixed_step(self, plan: StepPlan, prefill: PrefillWork) -> PagedStep:
        """That of a step with prompt chunks, for launching it kernel by kernel."""
        num_new_B = plan.num_new_B[plan.num_decode :]
        return replace(
            self._decode_step_of(plan.num_decode),
            num_rows=len(plan.slots_B),
            prefill=prefill,
            prefill_programs=prefill.most_blocks(len(plan.prefill_tokens), len(num_new_B)),
            equal_chunks=self._equal_chunks(plan),
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
        )
