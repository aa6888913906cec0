"""Changes logits before they are sampled: logit_bias and the penalties, from what the device itself has.

Owns the rows' penalties and biases on the device. There are no counts to keep: every step reads a row's prompt and
output from the token table, where the step before has put its token, so that nothing can lag behind or outlive a
preemption. Legend: R slots, L tokens of a sequence, K biases of a request, S sampled rows, P those of them with
penalties, V vocabulary.
"""

from __future__ import annotations

import torch

from stretto.engine.sampling_rows import SamplingMix
from stretto.engine.scratch import Scratch
from stretto.engine.staging import ADJUSTMENT_WORDS, AdjustmentLayout
from stretto.request import MAX_LOGIT_BIAS

_LARGEST = torch.finfo(torch.float32).max
_NO_BIAS = -0.0
"""Added to a logit, it changes no bit of it, not even of a -0.0."""
_TOKENS_AT_ONCE = 2**20
"""Tokens of rows with penalties that are looked at together, unless one row has more; the other rows follow. With so
many, a kernel takes a GPU about as long as its launch takes the host."""
_BYTES_PER_TOKEN = 32
"""Of temporaries in `_penalise_rows`, at most, but for the indices that its rows share."""


def penalty_bytes(max_rows: int, max_length: int) -> int:
    """Memory that penalties of up to `max_rows` rows of up to `max_length` tokens take at once.

    Without tensors as large as the logits: the adjusted ones, and as many counts.
    """
    indices = max_length * torch.int64.itemsize
    return indices + _BYTES_PER_TOKEN * max(max_length, min(max_rows * max_length, _TOKENS_AT_ONCE))


class AdjustmentTables:
    """One row per slot, set when a request that changes logits gets it, or one that does not follows such a one."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.prompt_length_R = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.penalties_R3 = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)
        """Presence, frequency, repetition."""
        self.penalties_R3[:, 2] = 1.0
        self.is_penalised_R = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.bias_ids_RK = torch.zeros(num_slots, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        """The biased ids; the rest of a row is 0."""
        self.biases_RK = torch.full((num_slots, MAX_LOGIT_BIAS), _NO_BIAS, dtype=torch.float32, device=device)

    def admit(self, words: torch.Tensor, parts: tuple[AdjustmentLayout, ...], token_ids_RL: torch.Tensor) -> None:
        """Set the rows of `parts` from the end of the packed plan `words` (int32).

        Their cached tokens go into the token table.
        """
        at = words.shape[0] - sum(part.num_words for part in parts)
        for part in parts:
            slot, count = part.slot, part.num_biases
            ids = at + ADJUSTMENT_WORDS
            biases, tokens, end = ids + count, ids + 2 * count, at + part.num_words
            self.prompt_length_R[slot] = words[at]
            self.penalties_R3[slot] = words[at + 1 : ids].view(torch.float32)
            # fill_: assigning a number to an element copies it from pageable memory, and waits for that.
            self.is_penalised_R[slot].fill_(int(part.penalised))
            self.bias_ids_RK[slot, :count] = words[ids:biases]
            self.bias_ids_RK[slot, count:].fill_(0)
            self.biases_RK[slot, :count] = words[biases:tokens].view(torch.float32)
            self.biases_RK[slot, count:].fill_(_NO_BIAS)
            token_ids_RL[slot, : part.num_cached] = words[tokens:end]
            at = end


# hot path
def adjust(
    logits_SV: torch.Tensor,
    tables: AdjustmentTables,
    token_ids_RL: torch.Tensor,
    slot_S: torch.Tensor,
    position_S: torch.Tensor,
    mix: SamplingMix,
    scratch: Scratch,
) -> torch.Tensor:
    """The logits to sample from, float32 [S, V], in memory of `scratch`; `logits_SV` is only read. Never blocks.

    Of a row's logit `l` of a token that is `n` times in the output so far, in this order, as vLLM documents it:
    `l + bias`; if the token is in prompt or output, `l / repetition` where l > 0, else `l * repetition`; then
    `l - frequency * n`; then, if n > 0, `l - presence`. Each step is rounded to float32, and a finite logit stays
    finite. The work is proportional to the tokens of the rows, not to the vocabulary, but for one copy.
    """
    adjusted_SV = scratch.take(
        "adjustment.logits", (logits_SV.shape[0], logits_SV.shape[1]), torch.float32, logits_SV.device
    )
    adjusted_SV.copy_(logits_SV)
    if mix.max_biases:
        # A power of two: few shapes, whatever the users ask for.
        width = min(1 << (mix.max_biases - 1).bit_length(), MAX_LOGIT_BIAS)
        adjusted_SV.scatter_add_(1, tables.bias_ids_RK[:, :width][slot_S], tables.biases_RK[:, :width][slot_S])
    if mix.num_penalised:
        _penalise(adjusted_SV, tables, token_ids_RL, slot_S, position_S, mix, scratch)
    return adjusted_SV


def _penalise(
    logits_SV: torch.Tensor,
    tables: AdjustmentTables,
    token_ids_RL: torch.Tensor,
    slot_S: torch.Tensor,
    position_S: torch.Tensor,
    mix: SamplingMix,
    scratch: Scratch,
) -> None:
    """Apply the penalties in place. Rows without any are not touched, or changed by nothing."""
    num_rows, vocabulary = logits_SV.shape
    count_of_place = scratch.take_zeros("adjustment.counts", num_rows * vocabulary, torch.float32, logits_SV.device)
    row_P = torch.arange(num_rows, device=logits_SV.device)
    if mix.num_penalised < num_rows:
        # The host knows how many they are, the device which.
        order_S = tables.is_penalised_R[slot_S].sort(descending=True, stable=True).indices
        row_P = order_S[: mix.num_penalised]
        slot_S, position_S = slot_S[row_P], position_S[row_P]
    rows = max(1, _TOKENS_AT_ONCE // max(1, mix.penalised_length))
    for part in zip(*(torch.split(x, rows) for x in (row_P, slot_S, position_S)), strict=True):
        _penalise_rows(logits_SV, count_of_place, tables, token_ids_RL, *part, length=mix.penalised_length)


def _penalise_rows(
    logits_SV: torch.Tensor,
    count_of_place: torch.Tensor,
    tables: AdjustmentTables,
    token_ids_RL: torch.Tensor,
    row_P: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    *,
    length: int,
) -> None:
    """Apply the penalties of rows `row_P`, of up to `length` tokens, in place.

    `count_of_place`: float32 [S * V], zeros before and after.
    """
    vocabulary = logits_SV.shape[1]
    slot_P1, last_P1 = slot_P.unsqueeze(1), position_P.unsqueeze(1) - 1
    index_L = torch.arange(length, device=logits_SV.device)
    # Behind its end a row repeats its last token: what is written twice is the same both times.
    token_PL = token_ids_RL[slot_P1, torch.minimum(index_L, last_P1)]
    # Rows without penalties may have anything in their part of the table.
    place_X = token_PL.clamp_(0, vocabulary - 1).add_(row_P.unsqueeze(1) * vocabulary).view(-1)
    is_output_PL = (index_L >= tables.prompt_length_R[slot_P1]) & (index_L <= last_P1)

    count_of_place.scatter_add_(0, place_X, is_output_PL.view(-1).to(torch.float32))
    count_PL = count_of_place.index_select(0, place_X).view(is_output_PL.shape)
    count_of_place.index_fill_(0, place_X, 0.0)

    penalties_P3 = tables.penalties_R3[slot_P]
    presence_P1, frequency_P1, repetition_P1 = penalties_P3[:, 0:1], penalties_P3[:, 1:2], penalties_P3[:, 2:3]
    logit_of_place = logits_SV.view(-1)
    logit_PL = logit_of_place.index_select(0, place_X).view(count_PL.shape)
    scaled_PL = torch.where(logit_PL > 0, logit_PL / repetition_P1, logit_PL * repetition_P1)
    scaled_PL = torch.where(logit_PL.isfinite(), scaled_PL.clamp_(-_LARGEST, _LARGEST), logit_PL)
    scaled_PL.sub_(count_PL * frequency_P1).sub_((count_PL > 0) * presence_P1)
    logit_of_place.scatter_(0, place_X, scaled_PL.view(-1))
