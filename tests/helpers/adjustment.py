"""logit_bias and penalties by a host that recounts every sequence, and rows of sequences that the device adjusts."""

from __future__ import annotations

import collections.abc
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from stretto.engine.adjustment import AdjustmentTables, adjust
from stretto.engine.sampling_rows import SamplingMix
from stretto.engine.scratch import Scratch
from stretto.engine.staging import PlanLayout, pack
from stretto.request import SamplingParams
from stretto.scheduler.batch import Adjustment, StepPlan
from tests.helpers.sampling import Row, mix_of


def adjusted_logits(
    logits_V: npt.NDArray[np.float32],
    prompt: collections.abc.Sequence[int],
    output: collections.abc.Sequence[int],
    params: SamplingParams,
) -> npt.NDArray[np.float32]:
    """The logits to sample from after `prompt` and `output`, each step rounded to float32."""
    adjusted = logits_V.astype(np.float32).copy()
    for token, bias in (params.logit_bias or {}).items():
        adjusted[token] += np.float32(bias)
    repetition, frequency, presence = (
        np.float32(value) for value in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    for token in {*prompt, *output}:
        logit = adjusted[token]
        adjusted[token] = logit / repetition if logit > 0 else logit * repetition
    for token, count in Counter(output).items():
        adjusted[token] -= np.float32(count) * frequency
        adjusted[token] -= presence
    return adjusted


GARBAGE = 2**40
"""What nobody may look at in the token table."""
WIDTH = 40


@dataclass(frozen=True)
class Sequence:
    """One row: what it has so far, and how its logits are changed."""

    prompt: list[int]
    output: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


def staged(sequences: list[Sequence], slots: list[int], cached: int) -> tuple[torch.Tensor, PlanLayout]:
    """A packed plan that only adjusts: the given slots, with the first `cached` tokens of each."""
    nothing = np.empty(0, np.int64)
    adjusted = tuple(
        Adjustment(
            slot,
            len(s.prompt),
            s.params.presence_penalty,
            s.params.frequency_penalty,
            s.params.repetition_penalty,
            np.array(list(s.params.logit_bias or ()), np.int32),
            np.array(list((s.params.logit_bias or {}).values()), np.float32),
            np.array((s.prompt + s.output)[:cached], np.int32),
        )
        for slot, s in zip(slots, sequences, strict=True)
    )
    none = np.empty(0, np.int32)
    mix = mix_of([], 1)
    plan = StepPlan(
        0, nothing, nothing, nothing, 0, none, nothing, nothing, np.empty(0, np.bool_), (), nothing, nothing, nothing,
        0, None, mix, adjusted,
    )  # fmt: skip
    layout = PlanLayout.of(plan, 4)
    words = np.empty(layout.num_words, np.int32)
    pack(plan, layout, words)
    return torch.from_numpy(words), layout


def exact_mix(sequences: list[Sequence]) -> SamplingMix:
    penalised = [s.length for s in sequences if s.params.has_penalties]
    return replace(
        mix_of([Row(temperature=0.0)] * len(sequences), 99),
        num_penalised=len(penalised),
        penalised_length=max(penalised, default=0),
        max_biases=max((len(s.params.logit_bias or ()) for s in sequences), default=0),
    )


class AdjustedRows:
    """Tables in which the sequences have slots, in an order of their own; unused cells hold garbage."""

    def __init__(self, sequences: list[Sequence], cached: int = 3, device: str = "cpu") -> None:
        rng = np.random.default_rng(len(sequences))
        self.sequences = sequences
        self.slots = (1 + rng.permutation(len(sequences))).tolist()
        self.token_ids_RL = torch.full((len(sequences) + 1, WIDTH), GARBAGE, device=device)
        self.tables = AdjustmentTables(len(sequences) + 1, torch.device(device))
        words, layout = staged(sequences, self.slots, cached)
        self.tables.admit(words.to(device), layout.adjusted, self.token_ids_RL)
        for slot, s in zip(self.slots, sequences, strict=True):
            if s.params.has_penalties:
                self.token_ids_RL[slot, cached : s.length] = torch.tensor((s.prompt + s.output)[cached:])
        self.slot_S = torch.tensor(self.slots, device=device)
        self.position_S = torch.tensor([s.length for s in sequences], device=device)
        self.scratch = Scratch()

    def adjust(self, logits_SV: torch.Tensor, mix: SamplingMix | None = None) -> torch.Tensor:
        with torch.inference_mode():
            return adjust(
                logits_SV,
                self.tables,
                self.token_ids_RL,
                self.slot_S,
                self.position_S,
                mix or exact_mix(self.sequences),
                self.scratch,
            ).clone()

    def expected(self, logits_SV: torch.Tensor) -> torch.Tensor:
        rows = zip(logits_SV.numpy(), self.sequences, strict=True)
        return torch.from_numpy(np.stack([adjusted_logits(row, s.prompt, s.output, s.params) for row, s in rows]))
