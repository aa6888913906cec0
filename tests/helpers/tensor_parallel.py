"""What the ranks of a split model do in tests, and what one rank does alone to compare with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from stretto.attention.base import AttentionShape
from stretto.attention.paged_torch import PagedTorchAttention
from stretto.config import SchedulerConfig
from stretto.device.cpu import CpuDevice
from stretto.distributed.group import TensorGroup
from stretto.engine.runner import EagerRunner, MakeRunner
from stretto.engine.sampler import SampledOut, sample
from stretto.engine.sampling_rows import SamplingMix, SamplingRows
from stretto.engine.split_sampling import sample_split
from stretto.errors import EngineBroken
from stretto.models.loader import load_model
from stretto.models.resolve import ResolvedModel
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from tests.helpers.dense import CPU, logits_of


@dataclass(frozen=True)
class Case:
    """A model, and what to run on it."""

    path: Path
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    """One for each prompt, or one for all."""
    dtype: str = "float32"
    load_format: str = "auto"
    fused: bool = False
    """The Triton kernels, interpreted."""

    @property
    def resolved(self) -> ResolvedModel:
        return ResolvedModel("directory" if self.path.is_dir() else "gguf", self.path, self.path.name)


@dataclass(frozen=True)
class Found:
    """What a rank, or one process alone, computed."""

    logits: Tensor
    """Of the first prompt [T, V]."""
    tokens: list[list[int]]
    shape: tuple[int, int] = field(default=(0, 0))
    """Query and kv heads of the attention."""


def compute(group: TensorGroup, case: Case) -> Found:
    """Logits by a dense forward, tokens by an engine with pages, chunks and batches."""
    options: dict[str, Any] = {"dtype": case.dtype, "load_format": case.load_format, "group": group}
    with mock.patch("stretto.layers.linear.onednn_available", return_value=not case.fused):
        device = CpuDevice(1)
        model = device.call(lambda: load_model(case.resolved, device=CPU, max_model_len=128, **options))
    logits = device.call(lambda: logits_of(model, list(case.prompts[0])))
    config = SchedulerConfig(
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_model_len=128,
        page_size=16,
        num_pages=64,
        # Every rank schedules for itself here, and deeper loops look at what is done already.
        overlap_depth=0,
        vocab_size=model.config.vocab_size,
    )
    shape = AttentionShape.of(
        model.config, page_size=config.page_size, num_pages=config.num_pages, dtype=model.kv_dtype, device=CPU
    )
    attention: Any
    make_runner: MakeRunner = EagerRunner if group.size == 1 else partial(EagerRunner, split=model)
    if case.fused:
        from stretto.attention.triton_paged import TritonPagedAttention
        from stretto.engine.fused_runner import fused_runner
        from stretto.models.fused import FusedDecoder

        attention = device.call(lambda: TritonPagedAttention(shape, config.max_rows))
        make_runner = fused_runner(FusedDecoder(model), graphs=False)
    else:
        attention = device.call(lambda: PagedTorchAttention(shape))
    runtime = Runtime(config, device, model, attention, make_runner=make_runner)
    try:
        params = list(case.params) * (len(case.prompts) if len(case.params) == 1 else 1)
        requests = [
            runtime.add(prompt, wanted, seed=7 + index)
            for index, (prompt, wanted) in enumerate(zip(case.prompts, params, strict=True))
        ]
        with runtime.running():
            while runtime.has_work:
                runtime.step()
        tokens = [runtime.output_ids(request).tolist() for request in requests]
    finally:
        runtime.close()
    return Found(logits, tokens, (shape.num_heads, shape.num_kv_heads))


def sum_and_gather(group: TensorGroup) -> tuple[Tensor, Tensor]:
    """The ranks' random numbers summed, and their ranks side by side, cut after ten columns."""
    numbers = torch.randn(3, 1001, generator=torch.Generator().manual_seed(group.rank))
    return group.all_reduce(numbers), group.all_gather(torch.full((2, 3), float(group.rank)), 10)


def error_of_rank_0(group: TensorGroup, how: str) -> str | None:
    """What rank 0 is told when rank 1 does not come to an all-reduce, being "lost" or "late", or when it is "aborted".

    And what it is told when it tries again, on a second line.
    """
    if group.rank == 1:
        if how == "lost":
            group.close()
        else:
            threading.Event().wait(1.5)
        return None
    if how == "aborted":
        threading.Timer(0.2, group.abort).start()
    told = []
    for _ in range(2):
        try:
            group.all_reduce(torch.ones(4))
        except EngineBroken as error:
            told.append(str(error))
    return "\n".join(told)


def sample_both_ways(group: TensorGroup, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens of rows of every kind from this rank's part of the logits, and from all of them."""
    count = 400
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, vocabulary // 2] = torch.nan
    logits[1, 0] = torch.inf
    logits[2] = -torch.inf
    logits[3] = 1.0  # all equal: the lowest id
    logits[4:200, 1:] = -torch.inf  # impossible everywhere but on the first rank
    logits[4:100, -1] = 0.5
    rows = SamplingRows(
        temperature_S=torch.tensor([0.0, 0.7, 1.0, 3.0, 1e30]).repeat(count // 5),
        top_k_S=torch.zeros(count, dtype=torch.int64),
        top_p_S=torch.ones(count),
        min_p_S=torch.zeros(count),
        seed_S=torch.arange(count) * 7919,
        position_S=torch.arange(count) % 13,
        min_position_S=torch.zeros(count, dtype=torch.int64),
        stop_ids_SE=torch.full((count, 1), -1, dtype=torch.int64),
    )
    mix = SamplingMix(False, False, 0, False, False, False, -1)
    split, whole = SampledOut.allocate(count, 0, CPU), SampledOut.allocate(count, 0, CPU)
    width = -(-vocabulary // group.size)
    ids = range(min(group.rank * width, vocabulary), min((group.rank + 1) * width, vocabulary))
    part = torch.full((count, width), torch.nan)  # padding must not be looked at
    part[:, : len(ids)] = logits[:, ids.start : ids.stop]
    sample_split(part, ids, rows, mix, split, group)
    sample(logits, rows, mix, whole)
    return split.tokens_S, whole.tokens_S
