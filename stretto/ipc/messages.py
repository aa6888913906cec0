"""What front ends and the engine process say to each other, as bytes: typed, validated, never pickle.

Owns the form of the messages, not their way. All tokens of a step travel in one message, as packed arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from stretto.prompt_logprobs import ScoredTokens
from stretto.request import Request, SamplingParams, TokenArray, TokenLogprobs

WORKER_BITS = 40
"""A sample's id is `worker << WORKER_BITS | number`: unique over all front ends, and it tells whose it is."""


class Sampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sampling parameters that concern the engine; text is the front end's business."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """The part of `params` that the engine needs."""
        return cls(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=list(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=dict(params.logit_bias or {}),
        )

    def params(self) -> SamplingParams:
        """Checked parameters of one sample. Raises InvalidRequest or NotSupported."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids or None,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or None,
            detokenize=False,
        )


# -- to the engine --------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Run `n` samples of each prompt: all of them, or none. Answered by Accepted or Refused with the same `first_id`.

    Sample `i` of prompt `p` gets the id `first_id + p * n + i`.
    """

    first_id: int
    prompts: list[bytes]
    """int32 token ids of each."""
    n: int
    sampling: Sampling
    priority: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """End these samples: a client has left, or a stop string is complete. Each is answered by its Ended."""

    ids: list[int]
    num_output: int | None = None
    """Output tokens that complete the stop string; None for an abort."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Are you alive, and how is it going? Answered by Pong."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """What have you been doing since step `after` (its index)? Answered by Seen."""

    after: int


ToEngine: TypeAlias = Submit | End | Ping | Look

# -- from the engine ------------------------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """All samples of a Submit are queued."""

    first_id: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """None of them is: the input is bad (`busy` False, then the client may read `message`), or the queue is full."""

    first_id: int
    busy: bool
    message: str


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A sample's one end; after it, the engine never names the sample again."""

    id: int
    reason: str
    stop_token: int | None


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens from the second on, as packed arrays; see `ScoredTokens`."""

    logprobs: bytes
    """float32 [Q]."""
    ranks: bytes
    """int32 [Q]."""
    top_ids: bytes
    """int32 [Q, L]."""
    top_logprobs: bytes
    """float32 [Q, L]."""

    @classmethod
    def of(cls, scored: ScoredTokens) -> Scored:
        """Packed."""
        arrays = (scored.logprob_Q, scored.rank_Q, scored.top_ids_QL, scored.top_logprobs_QL)
        return cls(*(array.tobytes() for array in arrays))

    def tokens(self, num_tops: int) -> ScoredTokens:
        """Views, with `num_tops` (L) likeliest tokens each."""
        logprob_Q = np.frombuffer(self.logprobs, np.float32)
        shape = (len(logprob_Q), num_tops)
        return ScoredTokens(
            logprob_Q,
            np.frombuffer(self.ranks, np.int32),
            np.frombuffer(self.top_ids, np.int32).reshape(shape),
            np.frombuffer(self.top_logprobs, np.float32).reshape(shape),
        )


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """A sample's first token is in this message; so all is known that concerns its prompt."""

    id: int
    num_cached: int
    scored: Scored | None
    """If it was asked for."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one sample's new tokens, in their order."""

    id: int
    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def rows(self) -> list[TokenLogprobs]:
        """One record per token."""
        return [
            TokenLogprobs(*row) for row in zip(self.logprobs, self.ranks, self.top_ids, self.top_logprobs, strict=True)
        ]


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything that processed steps gave for the samples of one front end."""

    ids: bytes
    """int64: the sample of each new token, in order."""
    tokens: bytes
    """int32: the new token of each."""
    ended: list[Ended]
    logprobs: list[Logprobs]
    begun: list[Begun]


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The engine's figures, by name."""

    stats: dict[str, float]


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen"):
    """Recent steps, for people who watch. Sent only when somebody asks."""

    now: float
    """Seconds since the engine's start."""
    steps: bytes
    """float64 [steps, COLUMNS of observe.step_times], oldest first; times as `now`. Of many, the newest."""
    stats: dict[str, float]
    """As in Pong."""


FromEngine: TypeAlias = Accepted | Refused | Step | Pong | Seen

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError for anything that is no such message."""
    message: ToEngine = _to_engine.decode(data)
    return message


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.DecodeError for anything that is no such message."""
    message: FromEngine = _from_engine.decode(data)
    return message


def pack_tokens(ids: TokenArray | Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises OverflowError where one does not fit."""
    return np.asarray(ids, np.dtype("<i4")).tobytes()


def unpack_tokens(data: bytes) -> TokenArray:
    """A view of the token ids (int32). Raises ValueError if the bytes are no whole numbers of them."""
    return np.frombuffer(data, np.dtype("<i4"))


def ended(request: Request, sample_id: int) -> Ended:
    """The end of a request, for its front end."""
    reason = "abort" if request.finish_reason is None else request.finish_reason.value
    return Ended(sample_id, reason, request.stop_token)


def begun(request: Request, sample_id: int) -> Begun:
    """The beginning of a request's output, for its front end."""
    known = request.prompt_logprobs
    return Begun(sample_id, request.num_cached, None if known is None else Scored.of(known.known()))
