"""Two ranks and more are one engine: the same answers as one rank, whatever is asked of it.

One engine of two ranks serves most tests, under STRETTO_CHECK: each step's plan and tokens are compared as they come.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from stretto import LLM, SamplingParams
from stretto.config import EngineConfig
from stretto.device.base import Device
from stretto.distributed.digest import DigestCheck, RanksDiffer
from stretto.distributed.leader import Leader, check_gpus
from stretto.distributed.place import Place, place_of
from stretto.errors import EngineBroken, InvalidRequest
from tests.helpers.dummy_model import VOCAB_SIZE
from tests.helpers.llm_fixture import assert_idle
from tests.helpers.processes import children_of, nothing_left
from tests.helpers.server_process import ServerProcess, wait_until

OPTIONS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.1, top_k=50, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def one(dummy_model: Path) -> Iterator[LLM]:
    """The reference: one rank."""
    with LLM(str(dummy_model), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared_two(dummy_model: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch, nothing_left():
        patch.setenv("STRETTO_CHECK", "1")
        with LLM(str(dummy_model), tensor_parallel_size=2, **OPTIONS) as llm:
            yield llm


@pytest.fixture
def two(shared_two: LLM) -> Iterator[LLM]:
    """Two ranks; after each test both must be idle, and must have done the same steps."""
    yield shared_two
    assert_idle(shared_two)
    check = cast(DigestCheck, shared_two._runtime.loop.witness)
    steps = shared_two.stats().steps
    wait_until(lambda: check.num_compared == steps, "the digests of the other rank", 30)
    assert check.difference is None


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def mixed_load(count: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Short and long prompts, greedy and sampled, several samples, some that share a beginning."""
    random = np.random.default_rng(5)
    shared = random.integers(2, VOCAB_SIZE, 200).tolist()
    prompts, params = [], []
    for index in range(count):
        own = random.integers(2, VOCAB_SIZE, int(random.integers(1, 300))).tolist()
        prompts.append({"prompt_token_ids": shared + own if index % 3 == 0 else own})
        params.append(
            SamplingParams(
                n=1 + index % 2,
                temperature=0.0 if index % 4 == 0 else 0.9,
                seed=index,
                max_tokens=int(random.integers(1, 40)),
                repetition_penalty=1.2 if index % 5 == 0 else 1.0,
                ignore_eos=True,
            )
        )
    return prompts, params


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_one_rank(one: LLM, two: LLM, params: SamplingParams) -> None:
    prompts = ["the quick brown", "a fugue enters", "lazy"]
    assert tokens(two, prompts, params) == tokens(one, prompts, params)


def test_every_rank_tells_its_device_times(two: LLM) -> None:
    two.generate(["the quick"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    until = time.monotonic() + 5.0
    while (beat := two._runtime.beats()[1]).steps < two.stats().steps and time.monotonic() < until:
        time.sleep(0.05)
    assert beat.steps == two.stats().steps
    assert beat.busy_s > 0.0
    assert beat.bubble_s < beat.busy_s + two.stats().runnable_s


def test_a_mixed_load_is_that_of_one_rank(one: LLM, two: LLM) -> None:
    load = mixed_load(16)
    assert tokens(two, *load) == tokens(one, *load)


def test_log_probabilities_are_those_of_one_rank(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
    rows = [llm.generate(["the quick"], params, use_tqdm=False)[0].outputs[0].logprobs for llm in (one, two)]
    assert rows[0] is not None
    assert rows[1] is not None
    for ours, theirs in zip(*rows, strict=True):
        assert list(ours) == list(theirs)
        for token in ours:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_a_stop_string_ends_both_ranks_alike(one: LLM, two: LLM) -> None:
    text = one.generate(["the quick"], GREEDY, use_tqdm=False)[0].outputs[0].text
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=[text[5:7]], ignore_eos=True)
    answers = [llm.generate(["the quick"], params, use_tqdm=False)[0].outputs[0] for llm in (one, two)]
    assert answers[1].finish_reason == "stop"
    assert answers[0].text == answers[1].text == text[: text.index(text[5:7])]


def test_a_stream_can_be_left(one: LLM, two: LLM) -> None:
    stream = two.stream("the quick", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    stream = two.stream("the quick", GREEDY)
    streamed = [token for delta in stream for answer in delta.outputs for token in answer.token_ids]
    assert streamed == tokens(one, ["the quick"], GREEDY)[0][0]


def test_a_request_whose_time_is_over_ends_on_both_ranks(two: LLM) -> None:
    runtime = two._runtime
    request = runtime.add([5] * 10, SamplingParams(max_tokens=900, ignore_eos=True), timeout_s=0.05)
    while runtime.has_work:
        runtime.step()
    assert request.finish_reason is not None
    assert request.finish_reason.value == "timeout"


@pytest.mark.parametrize(("depth", "transport"), [(0, "zeromq"), (3, "gloo")])
def test_every_depth_and_transport_gives_the_same(one: LLM, dummy_model: Path, depth: int, transport: str) -> None:
    load = mixed_load(8)
    options = {**OPTIONS, "overlap_depth": depth, "control_transport": transport}
    with nothing_left(), LLM(str(dummy_model), tensor_parallel_size=2, **options) as llm:
        assert tokens(llm, *load) == tokens(one, *load)


def test_a_real_model_on_three_ranks(smollm2_path: Path) -> None:
    """9 query heads and 3 kv heads: one kv head a rank."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "overlap_depth": 2}
    prompts = ["The capital of France is", "Water boils at"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=0.8, seed=4, max_tokens=8),
    ]
    with LLM(str(smollm2_path), **options) as llm:
        expected = tokens(llm, prompts, params)
    with nothing_left(), LLM(str(smollm2_path), tensor_parallel_size=3, **options) as llm:
        assert tokens(llm, prompts, params) == expected


def test_a_server_of_two_ranks_answers_and_ends_with_them(one: LLM, dummy_model: Path) -> None:
    options = ("-tp", "2", "--max-model-len", "1024", "--max-num-seqs", "4", "--no-access-log")
    with ServerProcess(dummy_model, *options) as server:
        body = {"model": "tested", "prompt": "the quick", "max_tokens": 24, "temperature": 0}
        status, answer = server.post("/v1/completions", body)
        assert status == 200
        assert answer["choices"][0]["text"] == one.generate(["the quick"], GREEDY, use_tqdm=False)[0].outputs[0].text
        everyone = children_of(server.process.pid)
        (follower,) = children_of(server.engine_pid)
        os.kill(follower, 9)
        assert server.process.wait(10.0) == 1
        wait_until(lambda: f"rank 1 (pid {follower}" in server.text, "the message", 5)
        assert "was killed by signal 9 (SIGKILL)" in server.text
        wait_until(lambda: not set(everyone) & set(children_of(1)), "all processes to end", 5)
    assert "Traceback" not in server.text


def test_ranks_that_differ_stop_with_both_views(one: LLM, dummy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(one, [{"prompt_token_ids": [5, 6, 7]}], GREEDY)[0][0]
    monkeypatch.setenv("STRETTO_CHECK", "1")
    with nothing_left(), LLM(str(dummy_model), tensor_parallel_size=2, **OPTIONS) as llm:
        runtime = llm._runtime
        request = runtime.add([5, 6, 7], GREEDY)
        runtime.step()
        slots = runtime.scheduler.slots
        slots.stop_width = 1
        slots.stop_ids[request.slot, 0] = expected[10]  # on the leader only: there, this token ends the request

        def go_on() -> None:
            until = time.monotonic() + 30
            while time.monotonic() < until:
                runtime.step()

        with pytest.raises(RanksDiffer, match=r"ranks 0 and 1 differ in step \d+, for the first time") as error:
            go_on()
        assert "> rank 0  ended (request, reason, tokens): 0 stop" in str(error.value)
        assert "> rank 1  ended (request, reason, tokens): -" in str(error.value)
        error.value.__traceback__ = error.value.__cause__ = error.value.__context__ = None


# -- how they start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_local", "refused"), [(2, False), (3, True)])
def test_more_ranks_than_gpus_are_refused(num_local: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    device = SimpleNamespace(torch_device=torch.device("cuda:0"))
    place = Place(0, num_local, 0, num_local, None)
    with pytest.raises(InvalidRequest, match="3 GPUs are needed on this host") if refused else nullcontext():
        check_gpus(place, cast(Device, device))


def test_a_model_that_cannot_be_split_is_refused_before_any_rank_starts(
    dummy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: started.append(arguments))
    for size in (3, 1000):
        with (
            nothing_left(),
            pytest.raises(InvalidRequest, match=rf"parallel_size is {size}, but the model has 4"),
        ):
            LLM(str(dummy_model), tensor_parallel_size=size, **OPTIONS)
    assert not started


def test_an_address_in_use_is_told(dummy_model: Path, shared_two: LLM) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidRequest, match="the port is taken"):
            LLM(str(dummy_model), tensor_parallel_size=2, dist_init_addr=address, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": 3, "nnodes": 2}, "one must be a multiple of the other"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "give dist_init_addr"),
        ({"tensor_parallel_size": 2, "node_rank": 1}, "node_rank is 1; with nnodes 1 allowed are 0 to 0"),
        ({"dist_init_addr": "host"}, "allowed: host:port"),
        ({"dist_init_addr": "fd00::1:80"}, "allowed: host:port"),
        ({"dist_init_addr": "host:0"}, "allowed ports"),
        ({"control_transport": "pigeon"}, "control_transport"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "each rank takes a GPU of its own"),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": "h:1", "control_transport": "shared-memory"},
            "for one host",
        ),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineConfig("model", **options)


def test_ranks_are_consecutive_on_each_host() -> None:
    config = EngineConfig("model", tensor_parallel_size=6, nnodes=3, node_rank=2, dist_init_addr="[fd00::1]:29500")
    place = place_of(config, {})
    assert place == Place(4, 6, 0, 2, ("fd00::1", 29500))
    assert [(p.rank, p.local_rank) for p in place.neighbours()] == [(5, 1)]
    assert not place.leads
    assert not place.single_host


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchrun_says_which_rank_a_process_is() -> None:
    config = EngineConfig("model", tensor_parallel_size=4)
    assert place_of(config, TORCHRUN) == Place(3, 4, 1, 2, ("10.0.0.1", 29500), launched=True)
    with pytest.raises(InvalidRequest, match="torchrun started 4 processes, but tensor_parallel_size is 2"):
        place_of(EngineConfig("model", tensor_parallel_size=2), TORCHRUN)
    with pytest.raises(InvalidRequest, match="leave nnodes, node_rank and dist_init_addr alone"):
        place_of(EngineConfig("model", tensor_parallel_size=4, dist_init_addr="h:1"), TORCHRUN)
    assert place_of(EngineConfig("model"), TORCHRUN).size == 1


def test_an_engine_closed_under_load_ends_all_ranks_at_the_same_step(dummy_model: Path) -> None:
    with nothing_left():
        llm = LLM(str(dummy_model), tensor_parallel_size=2, **OPTIONS)
        stream = llm.stream("the quick", SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
        llm.close()  # under load
        llm.close()
        assert cast(Leader, llm._runtime._member).watch.last_steps() == {1: llm.stats().steps}
        del stream
    with pytest.raises(EngineBroken, match="stopped"):
        llm._runtime.step()
