"""Turns logits into tokens, as work on a stream: never looks at a tensor's value on the host.

Owns the order of the steps; `sampling_rows` owns how rows ask for them, `filters` which tokens are kept, `random` the
numbers, `logprobs` what is reported.
Legend: S sampled rows, V vocabulary, E stop ids of a row (padded), L reported log-probabilities, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stretto.engine.filters import distances, drop_filtered, kept_candidates
from stretto.engine.logprobs import write_logprobs
from stretto.engine.ordering import BLOCK, best_candidates, block_maxima, first_argmax
from stretto.engine.packed_results import ResultLayout
from stretto.engine.random import negative_exponentials, row_keys, token_lanes
from stretto.engine.sampling_rows import GREEDY_BELOW, SamplingMix, SamplingRows
from stretto.engine.scratch import Scratch

MAX_CANDIDATES = 256
"""Up to this top-k (on all random rows) only the best candidates are looked at, not the whole vocabulary."""
HIGHEST_TEMPERATURE = 2.0**60
"""Higher ones are as flat as this; bounded, as inf / inf would make a NaN of an impossible token."""

_CPU_CHUNK_BYTES = 4 << 20
"""Logits handled at once on a CPU, so that the temporaries stay in its cache. Results do not depend on it."""


@dataclass(frozen=True, slots=True)
class SampledOut:
    """Preallocated results: of S rows the first S entries are written, of L log-probabilities the first L columns.

    Without log-probabilities (`num_logprobs` -1) only the tokens are written.
    """

    tokens_S: torch.Tensor
    """int64: the sampled ids, each in [0, V), or -1: the row failed."""
    logprob_S: torch.Tensor
    """float32: natural log of the token's probability before temperature, masks and filters. NaN for a failed row."""
    rank_S: torch.Tensor
    """int64: 1 + the number of better tokens (larger logit, or equal and lower id). 0 for a failed row."""
    top_ids_SL: torch.Tensor
    """int64: the best ids in that order. -1 for a failed row, and beyond the vocabulary's size."""
    top_logprobs_SL: torch.Tensor
    """float32: their log-probabilities. NaN where the id is -1."""
    words: torch.Tensor
    """int64: the buffer that all of these are views of."""
    layout: ResultLayout
    """Where they lie in it."""
    scratch: Scratch = field(default_factory=Scratch)
    """Temporaries, of no use to a reader."""

    @classmethod
    def allocate(cls, max_rows: int, max_logprobs: int, device: torch.device) -> SampledOut:
        """Room for up to `max_rows` rows, with up to `max_logprobs` reported tokens each."""
        layout = ResultLayout(max_rows, max_logprobs)
        words = torch.zeros(layout.num_words, dtype=torch.int64, device=device)
        views = layout.on_device(words)
        views.tokens_S.fill_(-1)
        views.logprob_S.fill_(torch.nan)
        views.top_ids_SL.fill_(-1)
        views.top_logprobs_SL.fill_(torch.nan)
        return cls(*views, words, layout)


# hot path
def sample(
    logits_SV: torch.Tensor,
    rows: SamplingRows,
    mix: SamplingMix,
    out: SampledOut,
    adjusted_SV: torch.Tensor | None = None,
) -> None:
    """Sample one token for each row of float32 logits [S, V] into `out`; the logits are only read. Never blocks.

    `adjusted_SV`: the same after logit_bias and penalties (`stretto.engine.adjustment`), if any row has some.

    The steps and their order are those that vLLM documents for its V1 sampler: log-probabilities of the raw logits;
    then logit_bias -> penalties -> min_tokens mask (which could as well come first) -> temperature -> min_p -> top_k
    -> top_p (over what the former keep, renormalised) -> draw. Where vLLM leaves ties open, the lowest id wins: top-k
    keeps exactly k tokens, top-p the smallest set whose mass reaches p (at least one token), argmax the first.

    The draw is Gumbel-max (Maddison, Tarlow, Minka: "A* sampling", 2014) in its exponential form: argmin E / p with
    E = -log1p(-u(seed, position, token id)). A row's token depends on its own logits and parameters alone, to the bit.

    A row fails (token -1, its neighbours unharmed) if a logit is NaN or +inf, or if every logit is -inf after the mask.
    Raises ValueError if `out` is too small.
    """
    num_rows, vocabulary = logits_SV.shape
    if num_rows > out.tokens_S.shape[0] or mix.num_logprobs > out.top_ids_SL.shape[1]:
        room = (out.tokens_S.shape[0], out.top_ids_SL.shape[1])
        raise ValueError(f"room for {room} (rows, logprobs), asked for {(num_rows, mix.num_logprobs)}")
    few_passes = mix.all_greedy and mix.num_logprobs < 0
    chunk = num_rows if few_passes else rows_at_once(num_rows, vocabulary, logits_SV.device)
    for start in range(0, num_rows, max(1, chunk)):
        stop = min(start + chunk, num_rows)
        part_SV, part = (logits_SV, rows) if chunk >= num_rows else (logits_SV[start:stop], rows.slice(start, stop))
        adjusted_part_SV = None if adjusted_SV is None else adjusted_SV[start:stop]
        tokens_S = _choose(part_SV, adjusted_part_SV, part, mix, out.scratch)
        out.tokens_S[start:stop] = tokens_S
        if mix.num_logprobs >= 0:
            write_logprobs(
                part_SV,
                tokens_S,
                mix.num_logprobs,
                logprob_S=out.logprob_S[start:stop],
                rank_S=out.rank_S[start:stop],
                top_ids_SL=out.top_ids_SL[start:stop],
                top_logprobs_SL=out.top_logprobs_SL[start:stop],
            )


def rows_at_once(num_rows: int, vocabulary: int, device: torch.device) -> int:
    """Rows that are handled together, so that their temporaries stay in a CPU's cache; elsewhere all. hot path"""
    if device.type != "cpu":
        return num_rows
    most = max(1, _CPU_CHUNK_BYTES // (4 * max(vocabulary, 4096)))
    return -(-num_rows // max(1, -(-num_rows // most)))


def _choose(
    logits_SV: torch.Tensor,
    adjusted_SV: torch.Tensor | None,
    rows: SamplingRows,
    mix: SamplingMix,
    scratch: Scratch,
) -> torch.Tensor:
    """The chosen ids (int64 [S]), -1 for failed rows."""
    wanted_SV = logits_SV if adjusted_SV is None else adjusted_SV
    allowed_SV = _without_stop_tokens(wanted_SV, rows) if mix.any_min_tokens else wanted_SV
    maxima_SG = block_maxima(allowed_SV)
    best_S, chosen_S = first_argmax(allowed_SV, maxima_SG)
    usable_S = best_S.isfinite()
    if mix.any_min_tokens:
        # The mask may have hidden what makes a row fail; adjustments hide nothing.
        usable_S &= logits_SV.amax(1).isfinite()
    if not mix.all_greedy:
        greedy_S = rows.temperature_S < GREEDY_BELOW
        temperature_S = rows.temperature_S.clamp(max=HIGHEST_TEMPERATURE).masked_fill_(greedy_S, 1.0)
        keys_S = row_keys(rows.seed_S, rows.position_S)
        best_S1 = best_S.unsqueeze(1)
        if mix.all_top_k and mix.max_top_k <= MAX_CANDIDATES:
            drawn_S = _draw_from_candidates(
                allowed_SV, maxima_SG, best_S1, temperature_S.unsqueeze(1), keys_S, rows, mix
            )
        else:
            drawn_S = _draw_from_vocabulary(allowed_SV, best_S1, temperature_S.unsqueeze(1), keys_S, rows, mix, scratch)
        chosen_S = torch.where(greedy_S, chosen_S, drawn_S)
    return chosen_S.masked_fill(~usable_S, -1)


def _without_stop_tokens(logits_SV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """A copy of the logits with -inf at the stop tokens of the rows that are still before their `min_position`."""
    ids_SE = rows.stop_ids_SE
    early_S1 = (rows.position_S < rows.min_position_S).unsqueeze(1)
    unmasked_SE = ~early_S1 | (ids_SE < 0) | (ids_SE >= logits_SV.shape[1])
    # A minimum, not a store: padding shares its index with a real id, and their order would be left open.
    ceiling_SE = logits_SV.new_full(ids_SE.shape, -torch.inf).masked_fill_(unmasked_SE, torch.inf)
    return logits_SV.scatter_reduce(1, ids_SE.masked_fill(unmasked_SE, 0), ceiling_SE, "amin", include_self=True)


def _draw_from_candidates(
    logits_SV: torch.Tensor,
    maxima_SG: torch.Tensor,
    best_S1: torch.Tensor,
    temperature_S1: torch.Tensor,
    keys_S: torch.Tensor,
    rows: SamplingRows,
    mix: SamplingMix,
) -> torch.Tensor:
    """Draw where every random row has a top-k of at most `MAX_CANDIDATES`: int64 ids [S]."""
    vocabulary = logits_SV.shape[1]
    # A power of two: few shapes, whatever the users ask for.
    count = min(1 << max(0, mix.max_top_k - 1).bit_length(), vocabulary)

    def distance_of(values_SX: torch.Tensor) -> torch.Tensor:
        return (best_S1 - values_SX).div_(temperature_S1).abs_()

    ids_SC = best_candidates(logits_SV, maxima_SG, count, lambda values_SX: distance_of(values_SX).view(torch.int32))
    distance_SC = distance_of(logits_SV.gather(1, ids_SC))
    probability_SC = distance_SC.neg().exp_()
    kept_SC = kept_candidates(
        distance_SC.view(torch.int32),
        probability_SC,
        rows.top_k_S,
        rows.top_p_S if mix.any_top_p else None,
        rows.min_p_S if mix.any_min_p else None,
    )
    lanes_SC = token_lanes(ids_SC.to(torch.int32))
    noise_SC = negative_exponentials(keys_S, lanes_SC, torch.empty_like(lanes_SC), torch.empty_like(lanes_SC))
    score_SC = noise_SC.div_(probability_SC.mul_(kept_SC))
    # Candidates are not in the order of their ids, so the lowest id among equals is found by hand.
    worse_SC = score_SC != score_SC.amax(1, keepdim=True)
    return ids_SC.masked_fill_(worse_SC, vocabulary - 1).amin(1)


def _draw_from_vocabulary(
    logits_SV: torch.Tensor,
    best_S1: torch.Tensor,
    temperature_S1: torch.Tensor,
    keys_S: torch.Tensor,
    rows: SamplingRows,
    mix: SamplingMix,
    scratch: Scratch,
) -> torch.Tensor:
    """Draw from any mix: int64 ids [S]."""
    num_rows, vocabulary = logits_SV.shape
    device = logits_SV.device
    # Whole blocks, behind which the vocabulary's last tokens are followed by impossible ones.
    shape = (num_rows, vocabulary + -vocabulary % BLOCK)
    probability_SV = scratch.take("sampler.probability", shape, torch.float32, device)
    bits_SV = scratch.take("sampler.bits", shape, torch.int32, device)
    if mix.any_top_k or mix.any_top_p or mix.any_min_p:
        # The random bits come later; until then their memory is free.
        distance_SV = bits_SV.view(torch.float32)
        distance_SV[:, vocabulary:].fill_(torch.inf)
        distances(best_S1, logits_SV, temperature_S1, distance_SV[:, :vocabulary])
        torch.neg(distance_SV, out=probability_SV).exp_()
        drop_filtered(
            distance_SV.view(torch.int32),
            probability_SV,
            rows.top_k_S.masked_fill(rows.top_k_S <= 0, vocabulary) if mix.any_top_k else None,
            rows.top_p_S if mix.any_top_p else None,
            rows.min_p_S if mix.any_min_p else None,
            scratch,
        )
    else:
        # The same numbers in fewer passes: nobody needs the distances.
        probability_SV[:, vocabulary:].fill_(0.0)
        own_SV = torch.sub(logits_SV, best_S1, out=probability_SV[:, :vocabulary])
        own_SV.div_(temperature_S1).exp_()
    lanes_V = token_lanes(torch.arange(shape[1], dtype=torch.int32, device=device))
    spare_SV = scratch.take("sampler.spare", shape, torch.int32, device)
    score_SV = negative_exponentials(keys_S, lanes_V, bits_SV, spare_SV).div_(probability_SV)
    # A NaN row may point at padding; it fails, but its id is used as an index before that is known.
    return first_argmax(score_SV, block_maxima(score_SV))[1].clamp_(max=vocabulary - 1)
