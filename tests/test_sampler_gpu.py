"""On a GPU the sampler draws from the same random numbers, and never makes the host wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from stretto.engine.random import hash_bits, row_keys, token_lanes
from stretto.engine.sampler import SampledOut, sample
from tests.helpers.sampling import Row, everything_on, mix_of, sample_rows, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

KINDS = [
    Row(temperature=0.0),
    Row(),
    Row(temperature=0.7, top_k=40),
    Row(top_p=0.9),
    Row(min_p=0.05, temperature=1.5),
    Row(top_k=500, top_p=0.95, min_p=0.001),
    Row(min_position=10**6, stop_ids=(0, 5)),
]


@contextmanager
def syncs_raise() -> Iterator[None]:
    """Every synchronising call of torch raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows_of_all_kinds(count: int) -> list[Row]:
    return [replace(KINDS[i % len(KINDS)], seed=i, position=3 * i, num_logprobs=3) for i in range(count)]


def test_random_bits_are_those_of_the_cpu() -> None:
    seeds, positions = torch.arange(-8, 8) * 2**59, torch.arange(16) * 977
    bits = []
    for device in ("cpu", "cuda"):
        spare = torch.empty((2, 16, 50_000), dtype=torch.int32, device=device)
        lanes = token_lanes(torch.arange(50_000, dtype=torch.int32, device=device))
        bits.append(hash_bits(row_keys(seeds.to(device), positions.to(device)), lanes, *spare).cpu())
    assert torch.equal(*bits)


@pytest.mark.parametrize("vocabulary", [4103, 49152])
@pytest.mark.parametrize("exact_mix", [True, False])
def test_tokens_are_those_of_the_cpu_and_nothing_waits(vocabulary: int, exact_mix: bool) -> None:
    rows = rows_of_all_kinds(210)
    logits = torch.randn(210, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    logits[20, 5], logits[30, 6] = torch.nan, torch.inf
    mix = mix_of(rows, vocabulary) if exact_mix else everything_on(mix_of(rows, vocabulary))
    expected = sample_rows(logits, rows, mix)
    device = torch.device("cuda")
    tensors, logits_on_device = tensors_of(rows).to(device), logits.to(device)
    out = SampledOut.allocate(210, 3, device)
    with torch.inference_mode(), syncs_raise():
        sample(logits_on_device, tensors, mix, out)
    # exp and log1p may differ in their last bit, which once in a million tokens decides.
    assert (out.tokens_S.cpu() != expected.tokens_S).sum() <= 1
    assert out.tokens_S[[20, 30]].tolist() == [-1, -1]
    assert torch.equal(out.top_ids_SL.cpu(), expected.top_ids_SL)
    torch.testing.assert_close(out.logprob_S.cpu(), expected.logprob_S, equal_nan=True, rtol=1e-5, atol=1e-5)
