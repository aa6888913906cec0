"""Filters keep exactly the tokens that a float64 reference by sorting keeps, and draws follow its distribution."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from stretto.engine.filters import distances, drop_filtered, kept_candidates
from stretto.engine.ordering import BLOCK, best_candidates, block_maxima, descending_rank, first_argmax
from stretto.engine.scratch import Scratch
from tests.helpers.sampling import Row, reference_probabilities, sample_positions

FILTERS = {
    "none": Row(),
    "hot": Row(temperature=1.7),
    "cold": Row(temperature=0.5),
    "top_k": Row(top_k=5),
    "top_k 1": Row(top_k=1),
    "top_k above candidates": Row(top_k=300),
    "top_p": Row(top_p=0.7),
    "top_p tiny": Row(top_p=1e-6),
    "top_p large": Row(top_p=0.9995),
    "min_p": Row(min_p=0.1),
    "min_p 1": Row(min_p=1.0),
    "top_k, top_p": Row(top_k=8, top_p=0.8, temperature=1.3),
    "top_k above candidates, top_p": Row(top_k=290, top_p=0.9, temperature=2.0),
    "top_k, min_p": Row(top_k=9, min_p=0.2),
    "top_p, min_p": Row(top_p=0.6, min_p=0.05, temperature=0.8),
    "all": Row(top_k=20, top_p=0.85, min_p=0.02, temperature=1.2),
    "min_tokens, all": Row(top_k=20, top_p=0.85, min_p=0.02, min_position=10**9, stop_ids=(3, 7)),
}
VOCABULARIES = [5, 63, 64, 65, 777, 4096]


def logits_of(kind: str, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "spread":
        return torch.randn(vocabulary, generator=generator) * 4
    if kind == "ties":
        return torch.randint(-3, 4, (vocabulary,), generator=generator).float()
    if kind == "flat":
        return torch.zeros(vocabulary)
    impossible = torch.randn(vocabulary, generator=generator) * 3
    impossible[1::3] = -torch.inf
    return impossible


def kept_over_vocabulary(logits_V: torch.Tensor, row: Row) -> list[int]:
    """What the path over the whole vocabulary keeps."""
    vocabulary = len(logits_V)
    distance = distances(logits_V.max(), logits_V[None], torch.tensor(row.temperature))
    distance = F.pad(distance, (0, -vocabulary % BLOCK), value=torch.inf)
    probability = (-distance).exp()
    top_k = row.top_k if 0 < row.top_k < vocabulary else vocabulary
    drop_filtered(
        distance.view(torch.int32),
        probability,
        torch.tensor([top_k]),
        torch.tensor([row.top_p]),
        torch.tensor([row.min_p]),
        Scratch(),
    )
    return probability[0].nonzero()[:, 0].tolist()


def kept_among_candidates(logits_V: torch.Tensor, row: Row, count: int) -> list[int]:
    """What the path over the best candidates keeps."""

    def distance_of(x_SX: torch.Tensor) -> torch.Tensor:
        return distances(logits_V.max(), x_SX, torch.tensor(row.temperature))

    x_SV = logits_V[None]
    ids = best_candidates(x_SV, block_maxima(x_SV), count, lambda x: distance_of(x).view(torch.int32))
    distance = distance_of(x_SV.gather(1, ids))
    kept = kept_candidates(
        distance.view(torch.int32),
        (-distance).exp(),
        torch.tensor([row.top_k]),
        torch.tensor([row.top_p]),
        torch.tensor([row.min_p]),
    )
    return sorted(ids[kept & (distance < torch.inf)].tolist())


def cases() -> Iterator[tuple[str, int, int]]:
    for kind in ("spread", "ties", "flat", "impossible"):
        for vocabulary in VOCABULARIES:
            for seed in range(3):
                yield kind, vocabulary, seed


@pytest.mark.parametrize("name", [name for name in FILTERS if "min_tokens" not in name])
def test_both_paths_keep_exactly_what_the_reference_keeps(name: str) -> None:
    row = FILTERS[name]
    for kind, vocabulary, seed in cases():
        logits = logits_of(kind, vocabulary, seed)
        expected = np.flatnonzero(reference_probabilities(logits, row)).tolist()
        assert kept_over_vocabulary(logits, row) == expected, (kind, vocabulary, seed)
        if 0 < row.top_k < vocabulary:
            for count in {row.top_k, min(vocabulary, 2 * row.top_k)}:
                assert kept_among_candidates(logits, row, count) == expected, (kind, vocabulary, seed, count)


def test_random_parameters_keep_exactly_what_the_reference_keeps() -> None:
    rng = np.random.default_rng(0)
    for case in range(300):
        vocabulary = int(rng.integers(2, 500))
        row = Row(
            temperature=float(np.float32(rng.uniform(0.1, 3))),
            top_k=int(rng.integers(0, vocabulary)) if rng.random() < 0.6 else 0,
            top_p=float(np.float32(rng.uniform(0.01, 1))) if rng.random() < 0.6 else 1.0,
            min_p=float(np.float32(rng.uniform(0, 0.5))) if rng.random() < 0.4 else 0.0,
        )
        logits = logits_of(["spread", "ties", "impossible"][case % 3], vocabulary, case)
        expected = np.flatnonzero(reference_probabilities(logits, row)).tolist()
        assert kept_over_vocabulary(logits, row) == expected, (case, row)
        if 0 < row.top_k < vocabulary:
            assert kept_among_candidates(logits, row, row.top_k) == expected, (case, row)


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.0])
    assert kept_over_vocabulary(logits, Row(top_k=3)) == [0, 1, 3]
    assert kept_among_candidates(logits, Row(top_k=3), 4) == [0, 1, 3]
    assert kept_over_vocabulary(torch.tensor([0.0, -0.0, 0.0, -0.0]), Row(top_k=2)) == [0, 1]


def test_top_p_stops_as_soon_as_the_mass_is_reached() -> None:
    equal = torch.zeros(4)
    assert kept_over_vocabulary(equal, Row(top_p=0.25)) == [0]
    assert kept_over_vocabulary(equal, Row(top_p=0.5)) == [0, 1]
    assert kept_over_vocabulary(equal, Row(top_p=0.5000001)) == [0, 1, 2]
    assert kept_over_vocabulary(torch.zeros(1000), Row(top_p=0.75)) == list(range(750))


def test_top_p_counts_only_what_top_k_left_of_a_tie() -> None:
    assert kept_over_vocabulary(torch.zeros(100), Row(top_k=10, top_p=0.5)) == [0, 1, 2, 3, 4]
    assert kept_among_candidates(torch.zeros(100), Row(top_k=10, top_p=0.5), 16) == [0, 1, 2, 3, 4]


def test_filters_leave_a_row_alone_whose_neighbours_have_them() -> None:
    distance = torch.rand(2, 128)
    distance[:, 5] = 0
    probability = (-distance).exp()
    expected = probability[1].clone()
    drop_filtered(
        distance.view(torch.int32),
        probability,
        torch.tensor([3, 128]),
        torch.tensor([0.5, 1.0]),
        torch.tensor([0.3, 0.0]),
        Scratch(),
    )
    assert torch.equal(probability[1], expected)
    assert 1 <= (probability[0] > 0).sum() <= 3


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 1000, 4096])
def test_argmax_and_best_candidates_follow_the_one_order(vocabulary: int) -> None:
    for kind in ("spread", "ties", "flat"):
        x = torch.stack([logits_of(kind, vocabulary, seed) for seed in range(4)])
        order = [sorted(range(vocabulary), key=lambda i, row=row: (-row[i], i)) for row in x.tolist()]
        values, ids = first_argmax(x, block_maxima(x))
        assert ids.tolist() == [row[0] for row in order]
        assert torch.equal(values, x.amax(1))
        for count in {1, min(5, vocabulary), vocabulary // 2 or 1, vocabulary}:
            best = best_candidates(x, block_maxima(x), count, descending_rank)
            assert best.tolist() == [row[:count] for row in order]


def chi_square_excess(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Standard deviations of the chi-square statistic above its mean; rare cells are put together."""
    expected = probabilities * counts.sum()
    rare = expected < 6
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        counts = np.append(counts[~rare], counts[rare].sum())
    used = expected > 0
    degrees = max(1, int(used.sum()) - 1)
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("kind", "vocabulary"), [("spread", 24), ("ties", 30), ("impossible", 400), ("spread", 400)])
def test_draws_follow_the_reference_distribution(name: str, kind: str, vocabulary: int) -> None:
    row = FILTERS[name]
    logits = logits_of(kind, vocabulary, 11) / 2
    expected = reference_probabilities(logits, row)
    counts = np.bincount(sample_positions(logits, row, 20_000), minlength=vocabulary)
    assert counts[expected == 0].sum() == 0
    assert chi_square_excess(counts, expected) < 4.5
    if row.top_k and row.top_k < 30:
        assert set(np.flatnonzero(expected > 1e-3)) <= set(np.flatnonzero(counts))


def test_draws_follow_the_distribution_over_a_real_vocabulary() -> None:
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(5)) * 2.5
    expected = reference_probabilities(logits, Row())
    counts = np.bincount(sample_positions(logits, Row(seed=3), 3000), minlength=49152)
    # Cells of equal mass: tokens sorted by probability, cut into 40.
    order = np.argsort(-expected)
    cell = np.minimum((np.cumsum(expected[order]) * 40).astype(int), 39)
    cells, masses = np.bincount(cell, counts[order]), np.bincount(cell, expected[order])
    assert chi_square_excess(cells.astype(np.int64), masses) < 4


def test_a_hopeless_token_never_wins_by_a_lucky_number() -> None:
    logits = torch.full((50_000,), -40.0)
    logits[123] = 0.0
    assert set(sample_positions(logits, Row(), 2000)) == {123}
