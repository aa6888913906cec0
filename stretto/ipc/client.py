"""EngineClient: a front end's side of the engine. Turns its steps into the answers of requests that are open here.

Owns every sample from its submission until the engine has named its end. One event loop only. The text of an answer is
made by output.Sample, as offline: streamed or not, the same code ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from stretto.errors import InvalidRequest, StrettoError
from stretto.ipc.answer import Answer
from stretto.ipc.messages import (
    WORKER_BITS,
    Accepted,
    Begun,
    End,
    Look,
    Ping,
    Pong,
    Refused,
    Sampling,
    Seen,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
    pack_tokens,
)
from stretto.ipc.sockets import engine_address, identity, limit
from stretto.output import Sample
from stretto.prompts import Prompt
from stretto.request import FinishReason, Request, SamplingParams
from stretto.tokenizer import Tokenizer


class EngineBusy(StrettoError):
    """The engine's queue is full; nothing was queued."""


class EngineDead(StrettoError):
    """The engine is gone, or does not answer any more."""


class _Live:
    """A sample that the engine works on, and whose it is."""

    __slots__ = ("answer", "sample")

    def __init__(self, sample: Sample, answer: Answer) -> None:
        self.sample = sample
        self.answer = answer

    def begin(self, begun: Begun) -> None:
        """Take in what the engine says of the prompt."""
        request = self.sample.request
        request.num_cached = begun.num_cached
        if begun.scored is not None and request.prompt_logprobs is not None:
            request.prompt_logprobs.append(0, begun.scored.tokens(request.prompt_logprobs.num_tops))


class EngineClient:
    """Speaks with one engine."""

    def __init__(
        self,
        worker: int,
        directory: Path,
        tokenizer: Tokenizer | None,
        on_step: Callable[[int, Mapping[float, int]], None],
    ) -> None:
        """`on_step` is told how many tokens a step message brought, and the answers' waits since the step before.

        Waits are seconds, each with the number of answers that had it: answers of the same steps share it.
        """
        self._tokenizer = tokenizer
        self._on_step = on_step
        self._next_id = worker << WORKER_BITS
        self._live: dict[int, _Live] = {}
        self._leaving: set[int] = set()
        """Ended here (abort, stop string), but not yet by the engine."""
        self._submitted: dict[int, Answer] = {}
        """Neither accepted nor refused so far, by first id."""
        self._pongs: list[asyncio.Future[None]] = []
        self._looks: list[asyncio.Future[Seen]] = []
        self.stats: dict[str, float] = {}
        """The engine's figures at its last Pong."""
        self.last_heard = time.monotonic()
        self.dead: EngineDead | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        limit(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity(worker))
        self._socket.connect(engine_address(directory))

    @property
    def num_samples(self) -> int:
        """Samples that the engine has not ended."""
        return len(self._live) + len(self._leaving)

    @property
    def num_open(self) -> int:
        """Samples that somebody waits for."""
        return len(self._live)

    async def submit(self, prompts: Sequence[Prompt], params: SamplingParams, priority: int) -> Answer:
        """Queue all samples of all prompts; returns once the engine has them.

        Raises InvalidRequest (the engine's words), EngineBusy or EngineDead; then nothing is queued. If the caller is
        cancelled meanwhile, what was queued ends.
        """
        if self.dead is not None:
            raise EngineDead(str(self.dead))
        answer = self._make_answer(prompts, params, priority)
        message = Submit(
            answer.first_id,
            [pack_tokens(prompt.token_ids) for prompt in prompts],
            params.n,
            Sampling.of(params),
            priority,
        )
        self._register(answer)
        try:
            await self._send(message)
            await answer.accepted
        except BaseException:
            answer.abort()
            raise
        return answer

    def _register(self, answer: Answer) -> None:
        for index, sample in enumerate(answer.samples):
            self._live[answer.first_id + index] = _Live(sample, answer)
        self._submitted[answer.first_id] = answer

    def _make_answer(self, prompts: Sequence[Prompt], params: SamplingParams, priority: int) -> Answer:
        first_id = self._next_id
        self._next_id += len(prompts) * params.n
        samples: list[Sample] = []
        others = params if params.prompt_logprobs is None else params.of_sample(1)
        for prompt in prompts:
            for index in range(params.n):
                request = Request(
                    uid=first_id + len(samples),
                    prompt_ids=np.asarray(prompt.token_ids, np.int32),
                    params=others if index else params,
                    seed=0,
                    final_len=0,
                    stop_ids=(),
                    priority=priority,
                    logprobs=None if params.logprobs is None else [],
                )
                samples.append(Sample(index, request, self._tokenizer, watched=True))
        return Answer(first_id, prompts, samples, self.abort)

    def abort(self, answer: Answer) -> None:
        """End what still runs of `answer`; its state stays until the engine has confirmed. Idempotent."""
        first = answer.first_id
        ids = [sample_id for sample_id in range(first, first + len(answer.samples)) if sample_id in self._live]
        if not answer.finished:
            answer.aborted = True
        for sample_id in ids:
            self._retire(sample_id)
        if ids and self.dead is None:
            self._send_soon(End(ids))
        answer.wake()

    def _retire(self, sample_id: int) -> None:
        del self._live[sample_id]
        self._leaving.add(sample_id)

    # -- messages -----------------------------------------------------------------------------------------------------

    async def _send(self, message: ToEngine) -> None:
        """Waits when the engine's queue of messages is full."""
        await self._socket.send(encode(message))

    def _send_soon(self, message: ToEngine) -> None:
        """Never waits; an engine that has 20,000 messages unread is dead."""
        sent = cast("asyncio.Future[None]", self._socket.send(encode(message), zmq.NOBLOCK))
        if sent.done() and sent.exception() is not None:
            self.fail("the engine does not read its messages")

    async def run(self) -> None:
        """Take the engine's messages until cancelled. Raises what is a bug."""
        while True:
            data = await self._socket.recv()
            self.last_heard = time.monotonic()
            try:
                message = decode_from_engine(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                self.fail("the engine sent a message that is none")
                return
            if isinstance(message, Step):
                self._take_step(message)
            elif isinstance(message, Accepted):
                answer = self._submitted.pop(message.first_id, None)
                if answer is not None and not answer.accepted.done():
                    answer.accepted.set_result(None)
            elif isinstance(message, Refused):
                self._refused(message)
            elif isinstance(message, Pong):
                self.stats = message.stats
                pongs, self._pongs = self._pongs, []
                for future in pongs:
                    if not future.done():
                        future.set_result(None)
            elif isinstance(message, Seen):
                looks, self._looks = self._looks, []
                for look in looks:
                    if not look.done():
                        look.set_result(message)

    def _refused(self, message: Refused) -> None:
        answer = self._submitted.pop(message.first_id, None)
        if answer is None:
            return
        for sample_id in range(answer.first_id, answer.first_id + len(answer.samples)):
            self._live.pop(sample_id, None)
            self._leaving.discard(sample_id)
        answer.fail(EngineBusy(message.message) if message.busy else InvalidRequest(message.message))

    def _take_step(self, step: Step) -> None:  # hot path
        ids = np.frombuffer(step.ids, np.int64).tolist()
        tokens = np.frombuffer(step.tokens, np.int32).tolist()
        live_of = self._live
        for rows in step.logprobs:
            live = live_of.get(rows.id)
            if live is not None and live.sample.request.logprobs is not None:
                live.sample.request.logprobs += rows.rows()
        for begun in step.begun:
            live = live_of.get(begun.id)
            if live is not None:
                live.begin(begun)
        stopping = {end.id for end in step.ended if end.reason == "stop" and end.stop_token is not None}
        woken: set[Answer] = set()
        for sample_id, token in zip(ids, tokens, strict=True):
            live = live_of.get(sample_id)
            if live is None:
                continue  # ended here a step or two ago
            answer = live.answer
            woken.add(answer)
            if live.sample.push(token, is_stop_token=sample_id in stopping):
                self._send_soon(End([sample_id], live.sample.num_tokens))
                self._finish(sample_id, live, FinishReason.STOP)
                self._leaving.add(sample_id)
        for end in step.ended:
            self._leaving.discard(end.id)
            live = live_of.get(end.id)
            if live is not None:
                live.sample.request.stop_token = end.stop_token
                self._finish(end.id, live, FinishReason(end.reason))
                woken.add(live.answer)
        now = time.monotonic()
        waits: dict[float, int] = {}
        for answer in woken:
            before = answer.last_token_at
            if before is None:
                answer.first_token_at = now
            else:
                waits[now - before] = waits.get(now - before, 0) + 1
            answer.last_token_at = now
            answer.wake()
        self._on_step(len(ids), waits)

    def _finish(self, sample_id: int, live: _Live, reason: FinishReason) -> None:
        live.sample.finish(reason)
        live.answer.num_open -= 1
        del self._live[sample_id]

    # -- health -------------------------------------------------------------------------------------------------------

    async def ping(self, seconds: float) -> bool:
        """Ask for fresh figures; whether they came within `seconds`."""
        if self.dead is not None:
            return False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(future)
        self._send_soon(Ping())
        with suppress(TimeoutError):
            await asyncio.wait_for(future, seconds)
            return True
        return False

    async def look(self, after: int, seconds: float) -> Seen | None:
        """The engine's steps after the one with index `after`; None if they do not come within `seconds`."""
        if self.dead is not None:
            return None
        future: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._looks.append(future)
        self._send_soon(Look(after))
        with suppress(TimeoutError):
            return await asyncio.wait_for(future, seconds)
        return None

    def fail(self, why: str) -> None:
        """The engine is dead: every open answer ends with an error, and no new one begins. Idempotent."""
        if self.dead is None:
            self.dead = EngineDead(why)
        answers = {live.answer for live in self._live.values()} | set(self._submitted.values())
        self._live.clear()
        self._leaving.clear()
        self._submitted.clear()
        for answer in answers:
            answer.fail(self.dead)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        self._context.term()
