"""EngineService: takes front ends' messages to a runtime and its steps back to them, in one thread.

Owns which sample belongs to which front end. Decides nothing about what runs next; that is the scheduler's. It waits
only when the runtime has nothing to do (I1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from stretto.errors import InvalidRequest, NotSupported
from stretto.ipc.control import ControlLine, Stop, WorkerGone
from stretto.ipc.messages import (
    WORKER_BITS,
    Accepted,
    Begun,
    End,
    FromEngine,
    Logprobs,
    Look,
    Ping,
    Pong,
    Refused,
    Seen,
    Step,
    Submit,
    begun,
    decode_to_engine,
    encode,
    ended,
    unpack_tokens,
)
from stretto.ipc.sockets import LARGEST_MESSAGE, identity, worker_of
from stretto.observe.step_times import COLUMNS, Floats
from stretto.request import FinishReason, Request, SamplingParams, TokenArray
from stretto.scheduler.batch import StepOutput

logger = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 256
"""So that a flood of messages cannot keep the device waiting."""


class EngineLike(Protocol):
    """What is served: a Runtime, or something that behaves like one."""

    def check(self, prompt_ids: Sequence[int] | TokenArray, params: SamplingParams) -> TokenArray:
        """The prompt if it can be run; otherwise raises InvalidRequest."""

    def add(
        self,
        prompt_ids: Sequence[int] | TokenArray,
        params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue one sample."""

    def end(self, request: Request, reason: FinishReason = ..., num_output: int | None = None) -> None:
        """End a request with the next step."""

    def step(self) -> list[StepOutput]:
        """One turn."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def running(self) -> AbstractContextManager[None]:
        """The scope of steps in a row."""


def _check_answer_size(num_tokens: int, params: SamplingParams) -> None:
    """Refuse what would not fit into a message. Only far above the default of `max_logprobs`."""
    if params.prompt_logprobs is None:
        return
    most = LARGEST_MESSAGE // 4 // (8 * max(1, num_tokens)) - 1
    if params.prompt_logprobs > most:
        raise InvalidRequest(
            f"prompt_logprobs is {params.prompt_logprobs}; allowed for a prompt of {num_tokens} tokens: up to {most}"
        )


def nothing_recent(after: int) -> tuple[float, Floats]:
    """For engines that keep no times of their steps."""
    return 0.0, np.empty((0, len(COLUMNS)))


class EngineService:
    """Serves one engine until told to stop, or until the parent is gone."""

    def __init__(
        self,
        engine: EngineLike,
        socket: zmq.Socket[bytes],
        control: ControlLine,
        *,
        max_requests: int,
        figures: Callable[[], Mapping[str, float]],
        derive_seed: Callable[[int, int], int],
        recent: Callable[[int], tuple[float, Floats]] = nothing_recent,
    ) -> None:
        """`max_requests`: samples that may run and wait at once; more are refused as busy.

        `figures` gives what metrics show, by name; `derive_seed` the seed of one of the n samples of a seeded request;
        `recent` the time and the steps after an index, as Seen has them.
        """
        self._engine = engine
        self._socket = socket
        self._control = control
        self._max_requests = max_requests
        self._figures = figures
        self._derive_seed = derive_seed
        self._recent = recent
        self._requests: dict[int, Request] = {}
        """Samples that have not ended, by id."""
        self._id_of_uid: dict[int, int] = {}
        self._unbegun: set[int] = set()
        """Samples without a token so far."""
        self._told_logprobs: dict[int, int] = {}
        """For samples that want log-probabilities, by id: how many their front end has."""
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(control, zmq.POLLIN)
        self._stopping = False

    @property
    def num_requests(self) -> int:
        """Samples that have not ended."""
        return len(self._requests)

    def run(self) -> None:
        """Serve. Returns when told to stop; raises what the engine raises."""
        with self._engine.running():
            while not self._stopping:
                self._receive(block=not self._engine.has_work)
                if self._engine.has_work:
                    for output in self._engine.step():
                        self._tell(output)

    # -- in -----------------------------------------------------------------------------------------------------------

    def _receive(self, block: bool) -> None:
        ready = dict(self._poller.poll(None if block else 0))
        if self._control.fileno() in ready:
            self._obey()
        if self._socket in ready:
            for _ in range(_MESSAGES_PER_TURN):
                try:
                    name, data = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                except ValueError:
                    continue  # not two parts: nobody of ours
                self._take(name, data)

    def _obey(self) -> None:
        for message in self._control.receive():
            if isinstance(message, Stop):
                self._stopping = True
            elif isinstance(message, WorkerGone):
                self._forget_worker(message.worker)
        self._stopping |= self._control.closed

    def _take(self, name: bytes, data: bytes) -> None:
        worker = worker_of(name)
        try:
            message = decode_to_engine(data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            logger.error("a message that is none came from %r; it is dropped", name)
            return
        if worker is None:
            return
        if isinstance(message, Submit):
            self._send(worker, self._submit(message))
        elif isinstance(message, End):
            self._end(message)
        elif isinstance(message, Ping):
            self._send(worker, Pong(dict(self._figures())))
        elif isinstance(message, Look):
            now, steps = self._recent(message.after)
            self._send(worker, Seen(now, steps.tobytes(), dict(self._figures())))

    def _submit(self, message: Submit) -> FromEngine:
        count = len(message.prompts) * message.n
        if len(self._requests) + count > self._max_requests:
            return Refused(message.first_id, True, "the queue is full")
        try:
            params = message.sampling.params()
            prompts = [self._engine.check(unpack_tokens(prompt), params) for prompt in message.prompts]
            _check_answer_size(max(map(len, prompts), default=0), params)
        except (InvalidRequest, NotSupported) as error:
            return Refused(message.first_id, False, str(error))
        sample_id = message.first_id
        others = params if params.prompt_logprobs is None else params.of_sample(1)
        for prompt in prompts:
            for index in range(message.n):
                seed = None if params.seed is None else self._derive_seed(params.seed, index)
                request = self._engine.add(prompt, others if index else params, seed=seed, priority=message.priority)
                self._requests[sample_id] = request
                self._id_of_uid[request.uid] = sample_id
                self._unbegun.add(sample_id)
                if params.logprobs is not None:
                    self._told_logprobs[sample_id] = 0
                sample_id += 1
        return Accepted(message.first_id)

    def _end(self, message: End) -> None:
        reason = FinishReason.ABORT if message.num_output is None else FinishReason.STOP
        for sample_id in message.ids:
            request = self._requests.get(sample_id)
            if request is not None:  # else it has ended by itself, and its front end is about to learn it
                self._engine.end(request, reason, message.num_output)

    def _forget_worker(self, worker: int) -> None:
        for sample_id, request in self._requests.items():
            if sample_id >> WORKER_BITS == worker:
                self._engine.end(request, FinishReason.ABORT)

    # -- out ----------------------------------------------------------------------------------------------------------

    def _tell(self, output: StepOutput) -> None:  # hot path
        """One message to each front end that this step concerns."""
        id_of_uid = self._id_of_uid
        ids = np.fromiter(map(id_of_uid.__getitem__, output.uids.tolist()), np.int64, len(output.uids))
        owners = ids >> WORKER_BITS
        logprobs = self._new_logprobs(ids.tolist()) if self._told_logprobs else []
        beginnings = self._beginnings(ids.tolist()) if self._unbegun else []
        ends = [ended(request, id_of_uid[request.uid]) for request in output.finished]
        for request, end in zip(output.finished, ends, strict=True):
            del id_of_uid[request.uid], self._requests[end.id]
            self._told_logprobs.pop(end.id, None)
            self._unbegun.discard(end.id)
        for worker in {*owners.tolist(), *(end.id >> WORKER_BITS for end in ends)}:
            mine = owners == worker
            step = Step(
                ids[mine].tobytes(),
                output.tokens[mine].tobytes(),
                [end for end in ends if end.id >> WORKER_BITS == worker],
                [rows for rows in logprobs if rows.id >> WORKER_BITS == worker],
                [beginning for beginning in beginnings if beginning.id >> WORKER_BITS == worker],
            )
            self._send(worker, step)

    def _beginnings(self, ids: list[int]) -> list[Begun]:
        first = self._unbegun.intersection(ids)
        self._unbegun -= first
        return [begun(self._requests[sample_id], sample_id) for sample_id in sorted(first)]

    def _new_logprobs(self, ids: list[int]) -> list[Logprobs]:
        told = self._told_logprobs
        news = []
        for sample_id in ids:
            if sample_id in told:
                rows = (self._requests[sample_id].logprobs or [])[told[sample_id] :]
                told[sample_id] += len(rows)
                news.append(
                    Logprobs(
                        sample_id,
                        [row.logprob for row in rows],
                        [row.rank for row in rows],
                        [list(row.top_ids) for row in rows],
                        [list(row.top_logprobs) for row in rows],
                    )
                )
        return news

    def _send(self, worker: int, message: FromEngine) -> None:
        """Never blocks. A front end that is gone, or does not read for thousands of steps, loses its requests."""
        parts: list[Any] = [identity(worker), encode(message)]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            logger.error("front end %d does not read its messages; its requests end", worker)
            self._forget_worker(worker)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget_worker(worker)
