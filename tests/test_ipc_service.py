"""EngineService and EngineClient over a real socket, around an engine that tells what it was asked."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from stretto.errors import InvalidRequest
from stretto.ipc.answer import Answer
from stretto.ipc.client import EngineBusy, EngineClient, EngineDead
from stretto.ipc.control import ControlLine, Stop, WorkerGone
from stretto.ipc.engine_service import EngineService
from stretto.ipc.sockets import engine_socket
from stretto.prompts import Prompt
from stretto.request import FinishReason, Request, SamplingParams
from stretto.scheduler.batch import StepOutput
from tests.helpers.server_process import PATIENCE, wait_until


class CountingEngine:
    """Answers each request with 1, 2, 3 and so on, one token a step, when it is allowed to step."""

    def __init__(self) -> None:
        self.live: dict[int, Request] = {}
        self.seeds: list[int | None] = []
        self.gate = threading.Event()
        self.gate.set()
        self._ended: list[Request] = []
        self._count = 0

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
        if 99 in list(prompt_ids):
            raise InvalidRequest("token id 99 is not in the vocabulary")
        return np.asarray(prompt_ids, np.int32)

    def add(self, prompt_ids: Any, params: SamplingParams, *, seed: int | None = None, priority: int = 0) -> Request:
        request = Request(self._count, prompt_ids, params, 0, 0, ())
        self._count += 1
        self.seeds.append(seed)
        self.live[request.uid] = request
        return request

    def end(self, request: Request, reason: FinishReason = FinishReason.ABORT, num_output: int | None = None) -> None:
        if self.live.pop(request.uid, None) is not None:
            request.finish_reason = reason
            self._ended.append(request)

    def step(self) -> list[StepOutput]:
        if not self.gate.wait(0.001):
            return self._output([], [])
        uids = list(self.live)
        for uid in uids:
            self.live[uid].num_output += 1
        tokens = [self.live[uid].num_output for uid in uids]
        for uid in uids:
            if self.live[uid].num_output == self.live[uid].params.max_tokens:
                self.end(self.live[uid], FinishReason.LENGTH)
        return self._output(uids, tokens)

    def _output(self, uids: list[int], tokens: list[int]) -> list[StepOutput]:
        ended, self._ended = tuple(self._ended), []
        return [StepOutput(0, np.array(uids, np.int64), np.array(tokens, np.int32), ended)]

    @property
    def has_work(self) -> bool:
        return bool(self.live or self._ended)

    @contextmanager
    def running(self) -> Iterator[None]:
        yield


class Served:
    """The engine behind its service, in a thread."""

    def __init__(self, directory: Path, max_requests: int) -> None:
        self.directory = directory
        self.engine = CountingEngine()
        ours, theirs = socket.socketpair()
        self.control = ControlLine(ours)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ControlLine(theirs), max_requests))
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _serve(self, control: ControlLine, max_requests: int) -> None:
        with zmq.Context() as context, engine_socket(context, self.directory) as bound:
            self._ready.set()
            EngineService(
                self.engine,
                bound,
                control,
                max_requests=max_requests,
                figures=lambda: {"live": float(len(self.engine.live))},
                derive_seed=lambda seed, index: seed + index,
            ).run()
        control.close()

    def stop(self) -> None:
        self.engine.gate.set()
        self.control.send(Stop())
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, 10)
    yield made
    made.stop()


def run(served: Served, work: Callable[[EngineClient], Coroutine[Any, Any, None]], worker: int = 1) -> None:
    """Do `work` with a client of its own."""

    async def main() -> None:
        client = EngineClient(worker, served.directory, None, lambda count, waits: None)
        reader = asyncio.ensure_future(client.run())
        try:
            await asyncio.wait_for(work(client), PATIENCE)
        finally:
            reader.cancel()
            client.close()

    asyncio.run(main())


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(detokenize=False, **fields)


def tokens(answer: Answer) -> list[list[int]]:
    return [sample.output().token_ids for sample in answer.samples]


def test_every_sample_gets_its_own_tokens(served: Served) -> None:
    async def work(client: EngineClient) -> None:
        prompts = [Prompt(None, [1, 2]), Prompt(None, [3])]
        one = await client.submit(prompts, params(n=2, max_tokens=5, seed=10), 0)
        other = await client.submit(prompts[:1], params(max_tokens=3), 0)
        await one.end()
        await other.end()
        assert tokens(one) == [[1, 2, 3, 4, 5]] * 4
        assert tokens(other) == [[1, 2, 3]]
        assert {sample.finish_reason for sample in one.samples} == {"length"}
        assert client.num_samples == 0

    run(served, work)
    assert served.engine.seeds == [10, 11, 10, 11, None]


def test_what_cannot_be_run_is_refused_whole(served: Served) -> None:
    async def work(client: EngineClient) -> None:
        with pytest.raises(InvalidRequest, match="99"):
            await client.submit([Prompt(None, [1]), Prompt(None, [99])], params(), 0)
        assert client.num_samples == 0

    run(served, work)
    assert served.engine.seeds == []


def test_a_full_engine_is_busy_for_all_front_ends(served: Served) -> None:
    served.engine.gate.clear()

    async def work(client: EngineClient) -> None:
        with pytest.raises(EngineBusy):
            await client.submit([Prompt(None, [1])], params(n=11), 0)
        answer = await client.submit([Prompt(None, [1])], params(n=10), 0)
        with pytest.raises(EngineBusy):
            await client.submit([Prompt(None, [1])], params(), 0)
        answer.abort()
        while client.num_samples:
            await asyncio.sleep(0.001)
        await client.submit([Prompt(None, [1])], params(), 0)

    run(served, work)


def test_an_aborted_answer_counts_until_the_engine_has_ended_it(served: Served) -> None:
    served.engine.gate.clear()

    async def work(client: EngineClient) -> None:
        answer = await client.submit([Prompt(None, [1])], params(n=3), 0)
        answer.abort()
        answer.abort()
        assert answer.finished
        assert client.num_open == 0
        assert client.num_samples == 3
        while client.num_samples:
            await asyncio.sleep(0.001)

    run(served, work)
    assert not served.engine.live


def test_a_front_end_that_dies_takes_only_its_own_requests_along(served: Served) -> None:
    served.engine.gate.clear()

    async def leave(client: EngineClient) -> None:
        await client.submit([Prompt(None, [1])], params(n=4, max_tokens=10_000), 0)

    async def stay(client: EngineClient) -> None:
        answer = await client.submit([Prompt(None, [1])], params(max_tokens=50), 0)
        assert len(served.engine.live) == 5
        served.control.send(WorkerGone(1))
        while len(served.engine.live) > 1:
            await asyncio.sleep(0.001)
        served.engine.gate.set()
        await answer.end()
        assert tokens(answer) == [list(range(1, 51))]

    run(served, leave, worker=1)
    run(served, stay, worker=2)


def test_garbage_does_not_stop_the_service(served: Served) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"ipc://{served.directory / 'engine.sock'}")
        for parts in ([b"garbage"], [b"\x80\x04\x95"], [b"a", b"b", b"c"], [b""]):
            stranger.send_multipart(parts)

        async def work(client: EngineClient) -> None:
            answer = await client.submit([Prompt(None, [1])], params(max_tokens=2), 0)
            await answer.end()
            assert tokens(answer) == [[1, 2]]

        run(served, work)


def test_a_ping_brings_the_figures_and_its_absence_is_seen(served: Served) -> None:
    async def work(client: EngineClient) -> None:
        assert await client.ping(PATIENCE)
        assert client.stats == {"live": 0.0}
        answer = await client.submit([Prompt(None, [1])], params(max_tokens=100_000), 0)
        client.fail("it is dead")
        with pytest.raises(EngineDead):
            await client.submit([Prompt(None, [1])], params(), 0)
        assert isinstance(answer.error, EngineDead)
        assert not await client.ping(0.01)

    run(served, work)
    served.control.send(WorkerGone(1))
    wait_until(lambda: not served.engine.live, "the request to end")


def test_the_service_ends_when_its_parent_hangs_up(tmp_path: Path) -> None:
    made = Served(tmp_path, 1)
    made.control.close()
    made._thread.join(PATIENCE)
    assert not made._thread.is_alive()
