"""A row's token depends on its own logits and parameters alone; failures stay alone; nothing is read on the host."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from stretto.engine.sampler import SampledOut, sample
from stretto.engine.sampling_rows import SamplingMix
from tests.helpers.no_sync import no_host_reads
from tests.helpers.sampling import (
    Row,
    everything_on,
    mix_of,
    sample_positions,
    sample_rows,
    tensors_of,
)

KINDS = [
    Row(temperature=0.0),
    Row(),
    Row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2),
    Row(temperature=0.7, top_k=40),
    Row(top_p=0.9),
    Row(min_p=0.05, temperature=1.5),
    Row(top_k=500, top_p=0.95),
    Row(top_k=20, top_p=0.8, min_p=0.02),
    Row(top_k=1),
    Row(top_k=2**30),
    Row(temperature=3.0, min_position=10**6, stop_ids=(0, 5, 61)),
    Row(temperature=0.0, min_position=10**6, stop_ids=(2,)),
]
VOCABULARIES = [61, 64, 1000, 4096 + 7]


def rows_of_all_kinds(count: int) -> list[Row]:
    return [replace(KINDS[i % len(KINDS)], seed=1000 + i, position=17 * i) for i in range(count)]


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


def assert_same(out: SampledOut, rows: slice | list[int], expected: SampledOut) -> None:
    assert out.tokens_S[rows].tolist() == expected.tokens_S.tolist()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_row_samples_the_same_token_alone_and_in_any_company(vocabulary: int) -> None:
    rows = rows_of_all_kinds(48)
    logits = random_logits(48, vocabulary)
    alone = torch.cat([sample_rows(logits[i : i + 1], rows[i : i + 1]).tokens_S for i in range(48)])
    assert torch.equal(sample_rows(logits, rows).tokens_S, alone)
    rng = np.random.default_rng(3)
    for _ in range(8):
        some = rng.permutation(48)[: rng.integers(2, 48)].tolist()
        company = [rows[i] for i in some]
        assert torch.equal(sample_rows(logits[some], company).tokens_S, alone[some])
        loose = everything_on(mix_of(company, vocabulary))
        assert torch.equal(sample_rows(logits[some], company, loose).tokens_S, alone[some])


@pytest.mark.parametrize("row", KINDS[3:10], ids=str)
def test_both_paths_draw_the_same_tokens_over_many_positions(row: Row) -> None:
    for vocabulary, logits in ((333, random_logits(1, 333)[0]), (90, torch.zeros(90))):
        expected = sample_positions(logits, row, 600)
        rows = [replace(row, position=position) for position in range(600)]
        out = sample_rows(logits.expand(600, -1), rows, everything_on(mix_of(rows, vocabulary)))
        assert out.tokens_S.tolist() == expected.tolist()


def test_chunks_of_a_large_batch_change_nothing() -> None:
    rows = rows_of_all_kinds(50)
    logits = random_logits(50, 49152)
    together = sample_rows(logits, rows)
    for start in range(0, 50, 7):
        assert_same(together, slice(start, start + 7), sample_rows(logits[start : start + 7], rows[start : start + 7]))


def test_buffers_used_before_change_nothing() -> None:
    rows = rows_of_all_kinds(12)
    logits = random_logits(12, 1000)
    out = SampledOut.allocate(40, 0, torch.device("cpu"))
    with torch.inference_mode():
        sample(random_logits(40, 4103), tensors_of([Row(top_p=0.5)] * 40), mix_of([Row(top_p=0.5)] * 40, 4103), out)
        before = out.tokens_S.clone()
        sample(logits, tensors_of(rows), mix_of(rows, 1000), out)
    assert torch.equal(out.tokens_S[:12], sample_rows(logits, rows).tokens_S)
    assert torch.equal(out.tokens_S[12:], before[12:])


def test_greedy_takes_the_first_of_the_best_whatever_the_neighbours_do() -> None:
    logits = torch.randint(0, 9, (36, 700), generator=torch.Generator().manual_seed(1)).float()
    logits[3, :650] = -torch.inf
    rows = rows_of_all_kinds(36)
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0 and not row.stop_ids]
    tokens = sample_rows(logits, rows).tokens_S.tolist()
    for i in greedy:
        assert tokens[i] == logits[i].tolist().index(logits[i].max())


def test_tiny_temperatures_are_greedy_and_top_k_1_is_too() -> None:
    logits = torch.randint(0, 5, (20, 99), generator=torch.Generator().manual_seed(2)).float()
    expected = sample_rows(logits, [Row(temperature=0.0)] * 20).tokens_S
    for row in (Row(temperature=1e-6), Row(top_k=1), Row(top_k=1, top_p=0.1, temperature=5.0), Row(top_p=1e-9)):
        assert torch.equal(sample_rows(logits, [replace(row, seed=i) for i in range(20)]).tokens_S, expected)


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = random_logits(1, 300)[0] / 4
    expected = sample_positions(logits, Row(), 200)
    for top_k in (-1, 0, 300, 301, 2**30, 2**62):
        assert sample_positions(logits, Row(top_k=top_k), 200).tolist() == expected.tolist()


def test_an_infinite_temperature_draws_evenly_from_what_is_possible() -> None:
    logits = random_logits(1, 40)[0]
    logits[::2] = -torch.inf
    counts = np.bincount(sample_positions(logits, Row(temperature=float("inf")), 4000), minlength=40)
    assert counts[::2].sum() == 0
    assert counts[1::2].min() > 130


def test_seeds_and_positions_give_different_samples() -> None:
    logits = torch.zeros(1, 10_000)
    by_seed = {sample_rows(logits, [Row(seed=seed)]).tokens_S.tolist()[0] for seed in range(100)}
    assert len(by_seed) > 95
    assert len(set(sample_positions(logits[0], Row(), 100))) > 95


@pytest.mark.parametrize("poison", ["nan", "inf", "all impossible", "nan and inf", "all nan", "all inf"])
@pytest.mark.parametrize("vocabulary", [61, 4103])
def test_an_unusable_row_fails_alone(poison: str, vocabulary: int) -> None:
    rows = [replace(row, num_logprobs=2) for row in rows_of_all_kinds(36)]
    logits = random_logits(36, vocabulary)
    expected = sample_rows(logits, rows)
    bad = logits.clone()
    victims = list(range(0, 36, 5))
    for i in victims:
        if poison.startswith("all"):
            bad[i] = {"all impossible": -torch.inf, "all nan": torch.nan, "all inf": torch.inf}[poison]
        if "nan" in poison:
            bad[i, (7 * i) % vocabulary] = torch.nan
        if poison in ("inf", "nan and inf"):
            bad[i, (11 * i + 3) % vocabulary] = torch.inf
    for mix in (None, everything_on(mix_of(rows, vocabulary))):
        out = sample_rows(bad, rows, mix)
        others = [i for i in range(36) if i not in victims]
        assert out.tokens_S[victims].tolist() == [-1] * len(victims)
        assert out.rank_S[victims].tolist() == [0] * len(victims)
        assert out.logprob_S[victims].isnan().all()
        assert (out.top_ids_SL[victims] == -1).all()
        assert out.tokens_S[others].tolist() == expected.tokens_S[others].tolist()
        assert torch.equal(out.logprob_S[others], expected.logprob_S[others])
        assert (out.tokens_S < vocabulary).all()


def test_a_stop_token_that_is_masked_does_not_hide_a_failure() -> None:
    logits = torch.zeros(3, 8)
    logits[0, 2], logits[1, 2] = torch.nan, torch.inf
    rows = [Row(min_position=9, stop_ids=(2,))] * 3
    assert [token >= 0 for token in sample_rows(logits, rows).tokens_S.tolist()] == [False, False, True]


def test_a_row_whose_every_token_is_masked_fails() -> None:
    rows = [Row(min_position=9, stop_ids=(0, 1, 2), temperature=t) for t in (0.0, 1.0)]
    assert sample_rows(torch.zeros(2, 3), rows).tokens_S.tolist() == [-1, -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_exactly_the_stop_ids_until_the_position(temperature: float) -> None:
    logits = torch.full((1, 70), -torch.inf)
    logits[0, [0, 5, 66, 69]] = torch.tensor([9.0, 8.0, 1.0, 0.0])
    row = Row(temperature=temperature, min_position=100, stop_ids=(5, 0, 66), seed=4)
    early = sample_rows(logits, [replace(row, position=99)])
    assert early.tokens_S.tolist() == [69]
    late = sample_rows(logits, [replace(row, position=100)], mix=everything_on(mix_of([row], 70)))
    assert (
        late.tokens_S.tolist()
        == sample_rows(logits, [Row(temperature=temperature, seed=4, position=100)]).tokens_S.tolist()
    )
    assert late.tokens_S.tolist() != [69]


def test_min_tokens_pads_and_ids_outside_the_vocabulary_mask_nothing() -> None:
    logits = torch.zeros(3, 4)
    logits[:, 0] = 5.0
    rows = [
        Row(temperature=0.0, min_position=9, stop_ids=(-1, -1, -1)),
        Row(temperature=0.0, min_position=9, stop_ids=(0, -1, 1)),
        Row(temperature=0.0, min_position=9, stop_ids=(4, 10**6)),
    ]
    assert sample_rows(logits, rows).tokens_S.tolist() == [0, 2, 0]


@pytest.mark.parametrize("vocabulary", [5, 64, 4103])
def test_logprobs_are_those_of_the_raw_logits(vocabulary: int) -> None:
    rows = [replace(row, num_logprobs=4) for row in rows_of_all_kinds(24)]
    logits = random_logits(24, vocabulary)
    logits[5] = logits[5].round()
    if vocabulary > 61:
        logits[7, 20:50] = -torch.inf
    untouched = logits.clone()
    out = sample_rows(logits, rows)
    assert torch.equal(logits, untouched)
    reference = logits.log_softmax(1)
    for i, token in enumerate(out.tokens_S.tolist()):
        order = sorted(range(vocabulary), key=lambda id, i=i: (-untouched[i, id].item(), id))
        assert out.logprob_S[i] == reference[i, token]
        assert out.rank_S[i] == order.index(token) + 1
        assert out.top_ids_SL[i].tolist() == order[:4]
        assert torch.equal(out.top_logprobs_SL[i], reference[i, order[:4]])


def test_logprobs_are_the_same_alone_and_in_a_batch() -> None:
    rows = [replace(row, num_logprobs=i % 4) for i, row in enumerate(rows_of_all_kinds(24))]
    logits = random_logits(24, 1000)
    together = sample_rows(logits, rows)
    for i, row in enumerate(rows):
        alone = sample_rows(logits[i : i + 1], [row])
        assert alone.logprob_S[0] == together.logprob_S[i]
        assert alone.rank_S[0] == together.rank_S[i]
        assert torch.equal(alone.top_ids_SL[0], together.top_ids_SL[i, : row.num_logprobs])
        assert torch.equal(alone.top_logprobs_SL[0], together.top_logprobs_SL[i, : row.num_logprobs])


def test_more_logprobs_than_tokens_are_filled_up() -> None:
    out = sample_rows(torch.zeros(1, 3), [Row(temperature=0.0, num_logprobs=5)])
    assert out.top_ids_SL.tolist() == [[0, 1, 2, -1, -1]]
    assert out.top_logprobs_SL[0, 3:].isnan().all()


def test_zero_logprobs_report_the_sampled_token_only_and_none_report_nothing() -> None:
    logits = random_logits(2, 50)
    out = sample_rows(logits, [Row(temperature=0.0, num_logprobs=0)] * 2)
    assert torch.equal(out.logprob_S, logits.log_softmax(1).amax(1))
    assert out.rank_S.tolist() == [1, 1]
    assert sample_rows(logits, [Row()] * 2).logprob_S.isnan().all()


def test_a_step_without_sampled_rows_does_nothing() -> None:
    for mix in (mix_of([], 50), replace(mix_of([Row(top_p=0.3)], 50), num_logprobs=2)):
        assert sample_rows(torch.zeros(0, 50), [], mix).tokens_S.tolist() == []


def test_buffers_that_are_too_small_are_refused() -> None:
    rows = [Row(num_logprobs=3)] * 2
    for out in (SampledOut.allocate(1, 3, torch.device("cpu")), SampledOut.allocate(2, 2, torch.device("cpu"))):
        with pytest.raises(ValueError, match="room for"):
            sample(torch.zeros(2, 9), tensors_of(rows), mix_of(rows, 9), out)


@pytest.mark.parametrize("vocabulary", [64, 4103])
def test_no_mix_reads_a_value_on_the_host(vocabulary: int) -> None:
    rows = rows_of_all_kinds(24)
    logits = random_logits(24, vocabulary)
    tensors = tensors_of(rows)
    flags = [False, True]
    with torch.inference_mode(), no_host_reads():
        for greedy, k, p, m, early, all_k in itertools.product(flags, repeat=6):
            for max_top_k, num_logprobs in itertools.product((1, 50, 1000), (-1, 0, 3)):
                mix = SamplingMix(greedy, k, min(max_top_k, vocabulary), p, m, early, num_logprobs, all_k)
                out = SampledOut.allocate(24, 3, logits.device)
                sample(logits, tensors, mix, out)


def test_the_mix_is_exact() -> None:
    def mix(*rows: Row) -> SamplingMix:
        return mix_of(rows, 100)

    none = SamplingMix(False, False, 0, False, False, False, -1, False)
    assert mix(Row()) == none
    assert mix(Row(top_k=100), Row(top_k=-1)) == none
    assert mix(Row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1)) == replace(none, all_greedy=True, all_top_k=True)
    assert mix(Row(top_k=3), Row(temperature=0.0)) == replace(none, any_top_k=True, max_top_k=3, all_top_k=True)
    assert mix(Row(top_k=3), Row(top_k=7), Row()) == replace(none, any_top_k=True, max_top_k=7)
    assert mix(Row(top_p=0.5), Row(min_p=0.5)) == replace(none, any_top_p=True, any_min_p=True)
    assert mix(Row(min_position=5, position=4)).any_min_tokens
    assert not mix(Row(min_position=5, position=5)).any_min_tokens
    assert mix(Row(num_logprobs=0), Row(num_logprobs=4), Row()).num_logprobs == 4
