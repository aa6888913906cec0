"""Request, response and chunks of /v1/completions, with OpenAI's names."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from stretto.server.errors import bad_request
from stretto.server.protocol.fields import MAX_LIST, MAX_SAMPLES, Count, Decoding, Name, NotBuilt, StreamOptions
from stretto.server.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16

NOT_BUILT: NotBuilt = {"suffix": ("",)}

Prompts: TypeAlias = str | list[Any]


class CompletionRequest(Decoding, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    model: Name | None = None
    prompt: Prompts
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    """Allowed is only the value of n: nothing is ranked."""
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    add_special_tokens: bool | None = None

    def checked_n(self) -> int:
        """Samples per prompt. Raises ApiError."""
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise bad_request(f"best_of is {self.best_of}; allowed: the value of n, {n}", "best_of")
        return n

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one: each a text or token ids. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise bad_request("prompt is empty", "prompt")
        if isinstance(prompt[0], int):
            return [_ids(prompt, "prompt")]
        if len(prompt) > MAX_LIST:
            raise bad_request(f"prompt has {len(prompt)} entries; allowed: up to {MAX_LIST}", "prompt")
        return [
            entry if isinstance(entry, str) else _ids(entry, f"prompt[{index}]") for index, entry in enumerate(prompt)
        ]


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int or not 0 <= item < 2**31 for item in value):
        raise bad_request(f"{where}: expected a text or a list of token ids (whole numbers from 0)", "prompt")
    return value


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a choice's tokens, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionChunk(msgspec.Struct, frozen=True):
    """An event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"


class CompletionUsageChunk(CompletionChunk, frozen=True, kw_only=True):
    """The whole answer, or an event of a stream whose client asked for usage."""

    usage: Usage | None
