"""What a step is on the host: the plan that is launched, and the output that its results become.

Owns only frozen records. Legend: B rows of the step, S sampled rows, T tokens of the step, U new pages,
Q scored positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.engine.sampling_rows import SamplingMix
from stretto.prompt_logprobs import ScoredTokens
from stretto.request import Request, TokenArray

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """By what the logits of a slot are changed before sampling; goes up once, when a request gets the slot.

    Its numbers as they were then: nothing here is looked up again while steps run.
    """

    slot: int
    prompt_length: int
    """Tokens before the output, whatever of the output is computed again after a preemption."""
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: TokenArray
    biases: npt.NDArray[np.float32]
    """What is added to the logit of each of the ids."""
    cached_tokens: TokenArray
    """int32: the sequence up to the first chunk, if penalties need it: its KV is cached, so no chunk brings it."""

    @property
    def penalised(self) -> bool:
        """Whether any of the penalties is on."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Positions of a prefill row after which prompt tokens are scored (their log-probabilities are wanted)."""

    row: int
    """Index into B."""
    at: int
    """Index into T of the first of them; the others follow it."""
    first: int
    """Its position in the sequence."""
    tokens: TokenArray
    """int32: the prompt token after each."""
    num_tops: int
    """Likeliest tokens to be reported with each."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as scheduled. All arrays are snapshots of this step: later steps never change them.

    Decode rows come first, then prefill rows; both in order of arrival within a priority.
    """

    index: int
    slots_B: IntArray
    num_new_B: IntArray
    """New tokens of each row (decode: 1)."""
    start_B: IntArray
    """Length of each row before this step."""
    num_decode: int
    """The first rows, which take their input token from the device's token table."""
    prefill_tokens: TokenArray
    """int32: the new tokens of the prefill rows, one row after the other."""
    sampled_S: IntArray
    """Indices into B of the rows that get a token (all decode rows, and prefill rows with their last chunk)."""
    position_S: IntArray
    """Index in its sequence of the token that each sampled row gets."""
    is_last_S: BoolArray
    """The sampled token is the last by length: judged here, with the lengths of this step."""
    admitted: tuple[Request, ...]
    """Requests whose slot is new with this step; their parameters go up with it."""
    page_slot_U: IntArray
    page_index_U: IntArray
    page_id_U: IntArray
    """New pages: the slot's page number `page_index` is the pool's page `page_id`."""
    max_pages: int
    """M: most pages of a row."""
    page_table_BM: IntArray | None
    """Copy of the host's page table for the rows, where the attention backend asks for one."""
    mix: SamplingMix
    adjusted: tuple[Adjustment, ...] = ()
    """Of the admitted requests, those that change logits, or whose slot is left over from one that did."""
    scored: tuple[ScoredChunk, ...] = ()
    """Whose prompt's log-probabilities this step gives, in the order of the rows."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_decode + len(self.prefill_tokens)

    @property
    def num_scored(self) -> int:
        """Q."""
        return sum(len(chunk.tokens) for chunk in self.scored)

    @property
    def num_scored_tops(self) -> int:
        """Likeliest tokens to be reported with each scored position, at least."""
        return max((chunk.num_tops for chunk in self.scored), default=0)


@dataclass(frozen=True, slots=True)
class StepResults:
    """What the device gave for a step: views of its pinned result buffer, valid until the step is processed."""

    tokens_S: IntArray
    """-1 where the logits were not numbers."""
    logprob_S: npt.NDArray[np.float32] | None = None
    rank_S: IntArray | None = None
    top_ids_SL: IntArray | None = None
    top_logprobs_SL: npt.NDArray[np.float32] | None = None
    lengths_B: IntArray | None = None
    """Lengths of the step's rows after it as the device has them (only when everything is checked)."""
    scored: ScoredTokens | None = None
    """Of the plan's scored positions, if it has any."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a processed step gave, as arrays: nothing here costs the host time per token until it is looked at."""

    index: int
    uids: IntArray
    """int64: the request of each new token; requests that had ended before this step's results are not in it."""
    tokens: TokenArray
    """int32: the new token of each."""
    finished: tuple[Request, ...]
    """Requests that ended with this step, their final token included above; each request is in one output only."""
