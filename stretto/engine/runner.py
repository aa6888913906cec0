"""How a step's work runs on the engine stream: the runner interface, and the runner in plain torch.

A runner unpacks a staged plan, derives the inputs, runs the model, samples, feeds tokens back and advances lengths; it
owns no streams and enqueues nothing itself. Legend: T tokens, B rows, S sampled rows, U new pages, P prefill tokens,
Q scored positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from stretto.attention.base import AttentionBackend, AttentionInputs
from stretto.config import SchedulerConfig
from stretto.engine.adjustment import adjust
from stretto.engine.sampler import SampledOut, sample
from stretto.engine.scoring import ScoredOut, score
from stretto.engine.split_sampling import SplitModel, sample_split
from stretto.engine.staging import PlanLayout
from stretto.engine.tables import DeviceTables
from stretto.scheduler.batch import StepPlan

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FeedBack = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(slot_S, position_S, tokens_S): writes sampled tokens where the next step reads its input."""


class StepModel(Protocol):
    """What the engine needs of a model; flat tokens, no pages."""

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states hidden_TD of the step's tokens."""

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """float32 logits_SV."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What an engine gives the runner that it makes."""

    config: SchedulerConfig
    model: StepModel
    attention: AttentionBackend
    tables: DeviceTables
    sampled: SampledOut
    scored: ScoredOut
    feed_back: FeedBack
    lengths_B: torch.Tensor | None
    """int64: where the rows' lengths after the step go; None: nobody asks."""


class StepRunner(Protocol):
    """Runs steps, one after the other, as work on the engine stream."""

    def prepare(self) -> None:
        """Work to be run once before the first step (compile, capture)."""

    def knows(self, plan: StepPlan) -> bool:
        """Whether the plan needs no staging: the device has all of it from the step before. Host only. hot path"""

    def run(self, plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
        """All of a step. `staged` is the packed plan on the device, unless the runner knew the plan. hot path"""

    def close(self) -> None:
        """Give back what `prepare` made; nothing of it is under way. Idempotent."""


MakeRunner = Callable[[RunnerParts], StepRunner]


class EagerRunner:
    """Plain torch, for any device: what every other runner is compared with."""

    def __init__(self, parts: RunnerParts, split: SplitModel | None = None) -> None:
        """`split`: the model once more, if other ranks have parts of its logits."""
        self._parts = parts
        self._split = split
        self._arange = torch.arange(parts.config.max_num_batched_tokens + 1, device=parts.tables.length_R.device)

    def prepare(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def knows(self, plan: StepPlan) -> bool:
        """Never. hot path"""
        return False

    def run(self, plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
        """See `StepRunner`. hot path"""
        parts, tables, config = self._parts, self._parts.tables, self._parts.config
        words = staged[: layout.num_words]
        words64 = words.to(torch.int64)
        pieces = torch.split(words64, layout.sizes)
        slot_B, num_new_B, sampled_S, page_slot_U, page_index_U, page_U, admissions, prefill_P, *_ = pieces
        if layout.num_admitted:
            at = sum(layout.sizes[:6])
            packed = words[at : at + layout.sizes[6]].view(layout.num_admitted, -1)
            tables.admit(packed, admissions.view(layout.num_admitted, -1))
        if layout.adjusted:
            tables.adjustment.admit(words, layout.adjusted, tables.token_ids_RL)
        if layout.num_pages:
            tables.set_pages(page_slot_U, page_index_U, page_U)

        length_B = tables.length_R[slot_B]
        context_B = length_B + num_new_B
        if layout.num_prefill:
            query_start_B1 = torch.nn.functional.pad(num_new_B.cumsum(0), (1, 0))
            num_tokens = plan.num_tokens
            row_T = torch.repeat_interleave(self._arange[: layout.num_rows], num_new_B, output_size=num_tokens)
            slot_T = slot_B[row_T]
            positions_T = self._arange[:num_tokens] + (length_B - query_start_B1[:-1])[row_T]
            first = plan.num_decode
            tables.token_ids_RL[slot_T[first:], positions_T[first:]] = prefill_P
        else:
            query_start_B1 = self._arange[: layout.num_rows + 1]
            slot_T, positions_T = slot_B, length_B
        input_ids_T = tables.token_ids_RL[slot_T, positions_T]
        page_T = tables.page_table_RM[slot_T, torch.div(positions_T, config.page_size, rounding_mode="floor")]
        parts.attention.begin_step(
            AttentionInputs(
                page_table_BM=tables.page_table_RM[slot_B, : plan.max_pages],
                kv_location_T=page_T * config.page_size + positions_T % config.page_size,
                query_start_B1=query_start_B1,
                context_B=context_B,
                num_new_B_host=plan.num_new_B,
                context_B_host=plan.start_B + plan.num_new_B,
                page_table_BM_host=plan.page_table_BM,
            )
        )
        hidden_TD = parts.model.forward(input_ids_T, positions_T, parts.attention.attend)
        if layout.num_sampled:
            hidden_SD = hidden_TD[query_start_B1[1:][sampled_S] - 1] if layout.num_prefill else hidden_TD
            slot_S, position_S = slot_B[sampled_S], context_B[sampled_S]
            if self._split is not None and plan.mix.is_plain:
                choose_split(parts, plan, self._split, hidden_SD, slot_S, position_S)
            else:
                choose(parts, plan, parts.model.logits(hidden_SD), slot_S, position_S)
        if layout.num_scored:
            score_prompts(parts, plan, layout, staged, lambda index_S: parts.model.logits(hidden_TD[index_S]))
        tables.length_R[slot_B] = context_B
        if parts.lengths_B is not None:
            parts.lengths_B[: layout.num_rows] = tables.length_R[slot_B]


# hot path (of steps with such chunks)
def score_prompts(
    parts: RunnerParts,
    plan: StepPlan,
    layout: PlanLayout,
    staged: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Log-probabilities of the prompt tokens that the packed plan names; `logits_of` as in `engine.scoring.score`."""
    index_Q, target_Q = layout.scored_words(staged)
    score(logits_of, index_Q.to(torch.int64), target_Q.to(torch.int64), plan.num_scored_tops, parts.scored)


# hot path
def choose_split(
    parts: RunnerParts,
    plan: StepPlan,
    model: SplitModel,
    hidden_SD: torch.Tensor,
    slot_S: torch.Tensor,
    position_S: torch.Tensor,
) -> None:
    """`choose` for a plain mix, where every rank looks at its own part of the logits only."""
    sampled, rows = parts.sampled, parts.tables.sampling_rows(slot_S, position_S, plan.mix)
    sample_split(model.own_logits(hidden_SD), model.token_ids, rows, plan.mix, sampled, model.group)
    parts.feed_back(slot_S, position_S, sampled.tokens_S[: len(plan.sampled_S)])


# hot path
def choose(
    parts: RunnerParts, plan: StepPlan, logits_SV: torch.Tensor, slot_S: torch.Tensor, position_S: torch.Tensor
) -> None:
    """Sample from float32 logits, any mix, and write the tokens where the next step reads its input."""
    tables, mix, sampled = parts.tables, plan.mix, parts.sampled
    adjusted_SV = None
    if mix.adjusts:
        adjusted_SV = adjust(
            logits_SV, tables.adjustment, tables.token_ids_RL, slot_S, position_S, mix, sampled.scratch
        )
    rows = tables.sampling_rows(slot_S, position_S, mix)
    sample(logits_SV, rows, mix, sampled, adjusted_SV)
    parts.feed_back(slot_S, position_S, parts.sampled.tokens_S[: len(plan.sampled_S)])
