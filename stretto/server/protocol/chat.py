"""Request, response and chunks of /v1/chat/completions, with OpenAI's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from stretto.server.errors import bad_request
from stretto.server.protocol.fields import (
    MAX_LIST,
    MAX_SAMPLES,
    MAX_TEMPLATE_KWARGS,
    Amount,
    Count,
    Decoding,
    Name,
    NotBuilt,
    StreamOptions,
    no_prompt_scores_in,
    template_variables,
)
from stretto.server.protocol.prompt_scores import MaybeScores
from stretto.server.protocol.usage import Usage

NOT_BUILT: NotBuilt = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to call
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message. Only texts are built."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_LIST)]
    name: Name | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """What chat templates read. They know no developers, who stand where the system message stood before."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(Decoding, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    model: Name | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_LIST)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Amount | None = None
    prompt_logprobs: Amount | None = None
    """Extension: those of the prompt's tokens, in a field of their own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_KWARGS)] | None = None

    @property
    def words(self) -> dict[str, str]:
        """How this request calls what the engine calls otherwise."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": limit}

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities per token, or None for none at all. Raises ApiError."""
        if not self.logprobs:
            if self.top_logprobs:
                raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
            return None
        return self.top_logprobs or 0

    @property
    def num_prompt_tops(self) -> int | None:
        """Top log-probabilities per prompt token, or None for none at all. Raises ApiError."""
        no_prompt_scores_in(self.stream, self.prompt_logprobs)
        return self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """New tokens at most. Raises ApiError if it is given twice, and differently."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        return both.pop() if both else None


def template_options(request: ChatRequest) -> dict[str, Any]:
    """The options of the chat template. Raises ApiError where chat_template_kwargs has a name that is not free."""
    going_on = bool(request.continue_final_message)
    start = not going_on if request.add_generation_prompt is None else request.add_generation_prompt
    variables = template_variables(request.chat_template_kwargs)
    return {"add_generation_prompt": start, "continue_final_message": going_on, **variables}


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token at a place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a choice's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    """What the model says."""

    content: str
    role: str = "assistant"
    refusal: None = None


FinishReason: TypeAlias = str | None


class ChatChoice(msgspec.Struct, frozen=True):
    """One of n answers."""

    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: MaybeScores = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of a message."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason = None


class LastChunkChoice(ChunkChoice, frozen=True):
    """The last of an answer: also says what ended it."""

    stop_reason: int | str | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """An event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"


class ChatUsageChunk(ChatChunk, frozen=True, kw_only=True):
    """An event of a stream whose client asked for usage."""

    usage: Usage | None
