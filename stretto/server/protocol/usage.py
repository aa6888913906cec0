"""Usage: how many tokens a request took."""

from __future__ import annotations

import msgspec

from stretto.ipc.client import Answer


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
    def of(cls, answer: Answer) -> Usage:
        """Tokens so far."""
        prompt, output = answer.num_prompt_tokens, answer.num_output_tokens
        return cls(prompt, output, prompt + output, PromptTokensDetails(answer.num_cached_tokens))
