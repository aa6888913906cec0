"""Frontend: what the endpoints of one front end share. Admits requests, makes prompts, and watches over the open ones.

Owns every open request of this process from admission to its close.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from stretto.errors import StrettoError
from stretto.ipc.answer import Answer
from stretto.ipc.client import EngineClient
from stretto.ipc.control import EngineInfo
from stretto.prompts import Prompt
from stretto.request import FinishReason, SamplingParams
from stretto.server.errors import (
    BUSY_RETRY,
    CONTEXT_EXCEEDED,
    DRAIN_RETRY,
    LOADING_RETRY,
    ApiError,
    as_api_error,
    bad_request,
    engine_dead,
    prompt_too_long,
    too_many,
    unavailable,
)
from stretto.server.metrics import Metrics
from stretto.server.settings import ServerConfig
from stretto.tokenizer import Tokenizer

T = TypeVar("T")
_LONG_TEXT = 4096
"""Characters from which on a text is tokenised beside the event loop."""
_MESSAGE_COST = 64
"""Characters whose tokens cost about as much as what a template does with a message."""


NO_ANSWER = frozenset({FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT})
"""Ends that make an error of an answer; clients are never told them as a finish reason."""


class OpenRequest:
    """One HTTP request that the engine works for, from admission to its close."""

    def __init__(self, answer: Answer, num_tokens: int) -> None:
        self.answer = answer
        self.num_tokens = num_tokens
        """What it counts against the limit of open prompt tokens."""
        self.sending_since: float | None = None
        """When the client last let a write wait; None while it reads."""
        self.give_up: Callable[[], object] | None = None
        """Ends the response of a client that does not read."""


class Frontend:
    """The state of one front end. One event loop only."""

    def __init__(self, config: ServerConfig, model: str) -> None:
        self.config = config
        self.names = config.served_model_names or (model,)
        self.metrics = Metrics(self.names[0])
        self.started = int(time.time())
        self.draining = False
        self._engine: EngineClient | None = None
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._longest_token = 0
        self._open: set[OpenRequest] = set()
        self._open_tokens = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def engine_ready(self, info: EngineInfo, engine: EngineClient, tokenizer: Tokenizer | None) -> None:
        """From now on requests are taken."""
        self._info, self._engine, self._tokenizer = info, engine, tokenizer
        if tokenizer is not None and tokenizer.has_token_bytes:
            self._longest_token = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))

    @property
    def info(self) -> EngineInfo:
        """What the engine is. Raises ApiError 503 while it loads."""
        if self._info is None:
            raise unavailable("the model is loading", "loading", LOADING_RETRY)
        return self._info

    @property
    def engine(self) -> EngineClient:
        """The engine. Raises ApiError 503 while it loads or once it is dead."""
        if self._engine is None:
            raise unavailable("the model is loading", "loading", LOADING_RETRY)
        if self._engine.dead is not None:
            raise engine_dead()
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError 400 for a model without one."""
        if self._tokenizer is None and self.info:
            raise bad_request("this model came without a tokenizer: only prompts of token ids work", "prompt")
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model came with one."""
        return self._tokenizer is not None

    @property
    def num_open(self) -> int:
        """Requests whose answers are not complete."""
        return len(self._open)

    def check_ready(self) -> None:
        """Raise ApiError 503 unless new requests are taken."""
        if self.draining:
            raise unavailable("the server is shutting down", "draining", DRAIN_RETRY)
        assert self.engine is not None

    # -- prompts ------------------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries. Raises ApiError 404 for a model that is not served here."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(404, f"the model '{name[:200]}' does not exist here", param="model", code="model_not_found")
        return name

    def encode(self, text: str, add_special_tokens: bool = True) -> Prompt:
        """A text as a prompt. Long ones take their time: to be called `beside`. Raises InvalidRequest or ApiError."""
        self.check_length(text)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(text, np.asarray(ids, np.int32))

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Prompt:
        """A conversation as a prompt. Raises InvalidRequest with the template's own words, or ApiError."""
        tokenizer = self.tokenizer
        size = sum(len(message["content"]) + _MESSAGE_COST for message in messages)

        def work() -> Prompt:
            text = tokenizer.apply_chat_template(messages, **options)
            return self.encode(text, add_special_tokens=False)

        return await self.beside(size, work)

    def check_length(self, text: str) -> None:
        """Refuse, without tokenising it, a text that cannot fit: no token stands for more bytes than the longest."""
        room = self._longest_token * self.info.max_model_len
        if room and len(text) > room:
            raise bad_request(
                f"the prompt has {len(text)} characters; no more than {room} can fit into the context length of "
                f"{self.info.max_model_len} tokens",
                "prompt",
                CONTEXT_EXCEEDED,
            )

    async def beside(self, size: int, work: Callable[[], T]) -> T:
        """Run `work`, in a thread if the `size` of its input, all of it together, says that it takes long."""
        return work() if size < _LONG_TEXT else await asyncio.to_thread(work)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, prompts: Sequence[Prompt], params: SamplingParams, priority: int | None) -> OpenRequest:
        """Queue all samples of all prompts. Raises ApiError; whoever gets the request closes it."""
        self.check_ready()
        self.check_room(len(prompts), params.n)
        engine, num_tokens = self.engine, sum(len(prompt.token_ids) for prompt in prompts)
        limit = self.config.max_queued_tokens
        if limit is not None and self._open_tokens and self._open_tokens + num_tokens > limit:
            raise too_many("the queue holds too many tokens; try again later")
        self._check_context(prompts, params)
        self._open_tokens += num_tokens
        try:
            request = OpenRequest(await engine.submit(prompts, params, priority or 0), num_tokens)
        except BaseException as error:
            self._open_tokens -= num_tokens
            if isinstance(error, StrettoError):
                raise as_api_error(error) from None
            raise
        self._open.add(request)
        return request

    def check_room(self, num_prompts: int, n: int) -> None:
        """Raise ApiError unless so many samples may be queued: to be asked before their prompts cost anything."""
        count, room = num_prompts * n, self.info.max_num_seqs + self.config.max_queued_requests
        if count > room:
            raise bad_request(
                f"the request asks for {count} samples; this server takes {room} at once", "n" if n > 1 else "prompt"
            )
        if self.engine.num_samples + count > room:
            raise too_many("the queue is full; try again later")

    def _check_context(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        longest, limit = max(len(prompt.token_ids) for prompt in prompts), self.info.max_model_len
        if longest >= limit:
            raise prompt_too_long(longest, limit)
        if self.config.clamp_max_tokens or params.max_tokens is None:
            return
        if longest + params.max_tokens > limit:
            raise bad_request(
                f"the prompt has {longest} tokens and max_tokens is {params.max_tokens}: together "
                f"{longest + params.max_tokens}, more than the context length of {limit}",
                "max_tokens",
                CONTEXT_EXCEEDED,
            )

    def close(self, request: OpenRequest) -> None:
        """The response is complete, or its client has left: end what still runs. Idempotent; the only place."""
        if request not in self._open:
            return
        self._open.remove(request)
        self._open_tokens -= request.num_tokens
        request.answer.abort()
        self.metrics.observe(request.answer)

    async def watch(self) -> None:
        """End responses that nobody reads. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.config.slow_client_timeout / 2 or 1.0))
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """One round of `watch`; times are those of time.monotonic."""
        for request in list(self._open):
            waits = request.sending_since
            if waits is not None and now - waits > self.config.slow_client_timeout and request.give_up is not None:
                request.give_up()

    def stop_open(self) -> None:
        """End every open request with an error: the time to finish is over."""
        for request in list(self._open):
            request.answer.fail(ServerStops("the server has stopped"))


class ServerStops(StrettoError):
    """The server's time for running requests is over."""


def answer_error(answer: Answer) -> ApiError | None:
    """Why an ended answer is no answer, for the client."""
    error = answer.error
    if isinstance(error, ServerStops):
        return unavailable("the server has stopped", "draining", DRAIN_RETRY)
    if error is not None:
        return as_api_error(error)
    reasons = {sample.finish_reason for sample in answer.samples}
    if FinishReason.TIMEOUT in reasons:
        return ApiError(504, "the request took too long", kind="timeout_error", code="timeout")
    if FinishReason.ERROR in reasons:
        return ApiError(500, "the model gave no numbers for this prompt", kind="internal_error", code="model_failed")
    if FinishReason.ABORT in reasons:
        return unavailable("the engine ended the request", "aborted", BUSY_RETRY)
    return None
