"""Real architectures through the whole engine: pages, chunks, batches and overlap give transformers' tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stretto.assembly import assemble
from stretto.config import EngineConfig
from stretto.device.base import DeviceFault
from stretto.engine.engine import Engine, InFlightStep
from stretto.engine.staging import PlanLayout
from stretto.models.resolve import ResolvedModel
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepPlan
from tests.helpers.no_sync import HostRead, no_host_reads
from tests.helpers.real_model import load_reference
from tests.helpers.tiny_models import FAMILIES, reference_greedy, save, tiny_config, tiny_model

Tiny = tuple[ResolvedModel, list[list[int]]]
PROMPTS = [[5, 17, 99, 3], [1], list(range(20, 57)), [7] * 9]


class GuardedEngine(Engine):
    """Forbids every look at a device tensor's value while a step is launched and while it runs."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        with no_host_reads():
            return super().launch(plan)

    def _step(self, plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
        with no_host_reads():
            super()._step(plan, layout, staged)


@contextmanager
def started(model: Path, **options: object) -> Iterator[Runtime]:
    """A guarded runtime over a model directory or file."""
    parts = assemble(EngineConfig(model=str(model), skip_tokenizer_init=True, **options))  # type: ignore[arg-type]
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, engine_type=GuardedEngine)
    try:
        yield runtime
    finally:
        runtime.close()


def outputs_of(runtime: Runtime, prompts: list[list[int]], params: SamplingParams, seed: int = 1) -> list[list[int]]:
    """Output tokens of all prompts, run together."""
    requests = [runtime.add(prompt, params, seed=seed) for prompt in prompts]
    with runtime.running():
        while runtime.has_work:
            runtime.step()
    runtime.scheduler.check()
    return [runtime.output_ids(request).tolist() for request in requests]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ResolvedModel, list[list[int]]]:
    """A saved tiny model and transformers' greedy tokens for the prompts."""
    model = tiny_model(tiny_config(request.param))
    resolved = save(model, tmp_path_factory.mktemp(request.param))
    return resolved, [reference_greedy(model, prompt, 64) for prompt in PROMPTS]


@pytest.mark.parametrize(("depth", "chunk", "page_size"), [(0, 8, 16), (1, 8, 1), (1, 64, 64), (2, 5, 16), (3, 64, 16)])
def test_greedy_tokens_are_those_of_transformers(tiny: Tiny, depth: int, chunk: int, page_size: int) -> None:
    resolved, expected = tiny
    options = {"overlap_depth": depth, "max_num_batched_tokens": chunk, "page_size": page_size}
    with started(resolved.path, dtype="float32", max_num_seqs=4, **options) as runtime:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        assert outputs_of(runtime, PROMPTS, params) == expected


MIXES = {
    "greedy": SamplingParams(temperature=0, max_tokens=8),
    "plain": SamplingParams(max_tokens=8),
    "top-k": SamplingParams(top_k=5, max_tokens=8),
    "large top-k": SamplingParams(top_k=190, max_tokens=8),
    "top-p": SamplingParams(top_p=0.8, max_tokens=8),
    "min-p": SamplingParams(min_p=0.1, max_tokens=8),
    "all filters": SamplingParams(top_k=50, top_p=0.9, min_p=0.02, temperature=0.7, max_tokens=8),
    "min tokens": SamplingParams(min_tokens=5, stop_token_ids=[3, 4], max_tokens=8),
    "log-probabilities": SamplingParams(logprobs=3, max_tokens=8),
    "log-probabilities of the prompt": SamplingParams(logprobs=1, prompt_logprobs=2, max_tokens=8),
    "greedy with penalties": SamplingParams(temperature=0, presence_penalty=1.5, repetition_penalty=1.3, max_tokens=8),
    "a bias": SamplingParams(temperature=0, logit_bias={"7": 100, 9: -3.5}, max_tokens=8),
    "everything": SamplingParams(
        frequency_penalty=-0.7, logit_bias={5: 4}, top_k=50, top_p=0.9, min_tokens=3, logprobs=2, max_tokens=8
    ),
}


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_no_sampling_mix_looks_at_a_device_tensor(tiny: Tiny, depth: int) -> None:
    """And each mix gives the same tokens alone and beside all the others (the guard is in `started`)."""
    resolved, _ = tiny
    with started(resolved.path, dtype="float32", max_num_seqs=16, overlap_depth=depth) as runtime:
        alone = [outputs_of(runtime, [PROMPTS[0]], params)[0] for params in MIXES.values()]
        requests = [runtime.add(PROMPTS[0], params, seed=1) for params in MIXES.values()]
        while runtime.has_work:
            runtime.step()
        assert [runtime.output_ids(request).tolist() for request in requests] == alone


def test_the_guard_sees_a_look(tiny: Tiny) -> None:
    class PeekingEngine(GuardedEngine):
        def feed_back(self, slot_S: torch.Tensor, position_S: torch.Tensor, tokens_S: torch.Tensor) -> None:
            if (tokens_S >= 0).all():  # the one innocent line
                super().feed_back(slot_S, position_S, tokens_S)

    parts = assemble(EngineConfig(model=str(tiny[0].path), dtype="float32", skip_tokenizer_init=True))
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, engine_type=PeekingEngine)
    runtime.add(PROMPTS[0], SamplingParams(temperature=0))
    with pytest.raises(DeviceFault) as caught:
        _run_to_the_end(runtime)
    assert isinstance(caught.value.__cause__, HostRead)
    runtime.close()


def _run_to_the_end(runtime: Runtime) -> None:
    while runtime.has_work:
        runtime.step()


CHATS = [
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "Count from one to ten.",
    "Who wrote Hamlet?",
    "Explain gravity to a child in two sentences.",
    "Give me three names for a cat.",
    "Translate 'good morning' into Spanish.",
    "What is 7 times 8?",
    "List the primary colours.",
    "Why is the sky blue?",
]


def test_the_embedded_model_answers_as_transformers_does(smollm2_path: Path) -> None:
    """Greedy tokens: each is transformers' most likely one after all before it, so the whole streams are equal."""
    parts = assemble(EngineConfig(model=str(smollm2_path), dtype="float32", max_num_seqs=10))
    assert parts.tokenizer is not None
    prompts = [parts.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHATS]
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, engine_type=GuardedEngine)
    try:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        outputs = outputs_of(runtime, prompts, params)
    finally:
        runtime.close()
    reference = load_reference(smollm2_path)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output
