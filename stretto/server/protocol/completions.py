"""Request, response and chunks of /v1/completions, with OpenAI's names."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from stretto.server.errors import bad_request, prompt_too_long
from stretto.server.protocol.fields import (
    MAX_LIST,
    MAX_SAMPLES,
    Amount,
    Decoding,
    Name,
    NotBuilt,
    StreamOptions,
    no_prompt_scores_in,
)
from stretto.server.protocol.prompt_scores import MaybeScores
from stretto.server.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16

NOT_BUILT: NotBuilt = {"suffix": ("",)}

Prompts: TypeAlias = str | list[Any]


class CompletionRequest(Decoding, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    model: Name | None = None
    prompt: Prompts
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    max_tokens: Amount | None = None
    """0 only with `echo`: then nothing follows the prompt."""
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    """Allowed is only the value of n: nothing is ranked."""
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Amount | None = None
    prompt_logprobs: Amount | None = None
    """Extension: also those of the prompt's tokens, in a field of their own."""
    add_special_tokens: bool | None = None

    @property
    def words(self) -> dict[str, str]:
        """How this request calls what the engine calls otherwise: with `echo`, `logprobs` asks about the prompt too."""
        by_echo = self.echo and self.logprobs is not None and self.logprobs >= (self.prompt_logprobs or 0)
        return {"prompt_logprobs": "logprobs"} if by_echo else {}

    @property
    def score_only(self) -> bool:
        """Nothing is to follow the prompt. Raises ApiError unless it is echoed."""
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens is 0; allowed: at least 1, and 0 with echo", "max_tokens")
        return self.max_tokens == 0

    @property
    def num_prompt_tops(self) -> int | None:
        """Top tokens wanted with each prompt token; None: no log-probabilities. Raises ApiError."""
        no_prompt_scores_in(self.stream, self.prompt_logprobs)
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    def checked_n(self) -> int:
        """Samples per prompt. Raises ApiError."""
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise bad_request(f"best_of is {self.best_of}; allowed: the value of n, {n}", "best_of")
        return n

    @property
    def num_prompts(self) -> int:
        """How many there are; nothing is looked at yet."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return 1 if is_one else len(prompt)

    def prompts(self, max_length: int) -> list[str | list[int]]:
        """The prompts, one by one: each a text or fewer than `max_length` token ids. Raises ApiError."""
        found = self._prompts(max_length)
        if self.add_special_tokens and not any(isinstance(prompt, str) for prompt in found):
            raise bad_request("add_special_tokens is true; nothing is added to token ids", "add_special_tokens")
        return found

    def _prompts(self, max_length: int) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise bad_request("prompt is empty", "prompt")
        if isinstance(prompt[0], int):
            return [_ids(prompt, "prompt", max_length)]
        if len(prompt) > MAX_LIST:
            raise bad_request(f"prompt has {len(prompt)} entries; allowed: up to {MAX_LIST}", "prompt")
        return [
            entry if isinstance(entry, str) else _ids(entry, f"prompt[{index}]", max_length)
            for index, entry in enumerate(prompt)
        ]


def _ids(value: Any, where: str, max_length: int) -> list[int]:
    if isinstance(value, list) and len(value) >= max_length:
        raise prompt_too_long(len(value), max_length)
    if not isinstance(value, list) or any(type(item) is not int or not 0 <= item < 2**31 for item in value):
        raise bad_request(f"{where}: expected a text or a list of token ids (whole numbers from 0)", "prompt")
    return value


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a choice's tokens, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: MaybeScores = msgspec.UNSET


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
