"""What a user asks for and what comes back: SamplingParams, RequestOutput and their parts (names follow vLLM's).

Also the scheduler's `Request`: one prompt and its parameters, from arrival to its finish reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.cache.base import NO_KEY, CacheKey, Prefix
from stretto.errors import InvalidRequest, NotSupported
from stretto.prompt_logprobs import PromptLogprobs

TokenArray = npt.NDArray[np.int32]


MAX_LOGIT_BIAS = 300
"""Token ids that a request may bias."""
MAX_TEMPERATURE = 1e30
"""A float32 on the device; long before it, every token is equally likely."""
PRIORITY_STEP = 1000
"""Arrivals that one unit of priority is worth."""
MAX_SAMPLES = 16_384
"""Largest `n`: each sample is a request of its own."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop token id or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context length."""
    ABORT = "abort"
    """The client left or called abort."""
    TIMEOUT = "timeout"
    """Its time limit, judged once, by the loop."""
    ERROR = "error"
    """The model gave logits that are not numbers; the other requests go on."""


_NOT_BUILT = {
    "bad_words": None,
    "allowed_token_ids": None,
    "logits_processors": None,
    "structured_outputs": None,
}


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens, with the names and defaults of vLLM's class of the same name.

    Checked when it is made: `InvalidRequest` says what was given and what is allowed, `NotSupported` names a field
    that is not built yet.
    """

    n: int = 1
    """Samples per prompt."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that is in the output so far; in [-2, 2], above 0 favours new tokens."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for each time that it is in the output so far; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """What logits above 0 are divided by, and others multiplied by, if their token is in the prompt or the output so
    far; above 0, and above 1 favours new tokens (Keskar et al.: "CTRL", 2019)."""
    temperature: float = 1.0
    """0 takes the most likely token; larger is more random."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most likely token's probability; in [0, 1]."""
    seed: int | None = None
    """Makes the samples reproducible, whatever else runs; None takes fresh entropy."""
    stop: str | list[str] | None = None
    """Strings that end the text when they appear in it."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the text."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """New tokens at most; None: as many as the context length allows."""
    min_tokens: int = 0
    """New tokens before an end-of-sequence or stop token id may be chosen."""
    logprobs: int | None = None
    """Log-probabilities of this many top tokens with each new token (0: only the chosen one)."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, with this many top tokens each (0: only the prompt's own)."""
    detokenize: bool = True
    """False leaves `text` empty (then `stop` cannot be used)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    logit_bias: dict[int, float] | None = None
    """Token id -> what is added to its logit, in [-100, 100]; ids may be given as strings of digits."""
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: list[object] | None = None
    structured_outputs: object | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.generic):
                setattr(self, name, value.item())
        self.stop = _string_or_list("stop", self.stop)
        self.stop_token_ids = _list("stop_token_ids", self.stop_token_ids)
        for name, default in _NOT_BUILT.items():
            value = getattr(self, name)
            if value != default:
                raise NotSupported(f"{name}={value!r}: not built yet; leave it at {default!r}")
        if not self.spaces_between_special_tokens:
            raise NotSupported("spaces_between_special_tokens=False: not built yet; leave it at True")
        _check_int("n", self.n, 1)
        if self.n > MAX_SAMPLES:
            raise InvalidRequest(f"n is {self.n}; allowed: 1 to {MAX_SAMPLES} samples of one prompt")
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "above 0 (1 is no penalty)")
        if self.logit_bias is not None:
            self.logit_bias = _checked_biases(self.logit_bias)
        _check_real("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        above = "above 0 and up to 1 (use temperature=0 for the likeliest token)"
        _check_real("top_p", self.top_p, 0.0, 1.0, above)
        _check_int("top_k", self.top_k, -1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63))
            if self.seed >= 2**63:
                raise InvalidRequest(f"seed is {self.seed}; allowed: a 64-bit signed whole number")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0)
        for token_id in self.stop_token_ids or ():
            _check_int("an entry of stop_token_ids", token_id, 0)
        stops = self.stop_strings
        if any(not isinstance(s, str) or not s for s in stops):
            raise InvalidRequest(f"stop is {self.stop!r}; allowed: a string or a list of strings, none of them empty")
        if stops and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids without it")

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties is on."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def of_sample(self, index: int) -> SamplingParams:
        """The parameters of one of the n samples. What is the prompt's is computed once, with the first."""
        return replace(self, n=1, prompt_logprobs=None if index else self.prompt_logprobs)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token: natural logarithm, from the raw logits."""

    logprob: float
    rank: int | None
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `timeout` or `error`; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence and other reasons."""


@dataclass(slots=True)
class RequestOutput:
    """What a prompt gave so far; `finished` once all its samples have ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """If asked for: None for the first prompt token, then for each its own and the top tokens' log-probabilities.

    Of a stream, the first output that holds it is the only one. None also where the request ended before its prompt
    was computed."""


class RequestState(StrEnum):
    """Where a request is. FINISHED is sticky."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    RETIRING = "retiring"
    """Its last step by length is launched; only its results are awaited."""
    PREEMPTING = "preempting"
    """Chosen to give its pages back; waits for its launched steps, then goes back to WAITING."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its parameters in the scheduler, from arrival to its finish reason. The scheduler owns it."""

    uid: int
    """Number of arrival; also the tie-break of every order, so that all ranks decide alike."""
    prompt_ids: TokenArray
    params: SamplingParams
    seed: int
    final_len: int
    """Sequence length at which it ends by length: prompt + max_tokens, at most the context length."""
    stop_ids: tuple[int, ...]
    """End-of-sequence ids (unless ignored) and stop token ids."""
    priority: int = 0
    """Smaller runs earlier: each unit lets a request go before, or lets pass, PRIORITY_STEP arrivals of priority 0."""
    cache_key: CacheKey = NO_KEY
    """What else than its tokens its KV depends on."""
    state: RequestState = RequestState.WAITING
    slot: int = 0
    """Row of the request tables while it holds one, else 0."""
    pages: list[int] = field(default_factory=list)
    """Its KV pages in order, those of a cached prefix first."""
    prefix: Prefix | None = None
    """The locked cached prefix, while it holds a slot."""
    token_ids: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt and output while it holds no slot (before admission, after preemption or release)."""
    num_output: int = 0
    """Output tokens processed and valid so far."""
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token id that stopped it, for FinishReason.STOP."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = field(init=False)
    """What is known of them; None: nobody asked."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        wanted = self.params.prompt_logprobs
        self.prompt_logprobs = None if wanted is None else PromptLogprobs(len(self.prompt_ids), wanted)

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first. Priority moves a place in the queue by a bounded number of arrivals, so nobody starves."""
        return (self.uid + self.priority * PRIORITY_STEP, self.uid)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities that came with one output token (host values)."""

    logprob: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


def _checked_biases(given: object) -> dict[int, float]:
    """`logit_bias` with whole numbers as keys, in a dictionary of its own."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"logit_bias is {given!r}; allowed: token ids with numbers from -100 to 100")
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(given)} entries; allowed: up to {MAX_LOGIT_BIAS}")
    biases: dict[int, float] = {}
    for key, value in given.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        if not is_digits and (not isinstance(key, int) or isinstance(key, bool) or key < 0):
            raise InvalidRequest(f"logit_bias has the key {key!r}; allowed: token ids, as numbers or strings of digits")
        token_id = int(key)
        if token_id in biases:
            raise InvalidRequest(f"logit_bias has token {token_id} twice; give it once")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -100 <= value <= 100:
            raise InvalidRequest(f"logit_bias has {value!r} for token {token_id}; allowed: numbers from -100 to 100")
        biases[token_id] = float(value)
    return biases


def _list(name: str, value: Iterable[object] | None) -> list[Any] | None:
    """Any iterable as a list of its own, numpy's numbers as Python's."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} is {value!r}; allowed: a list")
    return [item.item() if isinstance(item, np.generic) else item for item in value]


def _string_or_list(name: str, value: str | Iterable[str] | None) -> str | list[str] | None:
    return value if isinstance(value, str) else _list(name, value)


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequest(f"{name} is {value!r}; allowed: a whole number of at least {least}")


def _check_real(name: str, value: object, least: float, most: float, above: str | None = None) -> None:
    """`above`: `least` itself is not allowed, and what is, in words."""
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not least <= value <= most
        or (above is not None and value == least)
        or value == math.inf
    ):
        raise InvalidRequest(f"{name} is {value!r}; allowed: a number {above or f'from {least} to {most}'}")
