"""Log-probabilities of the raw logits: of the sampled tokens, and of the best ones.

Owns what is reported about a choice, not the choice. Legend: S sampled rows, V vocabulary, L reported tokens.
"""

from __future__ import annotations

import torch

from stretto.engine.ordering import best_candidates, block_maxima, descending_rank


# hot path
def write_logprobs(
    logits_SV: torch.Tensor,
    tokens_S: torch.Tensor,
    num_logprobs: int,
    *,
    logprob_S: torch.Tensor,
    rank_S: torch.Tensor,
    top_ids_SL: torch.Tensor,
    top_logprobs_SL: torch.Tensor,
) -> None:
    """Fill the four results for the `tokens_S` (-1: failed) sampled from float32 `logits_SV`. Never blocks.

    Of the last two only the first `num_logprobs` columns (at most their width) are written. What the entries mean,
    and what they are for failed rows, is said at `stretto.engine.sampler.SampledOut`.
    """
    vocabulary = logits_SV.shape[1]
    failed_S1 = tokens_S.unsqueeze(1) < 0
    token_S1 = tokens_S.clamp(min=0).unsqueeze(1)
    logprobs_SV = _aligned(logits_SV).log_softmax(1)
    logprob_S.copy_(logprobs_SV.gather(1, token_S1).masked_fill_(failed_S1, torch.nan).squeeze(1))

    own_S1 = logits_SV.gather(1, token_S1)
    ids_V = torch.arange(vocabulary, device=logits_SV.device)
    better_SV = (logits_SV > own_S1) | ((logits_SV == own_S1) & (ids_V < token_S1))
    rank_S.copy_((better_SV.sum(1, keepdim=True) + 1).masked_fill_(failed_S1, 0).squeeze(1))

    count = min(num_logprobs, vocabulary)
    if count > 0:
        ids_SL = best_candidates(logits_SV, block_maxima(logits_SV), count, descending_rank)
        top_logprobs_SL[:, :count] = logprobs_SV.gather(1, ids_SL).masked_fill_(failed_S1, torch.nan)
        top_ids_SL[:, :count] = ids_SL.masked_fill_(failed_S1, -1)
    top_ids_SL[:, count:num_logprobs].fill_(-1)
    top_logprobs_SL[:, count:num_logprobs].fill_(torch.nan)


def _aligned(logits_SV: torch.Tensor) -> torch.Tensor:
    """The same with impossible tokens behind, so that each row begins at a multiple of 16 bytes.

    torch's kernel for a GPU adds up a row in an order that depends on that, hence on the row's place in the batch.
    """
    missing = -logits_SV.shape[1] % 4
    if not missing or not logits_SV.is_cuda:
        return logits_SV
    return torch.nn.functional.pad(logits_SV, (0, missing), value=-torch.inf)
