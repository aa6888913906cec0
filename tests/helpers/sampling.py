"""Sampled rows built from plain numbers, and a reference for the kept set that shares no code with the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from stretto.engine.sampler import SampledOut, sample
from stretto.engine.sampling_rows import SamplingMix, SamplingRows


@dataclass(frozen=True)
class Row:
    """How one row is to be sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    min_position: int = 0
    stop_ids: tuple[int, ...] = ()
    num_logprobs: int = -1


def tensors_of(rows: Sequence[Row]) -> SamplingRows:
    width = max((len(row.stop_ids) for row in rows), default=0)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return SamplingRows(
        temperature_S=floats([row.temperature for row in rows]),
        top_k_S=ints([row.top_k for row in rows]),
        top_p_S=floats([row.top_p for row in rows]),
        min_p_S=floats([row.min_p for row in rows]),
        seed_S=ints([row.seed for row in rows]),
        position_S=ints([row.position for row in rows]),
        min_position_S=ints([row.min_position for row in rows]),
        stop_ids_SE=torch.tensor(
            [row.stop_ids + (-1,) * (width - len(row.stop_ids)) for row in rows], dtype=torch.int64
        ).view(len(rows), width),
    )


def mix_of(rows: Sequence[Row], vocabulary: int) -> SamplingMix:
    """The exact mix of the rows."""
    tensors = tensors_of(rows)
    return SamplingMix.of(
        vocabulary=vocabulary,
        temperature=tensors.temperature_S.numpy(),
        top_k=tensors.top_k_S.numpy(),
        top_p=tensors.top_p_S.numpy(),
        min_p=tensors.min_p_S.numpy(),
        position=tensors.position_S.numpy(),
        min_position=tensors.min_position_S.numpy(),
        num_logprobs=np.array([row.num_logprobs for row in rows]),
    )


def sample_rows(logits_SV: torch.Tensor, rows: Sequence[Row], mix: SamplingMix | None = None) -> SampledOut:
    """Sample the rows together, with their exact mix unless another is given."""
    mix = mix or mix_of(rows, logits_SV.shape[1])
    out = SampledOut.allocate(len(rows), max(0, mix.num_logprobs), logits_SV.device)
    with torch.inference_mode():
        sample(logits_SV, tensors_of(rows), mix, out)
    return out


def sample_positions(logits_V: torch.Tensor, row: Row, count: int) -> npt.NDArray[np.int64]:
    """The tokens of `count` consecutive positions of one row whose logits stay the same."""
    rows = tensors_of([row])
    many = SamplingRows(
        temperature_S=rows.temperature_S.expand(count),
        top_k_S=rows.top_k_S.expand(count),
        top_p_S=rows.top_p_S.expand(count),
        min_p_S=rows.min_p_S.expand(count),
        seed_S=rows.seed_S.expand(count),
        position_S=rows.position_S + torch.arange(count),
        min_position_S=rows.min_position_S.expand(count),
        stop_ids_SE=rows.stop_ids_SE.expand(count, -1),
    )
    out = SampledOut.allocate(count, 0, logits_V.device)
    with torch.inference_mode():
        sample(logits_V.expand(count, -1).contiguous(), many, mix_of([row], len(logits_V)), out)
    return out.tokens_S.numpy()


def everything_on(mix: SamplingMix) -> SamplingMix:
    """The least exact mix that is still true: every path forced."""
    return replace(
        mix,
        all_greedy=False,
        all_top_k=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
        any_min_tokens=True,
        num_logprobs=max(3, mix.num_logprobs),
    )


def reference_probabilities(logits_V: torch.Tensor, row: Row) -> npt.NDArray[np.float64]:
    """The distribution that a row is to be sampled from, in float64, by sorting; 0 for what is not kept."""
    vocabulary = len(logits_V)
    logits = logits_V.numpy().astype(np.float64)
    if row.position < row.min_position:
        for stop in row.stop_ids:
            logits[stop] = -np.inf
    scaled = logits / np.float64(np.float32(row.temperature))
    probabilities = np.exp(scaled - scaled.max())
    order = sorted(range(vocabulary), key=lambda token: (-scaled[token], token))
    order = [token for token in order if probabilities[token] >= np.float32(row.min_p)]
    if 0 < row.top_k < vocabulary:
        order = order[: row.top_k]
    if row.top_p < 1.0:
        cumulative = np.cumsum(probabilities[order]) / probabilities[order].sum()
        order = order[: int(np.argmax(cumulative >= np.float32(row.top_p))) + 1]
    kept = np.zeros(vocabulary)
    kept[order] = probabilities[order]
    return kept / kept.sum()
