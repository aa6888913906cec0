"""The sampling kernels keep and choose what the plain-torch sampler does: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.kernels.sampling import mask_stop_ids
from tests.helpers import sampling as reference
from tests.helpers.sampling import Row
from tests.helpers.sampling_kernels import KernelRows, by_slot

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILTERS = [
    Row(temperature=0.0, top_k=3, top_p=0.5),
    Row(temperature=1.3),
    Row(top_k=5, temperature=0.1),
    Row(top_k=1, top_p=0.9, temperature=2.0),
    Row(top_p=0.8),
    Row(top_p=1e-6, temperature=3.0),
    Row(top_p=0.9995, temperature=1.7),
    Row(min_p=0.1),
    Row(top_k=9, top_p=0.7, min_p=0.01, temperature=1.2),
    Row(top_k=10**6, top_p=0.9),
]


def of(rows: list[Row]) -> list[Row]:
    """The rows with seeds and positions of their own."""
    return [
        replace(row, seed=(-1) ** i * (i * 0x3E3779B97F4A7C1 + 3), position=1 + 2 * i) for i, row in enumerate(rows)
    ]


def normal(rows: int, vocabulary: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    return torch.randn(rows, vocabulary, generator=generator).mul_(scale).to(DEVICE)


def ties(rows: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    return torch.randint(-2, 3, (rows, vocabulary), generator=generator).float().to(DEVICE)


@pytest.mark.parametrize(("vocabulary", "block"), [(150, 64), (5, 8)])
def test_mixed_rows_keep_and_choose_what_plain_torch_does(vocabulary: int, block: int) -> None:
    rows = of(FILTERS)
    logits = normal(len(rows), vocabulary)
    logits[9, 1::2] = -torch.inf
    kernels = KernelRows(rows, vocabulary, DEVICE, block=block, candidates=64, programs=20)
    tokens = kernels.sample(logits)
    assert torch.equal(kernels.kept(logits), kernels.kept_by_reference(logits))
    assert tokens.tolist() == reference.sample_rows(logits.cpu(), rows).tokens_S.tolist()
    assert kernels.token_ids_RL[kernels.slot_S, kernels.position_S].tolist() == tokens.tolist()
    assert kernels.length_R[1:].tolist() == kernels.position_S.tolist()


def test_of_ties_the_lowest_ids_are_kept_however_many_there_are() -> None:
    """With so few candidates that the whole row is bisected, and with enough."""
    rows = of(
        [
            Row(top_k=30),
            Row(top_p=0.6),
            Row(top_k=40, top_p=0.5, min_p=0.01),
            Row(top_p=0.25, temperature=0.7),
            Row(top_k=10, top_p=0.5),
        ]
    )
    logits = ties(5, 70)
    logits[3:] = 1.5
    for candidates in (4, 64):
        kernels = KernelRows(rows, 70, DEVICE, block=64, candidates=candidates, programs=8)
        tokens = kernels.sample(logits)
        kept = kernels.kept(logits)
        assert torch.equal(kept, kernels.kept_by_reference(logits))
        assert kept.sum(1)[0] == 30
        assert kept[3].nonzero()[:, 0].tolist() == list(range(18)), "0.25 of 70 equal tokens"
        assert kept[4].nonzero()[:, 0].tolist() == list(range(5)), "half of those that top-k leaves"
        assert kept[torch.arange(5), tokens].all()


def test_a_sample_that_misleads_changes_nothing() -> None:
    """Two pieces of five are looked at, and these are unlike the others; guesses hold too many tokens, or none."""
    rows = of([Row(top_p=0.7), Row(top_k=100), Row(top_p=0.999), Row(top_k=150, top_p=0.9), Row(top_p=0.3, min_p=0.2)])
    for shift in (-6.0, 3.0):
        logits = normal(5, 300, scale=0.5)
        logits[:, :64] += shift
        logits[:, 128:192] += shift
        kernels = KernelRows(rows, 300, DEVICE, block=128, candidates=64, programs=10, sampled=64)
        tokens = kernels.sample(logits)
        assert (kernels.filters.scratch.state_S[:, 2] > 64).any()
        kept = kernels.kept(logits)
        assert torch.equal(kept, kernels.kept_by_reference(logits))
        assert kept[torch.arange(5), tokens].all()


def test_a_top_k_beyond_what_min_p_leaves_keeps_what_min_p_leaves() -> None:
    """With candidates for all tokens, and with so few that their interval begins behind them."""
    rows = of([Row(temperature=0.3, top_k=48, min_p=0.05), Row(top_k=60, top_p=0.5, min_p=0.1)])
    logits = normal(2, 74)
    for candidates in (8, 128):
        kernels = KernelRows(rows, 74, DEVICE, block=32, candidates=candidates, programs=4)
        kernels.sample(logits)
        kept = kernels.kept(logits)
        assert torch.equal(kept, kernels.kept_by_reference(logits))
        assert 0 < kept.sum(1).max() < 48


def test_the_best_score_is_found_in_whichever_block_it_is() -> None:
    """Flat rows, and rows with a favourite that loses if its number is unlucky."""
    count = 60
    rows = [Row(temperature=0.5 + i % 3, seed=i * 7919, position=i % 50) for i in range(count)]
    logits = normal(count, 150, scale=1.0)
    logits[::2, 77] += 5
    tokens = KernelRows(rows, 150, DEVICE, block=32).sample(logits, filtered=False).tolist()
    assert tokens == reference.sample_rows(logits.cpu(), rows).tokens_S.tolist()
    assert len({token // 32 for token in tokens}) == 5
    assert len({token == 77 for token in tokens[::2]}) == 2


def test_weights_are_rounded_as_plain_torch_rounds_them() -> None:
    """The best token weighs 2**34, the others 10.6: in a sum of so many it shows whether they count as 10 or as 11."""
    logits = torch.full((1, 200), -math.log(2**34 / 10.6), device=DEVICE)
    logits[0, 77] = 0.0
    kernels = KernelRows([Row(top_p=1 - 2**-24)], 200, DEVICE, block=256, candidates=256)
    kernels.sample(logits)
    kept = kernels.kept(logits)
    assert torch.equal(kept, kernels.kept_by_reference(logits))
    assert kept.sum() == 200 - (2**34 + 199 * 11) // 2**24 // 11


def test_nothing_depends_on_neighbours_steps_before_or_the_number_of_programs() -> None:
    rows = of([Row(temperature=0.9), Row(top_p=0.7), Row(top_k=20, top_p=0.9)])
    logits = normal(3, 200)
    together = KernelRows(rows, 200, DEVICE, block=64, candidates=64, programs=12)
    together.sample(normal(3, 201)[:, :200])
    tokens = together.sample(logits).tolist()
    alone = KernelRows(rows, 200, DEVICE, block=64, candidates=16, programs=1)
    assert alone.sample(logits).tolist() == tokens
    assert torch.equal(alone.filters.scratch.limit_S, together.filters.scratch.limit_S)
    assert torch.equal(alone.filters.scratch.last_S, together.filters.scratch.last_S)
    plain = KernelRows(rows[:1], 200, DEVICE, block=64)
    assert plain.sample(logits[:1], filtered=False).tolist() == tokens[:1]


def test_rows_that_are_no_numbers_fail_alone() -> None:
    rows = of([Row(top_p=0.9), Row(top_k=2), Row(top_p=0.5, top_k=3), Row(top_p=0.5), Row(top_k=3, top_p=0.99)])
    logits = normal(5, 100)
    logits[0, 99], logits[1, 17], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 1:] = -torch.inf
    kernels = KernelRows(rows, 100, DEVICE, block=64, candidates=64, programs=5)
    tokens = kernels.sample(logits).tolist()
    assert tokens[:4] == [-1, -1, -1, 0]
    assert tokens == reference.sample_rows(logits.cpu(), rows).tokens_S.tolist()


@settings(max_examples=100 if DEVICE.type == "cuda" else 25, deadline=None, derandomize=True)
@given(
    vocabulary=st.integers(2, 90),
    seed=st.integers(0, 2**20),
    tied=st.booleans(),
    top_k=st.integers(0, 95),
    top_p=st.sampled_from([1.0, 0.999999, 0.9, 0.5, 1e-7]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 1.0]),
    temperature=st.sampled_from([1e-4, 0.3, 1.0, 5.0, 1e6]),
    candidates=st.sampled_from([8, 32]),
)
def test_any_row_keeps_what_plain_torch_keeps(
    vocabulary: int,
    seed: int,
    tied: bool,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
    candidates: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator) * 3
    logits = (logits.round() if tied else logits).to(DEVICE)
    row = Row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=3)
    kernels = KernelRows([row], vocabulary, DEVICE, block=32, candidates=candidates, programs=2)
    token = int(kernels.sample(logits))
    assert torch.equal(kernels.kept(logits), kernels.kept_by_reference(logits))
    assert kernels.kept(logits)[0, token]


def test_stop_tokens_are_masked_while_they_may_not_come() -> None:
    logits = normal(4, 50)
    logits[1, 3], logits[2, 7] = torch.nan, torch.inf
    expected = logits.clone()
    for row in (0, 1, 2):
        for stop in (3, 7):
            if expected[row, stop] < torch.inf:
                expected[row, stop] = -torch.inf
    stop_ids = torch.tensor([[3, 7, -1], [3, -1, 7], [7, 99, 3], [3, 7, -1]])
    slots = torch.arange(1, 5, device=DEVICE)
    positions = torch.tensor([4, 4, 4, 5], device=DEVICE)
    min_positions = by_slot(torch.tensor([5, 5, 9, 5]), DEVICE)
    mask_stop_ids(logits, slots, positions, min_positions, by_slot(stop_ids, DEVICE))
    assert torch.equal(logits.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def test_a_vocabulary_whose_sums_would_be_rounded_is_refused() -> None:
    kernels = KernelRows([Row(top_p=0.5)], 8, DEVICE)
    from stretto.kernels.sampling_filters import collect_candidates

    wide = torch.zeros(1, 2**18 + 1, device=DEVICE)
    with pytest.raises(ValueError, match="262145 tokens"):
        collect_candidates(wide, kernels.slot_S, kernels.temperature_R, kernels.filters, wide, 4096, wide, 64)
