"""The FlashInfer backend on a GPU: as close to float32 as the Triton backend, the same tokens at every depth."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from stretto.request import SamplingParams
from stretto.runtime import Runtime
from tests.gpu.test_cuda_engine import MIXES, model, outputs_of, prompts, started

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer"),
]
__all__ = ["model"]  # the fixture

OPTIONS = {"dtype": "bfloat16", "attention_backend": "flashinfer"}


def forced_logprobs(runtime: Runtime, texts: list[list[int]]) -> list[float]:
    """Of every token of given texts, in prompts that are cut into chunks and, the second time, cached in part."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    requests = [runtime.add(text, params, seed=1) for text in texts]
    while runtime.has_work:
        runtime.step()
    for request in requests:
        assert request.prompt_logprobs is not None
        found += request.prompt_logprobs.known().logprob_Q.tolist()
    return found


def first_logprobs(runtime: Runtime, texts: list[list[int]], tokens: int) -> list[dict[int, float]]:
    """The best tokens of the first `tokens` answers, from decode steps in a batch."""
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=10, ignore_eos=True)
    requests = [runtime.add(text, params, seed=1) for text in texts]
    while runtime.has_work:
        runtime.step()
    return [
        dict(zip(one.top_ids, one.top_logprobs, strict=True)) for request in requests for one in request.logprobs or ()
    ]


def test_logits_are_those_of_the_triton_backend_within_rounding(model: Path) -> None:
    texts = prompts(12, longest=300)
    by_backend = {}
    for backend in ("triton", "flashinfer"):
        options = {**OPTIONS, "attention_backend": backend}
        with started(model, **options, max_num_batched_tokens=128) as runtime:
            forced = forced_logprobs(runtime, texts)
            cached = first_logprobs(runtime, [[*text, 7, 8, 9] for text in texts], 1)
            decoded = first_logprobs(runtime, texts, 2)
            by_backend[backend] = (forced, cached, decoded)
    triton, flash = by_backend["triton"], by_backend["flashinfer"]
    assert len(flash[0]) == sum(len(text) - 1 for text in texts)
    assert max(abs(a - b) for a, b in zip(flash[0], triton[0], strict=True)) < 0.1
    for ours, theirs in zip(triton[1:], flash[1:], strict=True):
        pairs = [(a[i], b[i]) for a, b in zip(ours, theirs, strict=True) for i in a.keys() & b.keys()]
        assert len(pairs) > 50
        assert max(abs(a - b) for a, b in pairs) < 0.1


@pytest.mark.parametrize("mix", ["greedy", "plain"])
def test_depth_changes_no_token(model: Path, mix: str) -> None:
    """Plans of several steps are on their way at once."""
    streams = []
    for depth in (0, 1, 2):
        with started(model, **OPTIONS, overlap_depth=depth) as runtime:
            streams.append(outputs_of(runtime, prompts(11), MIXES[mix]))
    assert streams[0] == streams[1] == streams[2]
