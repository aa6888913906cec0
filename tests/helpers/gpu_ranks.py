"""What the ranks of a model split over GPUs do in tests, and what one GPU does alone to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.attention.base import AttentionShape
from stretto.attention.triton_paged import TritonPagedAttention
from stretto.config import SchedulerConfig
from stretto.device.cuda import CudaDevice
from stretto.distributed.group import TensorGroup
from stretto.engine.fused_runner import fused_runner
from stretto.kernels.elementwise import add_rms_norm_reference
from stretto.kernels.exchange import add_sum, add_sum_rms_norm, sum_ranks
from stretto.kernels.peer_buffers import PeerBuffers
from stretto.kernels.sampling import SampleScratch, sample_rows
from stretto.kernels.split_sampling import AgreedMaxima, sample_split_rows
from stretto.models.fused import FusedDecoder
from stretto.models.loader import load_model
from stretto.models.resolve import ResolvedModel
from stretto.request import SamplingParams
from stretto.runtime import Runtime


@dataclass(frozen=True)
class GpuCase:
    """A model in float32, and what to run on it."""

    path: Path
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    graphs: bool


def tokens_of(group: TensorGroup, case: GpuCase) -> list[list[int]]:
    """Output tokens of every prompt."""
    device = CudaDevice(group.rank)
    resolved = ResolvedModel("directory", case.path, case.path.name)
    model = device.call(
        lambda: load_model(resolved, dtype="float32", device=device.torch_device, max_model_len=128, group=group)
    )
    config = SchedulerConfig(
        max_num_seqs=len(case.prompts),
        max_num_batched_tokens=32,
        max_model_len=128,
        page_size=16,
        num_pages=128,
        # Every rank schedules for itself here, and deeper loops look at what is done already.
        overlap_depth=0,
        vocab_size=model.config.vocab_size,
    )
    shape = AttentionShape.of(
        model.config,
        page_size=config.page_size,
        num_pages=config.num_pages,
        dtype=model.kv_dtype,
        device=device.torch_device,
    )
    attention = device.call(lambda: TritonPagedAttention(shape, config.max_rows))
    make_runner = fused_runner(FusedDecoder(model), graphs=case.graphs)
    runtime = Runtime(config, device, model, attention, make_runner=make_runner)
    try:
        requests = [
            runtime.add(prompt, params, seed=7 + index)
            for index, (prompt, params) in enumerate(zip(case.prompts, case.params, strict=True))
        ]
        while runtime.has_work:
            runtime.step()
        return [runtime.output_ids(request).tolist() for request in requests]
    finally:
        runtime.close()


def sums(group: TensorGroup, dtype: torch.dtype) -> list[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """(rows, sum by the group, sum by the kernel, residual + sum, its norm) for several sizes, on the CPU."""
    found = []
    for rows in (1, 2, 7, 32, 100, 400, 9000):  # the last in pieces
        x_TD, residual_TD, weight_D = _numbers(group.rank, rows, dtype, group.size)
        peers = group.peers_for(x_TD)
        total_TD = group.all_reduce(x_TD.clone())
        if peers is None:
            found.append((rows, total_TD.cpu(), total_TD.cpu(), total_TD.cpu(), total_TD.cpu()))
            continue
        direct_TD = sum_ranks(x_TD.clone(), peers)
        added_TD, again_TD = residual_TD.clone(), residual_TD.clone()
        add_sum(added_TD, x_TD.clone(), peers)
        norm_TD = add_sum_rms_norm(again_TD, x_TD.clone(), weight_D, 1e-6, peers)
        assert torch.equal(added_TD, again_TD)
        found.append((rows, total_TD.cpu(), direct_TD.cpu(), added_TD.cpu(), norm_TD.cpu()))
    return found


def expected_sums(size: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `sums` has to find for a number of rows: the sum, residual + sum, its norm; on the CPU."""
    parts = [_numbers(rank, rows, dtype, size, "cpu") for rank in range(size)]
    total_TD = sum(part[0].float() for part in parts).to(dtype)  # type: ignore[union-attr]
    added_TD = parts[0][1] + total_TD
    return total_TD, added_TD, add_rms_norm_reference(added_TD.clone(), None, parts[0][2], 1e-6)


def _numbers(
    rank: int, rows: int, dtype: torch.dtype, size: int, device: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    parts = [torch.randn(rows, 1536, generator=generator) for _ in range(size)]
    residual_TD, weight_D = torch.randn(rows, 1536, generator=generator), torch.randn(1536, generator=generator)
    place = torch.device("cuda", rank) if device is None else torch.device(device)
    return (
        parts[rank].to(place, dtype),
        residual_TD.to(place, dtype),
        weight_D.to(place, dtype),
    )


def draws(group: TensorGroup, vocabulary: int) -> tuple[Tensor, Tensor] | None:
    """Tokens from this rank's part of the logits, and from all of them; None without peer memory."""
    device = torch.device("cuda", group.rank)
    rows = 200
    peers = group.peers_for(torch.empty(rows, 2, device=device))
    return None if peers is None else draw_both_ways(peers, vocabulary, rows, device)


def draw_both_ways(peers: PeerBuffers, vocabulary: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of rows of every kind from this rank's part of the logits, and from all of them; on the CPU."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits_SV = torch.randn(rows, vocabulary, generator=generator) * 3
    logits_SV[0] = -torch.inf
    logits_SV[1, vocabulary // 2] = torch.nan
    logits_SV[2] = 1.0
    logits_SV[3, vocabulary - 1] = torch.inf
    logits_SV[4:20, 1:] = -torch.inf  # impossible everywhere but on the first rank
    logits_SV = logits_SV.to(device, torch.bfloat16)
    slot_S = torch.arange(rows, device=device) + 1
    slot_S[-1] = 0
    position_S = torch.arange(rows, device=device) % 31 + 1
    temperature_R = torch.tensor([0.0, 0.7, 1.0, 3.0, 1e30], device=device).repeat(rows // 5 + 1)[: rows + 1]
    seed_R = torch.arange(rows + 1, device=device) * 7919 - 5
    width = -(-vocabulary // peers.size)
    ids = range(min(peers.rank * width, vocabulary), min((peers.rank + 1) * width, vocabulary))
    part_Sv = torch.full((rows, width), torch.nan, dtype=torch.bfloat16, device=device)  # nobody may look at padding
    part_Sv[:, : len(ids)] = logits_SV[:, ids.start : ids.stop]
    scratch = SampleScratch.allocate(rows, vocabulary, device)
    found = []
    for split in (True, False):
        tokens_S = torch.zeros(rows, dtype=torch.int64, device=device)
        token_ids_RL = torch.zeros(rows + 1, 64, dtype=torch.int64, device=device)
        length_R = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        given = (slot_S, position_S, temperature_R, seed_R, token_ids_RL, length_R, tokens_S, scratch)
        if split:
            sample_split_rows(part_Sv, ids, *given, AgreedMaxima.allocate(rows, device), peers)
        else:
            sample_rows(logits_SV, *given)
        found.append(torch.cat([tokens_S, length_R, token_ids_RL.flatten()]).cpu())
    return found[0], found[1]
