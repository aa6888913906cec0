"""Usage: how many tokens a request took."""

from __future__ import annotations

import msgspec

from stretto.ipc.answer import Answer


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt tokens."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, answer: Answer, *, score_only: bool = False) -> Usage:
        """Tokens so far. `score_only`: none of the output's are given out."""
        prompt, output = answer.num_prompt_tokens, 0 if score_only else answer.num_output_tokens
        return cls(prompt, output, prompt + output, PromptTokensDetails(answer.num_cached_tokens))
