"""Log-probabilities of prompt tokens, as work on a stream: never looks at a tensor's value on the host.

Owns the slices: the logits of a long chunk never exist at once. Legend: T tokens of the step, Q scored positions of the
step, S those of a slice, V vocabulary, L reported tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stretto.engine.logprobs import write_logprobs

SLICE = 64
"""Positions whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class ScoredOut:
    """Preallocated results: of Q positions the first Q entries are written, of L log-probabilities the first columns.

    What they mean is said at `stretto.engine.sampler.SampledOut`; no position fails.
    """

    logprob_Q: torch.Tensor
    """float32."""
    rank_Q: torch.Tensor
    """int32."""
    top_ids_QL: torch.Tensor
    """int32."""
    top_logprobs_QL: torch.Tensor
    """float32."""

    @classmethod
    def allocate(cls, max_tokens: int, max_logprobs: int, device: torch.device) -> ScoredOut:
        """Buffers for a step of `max_tokens` tokens: 8 bytes for each of `max_tokens * (max_logprobs + 1)`."""
        wide = (max_tokens, max_logprobs)
        return cls(
            torch.zeros(max_tokens, dtype=torch.float32, device=device),
            torch.zeros(max_tokens, dtype=torch.int32, device=device),
            torch.zeros(wide, dtype=torch.int32, device=device),
            torch.zeros(wide, dtype=torch.float32, device=device),
        )


# hot path (of steps with such chunks)
def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    index_Q: torch.Tensor,
    target_Q: torch.Tensor,
    num_tops: int,
    out: ScoredOut,
) -> None:
    """Write the log-probabilities of the tokens `target_Q` after positions `index_Q` of the step (int64) into `out`.

    `logits_of` gives the float32 logits [S, V] of such positions. With the `num_tops` likeliest tokens of each
    position. Never blocks.
    """
    for start in range(0, len(index_Q), SLICE):
        part = slice(start, min(start + SLICE, len(index_Q)))
        write_logprobs(
            logits_of(index_Q[part]),
            target_Q[part],
            num_tops,
            logprob_S=out.logprob_Q[part],
            rank_S=out.rank_Q[part],
            top_ids_SL=out.top_ids_QL[part],
            top_logprobs_SL=out.top_logprobs_QL[part],
        )
