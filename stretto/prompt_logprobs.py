"""Log-probabilities of a prompt's tokens on the host, as they come in chunk by chunk.

Owns what is known of one request's prompt; what it becomes for users is output.py's. Legend: Q prompt tokens that
follow one another, L likeliest tokens reported with each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Log-probabilities (natural, of the raw logits) of Q prompt tokens, each after the tokens before it."""

    logprob_Q: Float32Array
    rank_Q: Int32Array
    """1 for the likeliest token of the vocabulary."""
    top_ids_QL: Int32Array
    """The likeliest tokens, best first; -1 beyond the vocabulary's size."""
    top_logprobs_QL: Float32Array

    def __len__(self) -> int:
        return len(self.logprob_Q)

    def part(self, start: int, stop: int, num_tops: int) -> ScoredTokens:
        """Copies of tokens [start, stop), with the first `num_tops` of the likeliest."""
        return ScoredTokens(
            self.logprob_Q[start:stop].copy(),
            self.rank_Q[start:stop].copy(),
            self.top_ids_QL[start:stop, :num_tops].copy(),
            self.top_logprobs_QL[start:stop, :num_tops].copy(),
        )


class PromptLogprobs:
    """What one request asked of its prompt, and how much of it is known.

    The first token has none, since nothing is before it: position `p` of the sequence scores token `p + 1`.
    """

    def __init__(self, num_prompt_tokens: int, num_tops: int) -> None:
        self.num_tops = num_tops
        self.num_wanted = num_prompt_tokens - 1
        self.num_known = 0
        """Tokens from the second on; they are computed once, whatever is computed again after a preemption."""
        self._parts: list[ScoredTokens] = []

    @property
    def complete(self) -> bool:
        """Whether all of them are known."""
        return self.num_known == self.num_wanted

    def append(self, first: int, scored: ScoredTokens) -> None:
        """Take those of positions `first` on (the caller gives the arrays away).

        Raises RuntimeError unless they are the next: each position is scored once, in order.
        """
        if first != self.num_known or first + len(scored) > self.num_wanted:
            raise RuntimeError(
                f"positions {first} to {first + len(scored)} of a prompt are scored, but {self.num_known} of "
                f"{self.num_wanted} are known"
            )
        self._parts.append(scored)
        self.num_known += len(scored)

    def known(self) -> ScoredTokens:
        """All that is known, as one. Joined when it is first asked for."""
        if not self._parts:
            nothing = np.empty((0, self.num_tops))
            return ScoredTokens(
                np.empty(0, np.float32), np.empty(0, np.int32), nothing.astype(np.int32), nothing.astype(np.float32)
            )
        if len(self._parts) > 1:
            parts = self._parts
            self._parts = [
                ScoredTokens(
                    np.concatenate([part.logprob_Q for part in parts]),
                    np.concatenate([part.rank_Q for part in parts]),
                    np.concatenate([part.top_ids_QL for part in parts]),
                    np.concatenate([part.top_logprobs_QL for part in parts]),
                )
            ]
        return self._parts[0]
