"""What must hold on a GPU and cannot be seen on a CPU: graphs, overlap, syncs, allocations, bf16 against float32."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stretto import LLM
from stretto.assembly import assemble
from stretto.bench import workloads
from stretto.config import EngineConfig
from stretto.engine.engine import Engine, InFlightStep
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepPlan
from tests.helpers.tiny_models import save, tiny_config, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIXES = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "plain": SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True),
    "top-k": SamplingParams(top_k=5, max_tokens=40, ignore_eos=True),
    "large top-k": SamplingParams(top_k=1000, max_tokens=40, ignore_eos=True),
    "top-p": SamplingParams(top_p=0.8, max_tokens=40, ignore_eos=True),
    "min-p": SamplingParams(min_p=0.1, max_tokens=40, ignore_eos=True),
    "min tokens": SamplingParams(min_tokens=5, stop_token_ids=[3, 4], max_tokens=40),
    "log-probabilities": SamplingParams(logprobs=3, max_tokens=40, ignore_eos=True),
}

ADJUSTED = SamplingParams(presence_penalty=0.5, logit_bias={3: 1.0}, max_tokens=40, ignore_eos=True)
SCORED = SamplingParams(prompt_logprobs=2, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-0.6B's shape with four layers."""
    directory = workloads.write_model("qwen3-0.6b", tmp_path_factory.mktemp("models"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    return directory


class GuardedEngine(Engine):
    """Any hidden synchronisation while a step is launched is an error."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def started(model: Path, engine_type: type[Engine] = Engine, **options: object) -> Iterator[Runtime]:
    defaults = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "device": "cuda",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**30,
    }
    parts = assemble(EngineConfig(model=str(model), **{**defaults, **options}))  # type: ignore[arg-type]
    runtime = Runtime(
        parts.config,
        parts.device,
        parts.model,
        parts.attention,
        engine_type=engine_type,
        make_runner=parts.make_runner,
    )
    try:
        yield runtime
    finally:
        runtime.close()


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(10_000) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def outputs_of(runtime: Runtime, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    requests = [runtime.add(prompt, params, seed=index) for index, prompt in enumerate(prompts)]
    while runtime.has_work:
        runtime.step()
    runtime.scheduler.check()
    return [runtime.output_ids(request).tolist() for request in requests]


@pytest.mark.parametrize("mix", ["greedy", "plain", "top-p"])
def test_depth_and_graphs_change_no_token(model: Path, mix: str) -> None:
    """With the whole batch admitted at once, so that steps and batch sizes are the same at every depth."""
    given = prompts(11)
    streams = {}
    for depth in (0, 1, 2):
        for eager in (False, True):
            with started(model, overlap_depth=depth, enforce_eager=eager) as runtime:
                streams[depth, eager] = outputs_of(runtime, given, MIXES[mix])
    assert len({str(value) for key, value in streams.items() if not key[1]}) == 1, "depths differ with graphs"
    assert len({str(value) for key, value in streams.items() if key[1]}) == 1, "depths differ without graphs"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_auto_takes_a_float16_checkpoint_as_it_is(tmp_path: Path, dtype: str) -> None:
    """Its sixteen bits have three more for the fraction than bfloat16's. float32 is not worth its time."""
    save(tiny_model(tiny_config("llama")).to(getattr(torch, dtype)), tmp_path)
    options = {"skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    with LLM(str(tmp_path), device="cuda", **options) as llm:
        assert llm.dtype == ("float16" if dtype == "float16" else "bfloat16")
        params = replace(MIXES["greedy"], detokenize=False)
        answers = llm.generate([[5, 17, 99], [3, 1, 4, 1, 5]], params, use_tqdm=False)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [40, 40]


@pytest.mark.parametrize("dtype", ["float32"])
def test_graphs_change_no_token(model: Path, dtype: str) -> None:
    """In float32, where padding a batch to the ladder's size does not flip a choice."""
    given = prompts(11)
    with started(model, dtype=dtype) as runtime:
        captured = outputs_of(runtime, given, MIXES["plain"])
    with started(model, dtype=dtype, enforce_eager=True) as runtime:
        assert outputs_of(runtime, given, MIXES["plain"]) == captured


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_steps_with_prompts_change_no_token(model: Path, deterministic: bool) -> None:
    """Requests that arrive while others decode: chunks of any length, some behind cached prefixes, any number of rows.

    With every kind of sampling, in float32.
    """
    given = prompts(40, longest=250)
    given += [[*prompt, 1, 2, 3] for prompt in given[:8]]
    options = {"dtype": "float32", "max_num_batched_tokens": 200, "max_num_seqs": 40, "deterministic": deterministic}

    def tokens_of(runtime: Runtime) -> list[list[int]]:
        requests = []
        for index, prompt in enumerate(given):
            params = list(MIXES.values())[index // 4 % len(MIXES)]
            requests.append(runtime.add(prompt, params, seed=index))
            for _ in range(index % 4):
                runtime.step()
        while runtime.has_work:
            runtime.step()
        runtime.scheduler.check()
        return [runtime.output_ids(request).tolist() for request in requests]

    with started(model, **options) as runtime:
        graphs = runtime.engine.runner.prompt_graphs  # type: ignore[attr-defined]
        assert [graphs.padded(tokens) for tokens in (1, 33, 192, 193)] == [32, 64, 192, 200]
        captured = tokens_of(runtime)
        assert tokens_of(runtime) == captured
    with started(model, **options, enforce_eager=True) as runtime:
        assert tokens_of(runtime) == captured


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_launch_synchronises(model: Path, depth: int) -> None:
    with started(model, GuardedEngine, overlap_depth=depth) as runtime:
        mixes = (*MIXES.values(), ADJUSTED, SCORED)
        for params in mixes:
            outputs_of(runtime, prompts(5), params)
        for index, params in enumerate(mixes):
            runtime.add(prompts(1)[0], params, seed=index)
        while runtime.has_work:
            runtime.step()


def test_a_steady_decode_step_allocates_nothing(model: Path) -> None:
    with started(model) as runtime:
        for prompt in prompts(9):
            runtime.add(prompt, SamplingParams(temperature=0.7, max_tokens=200, ignore_eos=True), seed=1)
        for _ in range(50):
            runtime.step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(100):
            runtime.step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        while runtime.has_work:
            runtime.step()


def test_logits_in_bf16_are_those_of_float32_within_rounding(model: Path) -> None:
    """Log-probabilities of the best tokens, of prefill and decode, against float32 in plain torch on equal weights."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    given = prompts(12, longest=300)

    def logprobs(runtime: Runtime) -> list[dict[int, float]]:
        requests = [runtime.add(prompt, params, seed=1) for prompt in given]
        while runtime.has_work:
            runtime.step()
        firsts = [request.logprobs[0] for request in requests if request.logprobs]
        assert len(firsts) == len(given)
        return [dict(zip(first.top_ids, first.top_logprobs, strict=True)) for first in firsts]

    with started(model, dtype="bfloat16", max_num_batched_tokens=128, enable_prefix_caching=False) as runtime:
        fused = logprobs(runtime)
        rounded = runtime.engine.model
    with started(model, dtype="float32", attention_backend="torch", enable_prefix_caching=False) as runtime:
        exact_model = runtime.engine.model
        with torch.inference_mode():
            for exact, low in zip(exact_model.layers, rounded.layers, strict=True):  # type: ignore[attr-defined]
                for part in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"):
                    owner, name = part.split(".")
                    getattr(getattr(exact, owner), name).weight_OI.copy_(getattr(getattr(low, owner), name).weight_OI)
            exact_model.embedding.weight_VD.copy_(rounded.embedding.weight_VD)  # type: ignore[attr-defined]
            exact_model.head.weight_OI.copy_(rounded.head.weight_OI)  # type: ignore[attr-defined]
        reference = logprobs(runtime)
    differences = [abs(a[i] - b[i]) for a, b in zip(fused, reference, strict=True) for i in a.keys() & b.keys()]
    assert len(differences) > 100
    assert max(differences) < 0.1, max(differences)


def test_slots_and_pages_are_reused_under_load(model: Path) -> None:
    """Far more requests than slots, of very different lengths, with few pages: each is as it is alone (float32)."""
    rng = random.Random(7)
    given = prompts(40, longest=60)
    lengths = [rng.randint(1, 60) for _ in given]
    options = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "num_pages": 60,
        "max_model_len": 256,
        "kv_cache_memory_bytes": None,
    }
    with started(model, **options) as runtime:
        together = []
        for index, (prompt, length) in enumerate(zip(given, lengths, strict=True)):
            params = SamplingParams(temperature=0.9, max_tokens=length, ignore_eos=True)
            together.append(runtime.add(prompt, params, seed=index))
        while runtime.has_work:
            runtime.step()
        streams = [runtime.output_ids(request).tolist() for request in together]
        for index in range(0, 40, 7):
            params = SamplingParams(temperature=0.9, max_tokens=lengths[index], ignore_eos=True)
            request = runtime.add(given[index], params, seed=index)
            while runtime.has_work:
                runtime.step()
            assert runtime.output_ids(request).tolist() == streams[index]


def test_prompts_of_one_length_that_fill_a_step_are_those_of_the_paged_kernel(model: Path) -> None:
    """cuDNN computes their attention in a graph; launched kernel by kernel, not prepared, the paged kernel does."""
    rng = random.Random(11)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=10, ignore_eos=True)
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 1024, "max_model_len": 2048}

    def logprobs(runtime: Runtime, lengths: tuple[int, ...]) -> list[dict[int, float]]:
        given = [[rng.randrange(10_000) for _ in range(length)] for length in lengths]
        requests = [runtime.add(prompt, params, seed=1) for prompt in given]
        while runtime.has_work:
            runtime.step()
        found = [one for request in requests for one in request.logprobs or ()]
        return [dict(zip(one.top_ids, one.top_logprobs, strict=True)) for one in found]

    for lengths in ((512, 512), (1024,)):
        found = {}
        for eager in (False, True):
            rng.seed(sum(lengths))
            with started(model, **options, enforce_eager=eager) as runtime:
                assert runtime.engine.runner._equal_lengths == (() if eager else (512, 1024))  # type: ignore[attr-defined]
                found[eager] = logprobs(runtime, lengths)
        differences = [
            abs(a[i] - b[i]) for a, b in zip(found[False], found[True], strict=True) for i in a.keys() & b.keys()
        ]
        assert len(differences) > 10
        assert max(differences) < 0.05, max(differences)
