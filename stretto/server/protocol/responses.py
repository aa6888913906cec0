"""Request, response and event parts of /v1/responses (text), with OpenAI's names. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from stretto.server.errors import bad_request
from stretto.server.protocol.chat import TokenLogprob
from stretto.server.protocol.fields import MAX_LIST, Amount, Count, Decoding, Name, NotBuilt

NOT_BUILT: NotBuilt = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to call
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": (),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}


WORDS = {"prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
"""How this endpoint calls what the engine calls otherwise."""


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an item of the input: what was said to the model, or what it said (then it may bring its extras)."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of the input. Only messages are built."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Meta(max_length=MAX_LIST)]
    type: Literal["message"] = "message"
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None

    def for_template(self) -> dict[str, Any]:
        """What chat templates read."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(Decoding, frozen=True, kw_only=True):
    """Body of /v1/responses."""

    model: Name | None = None
    input: str | Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_LIST)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Annotated[dict[str, MetadataValue], Meta(max_length=16)] | None = None
    """Comes back with the answer."""
    include: Annotated[list[Literal["message.output_text.logprobs"]], Meta(max_length=MAX_LIST)] | None = None
    top_logprobs: Amount | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities per token, or None for none at all. Raises ApiError."""
        if not self.include:
            if self.top_logprobs:
                raise bad_request("top_logprobs needs 'message.output_text.logprobs' in include", "top_logprobs")
            return None
        return self.top_logprobs or 0

    def messages(self) -> list[dict[str, Any]]:
        """The conversation for the chat template."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return [*first, *(item.for_template() for item in self.input)]


class EventTopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place, in an event."""

    token: str
    logprob: float


class EventLogprob(msgspec.Struct, frozen=True):
    """The token at a place, in an event: these have no bytes."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class OutputText(msgspec.Struct, frozen=True):
    """A part of an answer."""

    text: str
    type: str = "output_text"
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, frozen=True):
    """The answer as an item."""

    id: str
    status: str
    content: list[OutputText]
    type: str = "message"
    role: str = "assistant"


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is not complete."""

    reason: str


class InputDetails(msgspec.Struct, frozen=True):
    """Of the input tokens."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """Of the output tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails = OutputDetails()


class ResponseError(msgspec.Struct, frozen=True):
    """What went wrong after the answer began."""

    code: str
    message: str


class TextFormat(msgspec.Struct, frozen=True):
    """Plain text."""

    type: str = "text"


class TextSettings(msgspec.Struct, frozen=True):
    """How the answer is written."""

    format: TextFormat = TextFormat()


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputMessage]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    user: str | None
    object: str = "response"
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    tool_choice: str = "none"
    tools: list[Any] = []
    top_logprobs: int = 0
    truncation: str = "disabled"
    text: TextSettings = TextSettings()
