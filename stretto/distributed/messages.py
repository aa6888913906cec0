"""Turns as bytes: what the leader publishes and followers carry out. Typed, checked where it arrives, never pickled.

Owns the form of a turn, not its way. A request travels with everything that its schedule and its tokens depend on;
what it becomes while it runs, each rank finds out alike. A turn without messages is about ten bytes long.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from stretto.cache.base import CacheKey
from stretto.engine.random import wrap_int64
from stretto.errors import EngineBroken
from stretto.request import FinishReason, Request, SamplingParams
from stretto.scheduler.turns import AddRequest, EndRequest, Message, Turn

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class BadTurn(EngineBroken):
    """What arrived is no turn of this leader's: damaged, out of order, or of another version."""


class Arrival(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """AddRequest, without its deadline: that is the leader's to judge."""

    uid: Count
    prompt: bytes
    """int32 token ids, little-endian."""
    params: dict[str, Any]
    """Those that are not the default, by name."""
    seed: int
    final_len: Count
    stop_ids: list[Count]
    priority: int
    adapter: str | None
    salt: str | None

    @classmethod
    def of(cls, request: Request) -> Arrival:
        """What other ranks must know of a request that has not begun."""
        return cls(
            uid=request.uid,
            prompt=np.asarray(request.prompt_ids, np.dtype("<i4")).tobytes(),
            params={
                name: _in_64_bits(value)
                for name, default in _DEFAULTS.items()
                if (value := getattr(request.params, name)) != default
            },
            seed=wrap_int64(request.seed),
            final_len=request.final_len,
            stop_ids=list(request.stop_ids),
            priority=request.priority,
            adapter=request.cache_key.adapter,
            salt=request.cache_key.salt,
        )

    def request(self) -> Request:
        """The request, as new. Raises BadTurn if it cannot be one."""
        if not self.prompt or len(self.prompt) % 4:
            raise BadTurn(f"request {self.uid} arrives with {len(self.prompt)} bytes of int32 prompt ids")
        unknown = self.params.keys() - _DEFAULTS.keys()
        if unknown:
            raise BadTurn(f"request {self.uid} arrives with unknown sampling parameters {sorted(unknown)}")
        try:
            params = msgspec.convert(self.params, SamplingParams)
        except (msgspec.ValidationError, ValueError, NotImplementedError) as error:
            raise BadTurn(f"request {self.uid} arrives with bad sampling parameters: {error}") from error
        return Request(
            uid=self.uid,
            prompt_ids=np.frombuffer(self.prompt, np.dtype("<i4")).astype(np.int32),
            params=params,
            seed=self.seed,
            final_len=self.final_len,
            stop_ids=tuple(self.stop_ids),
            priority=self.priority,
            cache_key=CacheKey(self.adapter, self.salt),
            logprobs=None if params.logprobs is None else [],
        )


class End(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """EndRequest."""

    uid: Count
    reason: FinishReason
    num_output: Count | None


class WireTurn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A turn, and which one it is."""

    index: Count
    """Turns published before it."""
    num_ready: Count
    stop: bool
    messages: list[Arrival | End]

    @classmethod
    def of(cls, index: int, turn: Turn) -> WireTurn:
        """`turn` as the leader's turn number `index`."""
        return cls(index, turn.num_ready, turn.stop, [_on_the_wire(message) for message in turn.messages])

    def turn(self, find: Callable[[int], Request | None]) -> Turn:
        """The turn. `find` gives the request with a uid; None: it has ended, so that nothing is left to be done.

        Requests that arrive with this turn are found here. Raises BadTurn.
        """
        arrived: dict[int, Request] = {}
        messages: list[Message] = []
        for message in self.messages:
            if isinstance(message, Arrival):
                arrived[message.uid] = message.request()
                messages.append(AddRequest(arrived[message.uid]))
            elif (request := arrived.get(message.uid) or find(message.uid)) is not None:
                messages.append(EndRequest(request, message.reason, message.num_output))
        return Turn(messages, self.num_ready, self.stop)


def encode(turn: WireTurn) -> bytes:
    """The turn as bytes."""  # hot path
    body = _encoder.encode(turn)
    return zlib.crc32(body).to_bytes(4, "little") + body


def decode(data: bytes) -> WireTurn:
    """Raises BadTurn for anything that `encode` has not made."""  # hot path
    body = memoryview(data)[4:]
    if zlib.crc32(body) != int.from_bytes(data[:4], "little") or not body:
        raise BadTurn(f"{len(data)} bytes have arrived that are no turn, or one that is damaged")
    try:
        turn: WireTurn = _decoder.decode(body)
    except msgspec.DecodeError as error:  # of a validation error too
        raise BadTurn(f"a turn of another form has arrived ({error}): do all ranks run the same version?") from error
    return turn


def _in_64_bits(value: Any) -> Any:
    """A count that no vocabulary and no context length reaches is as good as the largest one."""
    return min(value, _LARGEST) if isinstance(value, int) else value


def _on_the_wire(message: Message) -> Arrival | End:
    if isinstance(message, AddRequest):
        return Arrival.of(message.request)
    return End(message.request.uid, message.reason, message.num_output)


def _defaults(of: type) -> Mapping[str, Any]:
    return {f.name: f.default if f.default is not MISSING else None for f in fields(of)}


_DEFAULTS = _defaults(SamplingParams)
_LARGEST = 2**63 - 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WireTurn)
