"""Log-probabilities of prompts as answers carry them, in vLLM's form: an extension of OpenAI's endpoints."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class TokenScore(msgspec.Struct, frozen=True):
    """One token at a place of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptScores: TypeAlias = list[dict[str, TokenScore] | None]
"""For each prompt token, by token id; None for the first."""

MaybeScores: TypeAlias = PromptScores | msgspec.UnsetType | None
"""Left out of the answer where nobody asked."""
