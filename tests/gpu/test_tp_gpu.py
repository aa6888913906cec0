"""A model over two GPUs computes what it computes on one, waits for nothing hidden, and ends as a whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import LLM, SamplingParams
from stretto.device.cuda import CudaDevice
from stretto.distributed.group import SOLO
from tests.gpu.test_compiled_gpu import assert_nothing_is_compiled_later
from tests.helpers.gpu_ranks import GpuCase, draws, expected_sums, sums, tokens_of
from tests.helpers.processes import children_of, free_port, nothing_left, wait_until_dead
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import save, tiny_config, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
ROOT = Path(__file__).parents[2]
LIMIT = 10.0
"""Seconds in which every rank must have ended."""
PROMPTS = [[5, 17, 99, 3], [1], list(range(20, 77)), [7] * 9, [3, 1, 4]]
MIX = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True),
    SamplingParams(top_k=5, top_p=0.8, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias={7: 2}, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.1, max_tokens=25, ignore_eos=True),
]
PLAIN = [SamplingParams(temperature=t, max_tokens=12, ignore_eos=True) for t in (0, 0.9, 0, 2.0, 0.6)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(2, "cuda")
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save(tiny_model(tiny_config("qwen3", max_position_embeddings=16_384)), directory)
    return directory


def test_an_engine_launches_on_its_own_gpu_whatever_the_threads_current_one_is() -> None:
    device = CudaDevice(1)
    stream, seen = device.stream("engine"), []
    with device.running():
        for _ in range(2):
            stream.run(lambda: seen.append(torch.cuda.current_device()))
            torch.cuda.set_device(0)
    assert seen == [1, 1]
    assert torch.cuda.current_device() == 1  # as before the scope
    torch.cuda.set_device(0)
    device.close()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 1), ("qwen3", 2), ("llama", 4)])
def test_tokens_are_those_of_one_gpu(family: str, kv_heads: int, graphs: bool, pool: RankPool, tmp_path: Path) -> None:
    save(tiny_model(tiny_config(family, num_key_value_heads=kv_heads)), tmp_path)
    for params in (PLAIN, MIX):
        case = GpuCase(tmp_path, PROMPTS, params, graphs)
        alone = tokens_of(SOLO, case)
        assert pool.run(2, tokens_of, case) == [alone, alone]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_sums_are_right_and_equal_on_both_gpus_to_the_bit(dtype: torch.dtype, pool: RankPool) -> None:
    first, second = pool.run(2, sums, dtype)
    for ours, theirs in zip(first, second, strict=True):
        rows, total, direct, added, norm = ours
        assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))
        expected = expected_sums(2, dtype, rows)
        assert torch.equal(total, expected[0])
        assert torch.equal(direct, expected[0])
        if not torch.equal(added, total):  # it went through peer memory
            assert torch.equal(added, expected[1])
            torch.testing.assert_close(norm, expected[2], rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [5, 9000, 151_936])
def test_candidates_give_the_tokens_of_the_whole_vocabulary(vocabulary: int, pool: RankPool) -> None:
    for found in pool.run(2, draws, vocabulary):
        if found is None:
            pytest.skip("these GPUs cannot write each other's memory")
        split, whole = found
        assert torch.equal(split, whole)


def _nothing_left() -> AbstractContextManager[None]:
    """`nothing_left`, unless other tests run beside this one, whose shared memory could be taken for this one's."""
    return nullcontext() if "PYTEST_XDIST_WORKER" in os.environ else nothing_left()


def _llm(model: Path, **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 2**26,
    }
    return LLM(str(model), **{**defaults, **options})


def _answers(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": [(i * 7 + j) % 199 for j in range(5 + 9 * i)]} for i in range(12)]
    params = [
        SamplingParams(
            temperature=(0, 0.8, 1.2)[i % 3],
            top_k=7 if i == 4 else 0,
            top_p=0.8 if i == 7 else 1.0,
            presence_penalty=1.0 if i == 10 else 0.0,
            logprobs=2 if i == 2 else None,
            seed=i,
            max_tokens=10 + 3 * i,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(12)
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    with _llm(model) as llm:
        return _answers(llm)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_depth_gives_the_tokens_of_one_gpu(
    depth: int, model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests of every step are compared."""
    monkeypatch.setenv("STRETTO_CHECK", "1")
    with _nothing_left(), _llm(model, tensor_parallel_size=2, overlap_depth=depth) as llm:
        assert _answers(llm) == alone
        assert _answers(llm) == alone


def test_no_rank_has_a_hidden_sync(model: Path) -> None:
    """Any hidden wait of either rank would end the engine."""
    with _nothing_left(), _llm(model, tensor_parallel_size=2, sync_guard="raise") as llm:
        _answers(llm)
        _answers(llm)
        assert llm.hidden_syncs() == []


def test_nothing_is_compiled_once_two_ranks_have_started(tmp_path: Path) -> None:
    assert_nothing_is_compiled_later(tmp_path, deterministic=False, ranks=2)


SCRIPT = """
    import json, sys
    from pathlib import Path
    from tests.gpu.test_tp_gpu import _answers, _llm

    with _llm(Path(sys.argv[1]), tensor_parallel_size=2, **json.loads(sys.argv[2])) as llm:
        print(json.dumps(_answers(llm)))
"""


def _start(script: Path, model: Path, *launcher: str, gpus: str = "0,1", **options: object) -> subprocess.Popen[str]:
    """Run SCRIPT, which is in `script`."""
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), str(model), json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": gpus},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("started_by", ["torchrun", "a command a host"])
def test_ranks_that_others_started_give_the_tokens_of_one_gpu(
    started_by: str, model: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    """Both hosts are this one; each sees one GPU."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    if started_by == "torchrun":
        ranks = [_start(script, model, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")]
    else:
        address = f"127.0.0.1:{free_port()}"
        ranks = [
            _start(script, model, gpus=str(host), nnodes=2, node_rank=host, dist_init_addr=address) for host in (0, 1)
        ]
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), ends
    assert json.loads(ends[0][0]) == alone


ENGINE = """
    import os, signal, sys, threading, time
    from stretto import LLM, SamplingParams
    from stretto.errors import EngineBroken
    from tests.helpers.processes import ranks_of

    model, phase, victim, name = sys.argv[1:]
    hit = 0.0

    def kill():
        global hit
        pid = os.getpid() if victim == "leader" else ranks_of(os.getpid())[0]
        print("hit", *ranks_of(os.getpid()), flush=True)
        hit = time.monotonic()
        os.kill(pid, signal.Signals[name])

    def progress(what, fraction):
        if phase == "start" and what == "loading weights" and not hit:
            kill()

    if phase == "connect":  # NCCL waits for a rank that has just died
        from stretto.distributed import leader

        real = leader.connect_group

        def connect(*args, **options):
            kill()
            return real(*args, **options)

        leader.connect_group = connect

    params = SamplingParams(temperature=0.8, max_tokens=16_000, ignore_eos=True, detokenize=False)
    short = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    try:
        llm = LLM(model, tensor_parallel_size=2, dtype="float32", device="cuda", skip_tokenizer_init=True,
                  max_model_len=16_384, max_num_seqs=8, kv_cache_memory_bytes=2**28, on_progress=progress)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        if phase == "prefill":
            threading.Timer(0.1, kill).start()
            llm.generate([{"prompt_token_ids": [5] * 16_000}] * 500, short, use_tqdm=False)
        elif phase in ("decode", "decode by nccl"):
            for number, _ in enumerate(llm.stream(prompt, params)):
                if number == 50:
                    kill()
        elif phase == "idle":
            llm.generate([prompt], short, use_tqdm=False)
            kill()
            while True:
                llm.generate([prompt], short, use_tqdm=False)
        elif phase == "shutdown":
            stream = llm.stream(prompt, params)
            next(stream)
            kill()
            llm.close()
            raise EngineBroken("closed")
    except EngineBroken as error:
        print(f"{time.monotonic() - hit:.2f} {error}", flush=True)
    if phase not in ("connect", "start"):
        llm.close()
"""


PHASES = ["connect", "start", "prefill", "decode", "decode by nccl", "idle", "shutdown"]
HITS = [
    *((phase, "follower", signal.SIGKILL) for phase in PHASES),
    *((phase, "leader", signal.SIGKILL) for phase in ("start", "decode", "idle")),
    *((phase, "follower", signal.SIGSTOP) for phase in ("prefill", "decode", "decode by nccl", "idle")),
    ("decode", "leader", signal.SIGSTOP),
]
SAID = {
    signal.SIGKILL: "was killed by signal 9 (SIGKILL)",
    signal.SIGSTOP: "hangs: its process is stopped (SIGSTOP)",
}


@pytest.mark.parametrize(
    ("phase", "victim", "sig"), HITS, ids=[f"{victim} gets {sig.name} in {phase}" for phase, victim, sig in HITS]
)
def test_a_rank_that_dies_or_hangs_ends_all(phase: str, victim: str, sig: signal.Signals, model: Path) -> None:
    """Within ten seconds, with its name, and no process is left."""
    command = [sys.executable, "-c", textwrap.dedent(ENGINE), str(model), phase, victim, sig.name]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment["STRETTO_DISABLE_PEER_MEMORY"] = str(int(phase == "decode by nccl"))
    with (
        _nothing_left(),
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as leader,
    ):
        assert leader.stdout is not None
        assert leader.stderr is not None
        try:
            said = leader.stdout.readline()
            assert said.startswith("hit"), leader.stderr.read()
            began = time.monotonic()
            followers = [int(pid) for pid in said.split()[1:]]
            if victim == "leader" and sig == signal.SIGSTOP:  # it says nothing and reaps nobody
                wait_until_dead(followers, LIMIT)
                leader.kill()
                assert SAID[sig] in leader.stderr.read()
                return
            ranks = [leader.pid, *followers, *children_of(leader.pid)]
            out, err = leader.communicate(timeout=2 * LIMIT)
            assert time.monotonic() - began < LIMIT + 2.0, f"{out}\n{err}"
            if victim == "follower":
                seconds, _, message = out.partition(" ")
                assert float(seconds) < LIMIT, f"{out}\n{err}"
                if phase != "shutdown":
                    assert message.startswith("rank 1 (pid "), f"{out}\n{err}"
                    assert SAID[sig] in message
                assert leader.returncode == 0, err
            wait_until_dead(ranks, LIMIT)
        finally:
            leader.kill()
