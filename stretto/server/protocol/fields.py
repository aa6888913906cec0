"""How request bodies are read: every field either works or is refused with a 400 that names it.

Owns the reading of JSON, the refusal of unknown and of not built fields, and the fields that endpoints share.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from stretto.request import MAX_LOGIT_BIAS, MAX_TEMPERATURE, SamplingParams
from stretto.server.errors import bad_request, raise_invalid

T = TypeVar("T", bound=msgspec.Struct)

MAX_STOPS = 32
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
MAX_SAMPLES = 128
MAX_LIST = 4096
"""Entries of a list of prompts or messages."""
MAX_TEMPLATE_KWARGS = 64

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
BiasKey: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9]{1,10}$"})]
"""Checked with words that a person understands when the parameters are made."""
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Count: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
Amount: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
"""May be 0."""
Name: TypeAlias = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    """The stream ends with a chunk that holds the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk holds the usage so far."""


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields that chat, completions and responses share; those after `user` are extensions."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    user: Name | None = None
    """Whose request it is; it goes into the access log."""
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: Stop = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    """Smaller runs earlier."""

    def sampling(
        self, *, n: int, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """As parameters of the engine. Raises InvalidRequest or NotSupported."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": None if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias or None,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        if self.top_p == 0:  # the smallest nucleus there is: the likeliest token
            given.update(top_p=None, top_k=1)
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(n=n, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **chosen)


def no_prompt_scores_in(stream: bool | None, prompt_logprobs: int | None) -> None:
    """Raise ApiError where a stream is asked for the prompt's log-probabilities as a field of the answer."""
    if stream and prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not part of streams; ask for the whole answer", "prompt_logprobs")


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Raise ApiError where it is said how to send a stream that nobody asked for."""
    if options is not None and not stream:
        raise bad_request("stream_options is allowed only where stream is true", "stream_options")


NotBuilt: TypeAlias = Mapping[str, tuple[object, ...]]
"""Fields that an endpoint has not built; with each, the values (besides null) that mean the same as leaving it out."""


def read(body: bytes, kind: type[T], not_built: NotBuilt) -> T:
    """The request in `body`. Raises ApiError 400, which names the field that is wrong.

    Of what is not wanted, however much it is, no objects are made.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise bad_request("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise bad_request("the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    known = kind.__struct_fields__
    for name, raw in fields.items():
        if name in not_built:
            if not _is_harmless(raw, not_built[name]):
                raise bad_request(
                    f"'{name}' is not supported by this server; leave it out", name, "unsupported_parameter"
                )
        elif name not in known:
            close = difflib.get_close_matches(name[:100], known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise bad_request(f"unknown field '{name[:100]}'{hint}", name[:100], "unknown_parameter")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise_invalid(error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise bad_request("the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


_LONGEST_HARMLESS = 256
"""Bytes of JSON; nothing that means the same as leaving a field out is longer."""


def _is_harmless(raw: msgspec.Raw, harmless: tuple[object, ...]) -> bool:
    if memoryview(raw).nbytes > _LONGEST_HARMLESS:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return value is None or any(same(value, other) for other in harmless)


_NOT_FREE = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template. Raises ApiError where one has a name that is not free."""
    for name in given or {}:
        if name in _NOT_FREE or not name.isidentifier():
            raise bad_request(f"chat_template_kwargs must not set '{name[:100]}'", "chat_template_kwargs")
    return dict(given or {})


def same(value: object, other: object) -> bool:
    """Equal and of the same kind: false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
