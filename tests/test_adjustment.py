"""logit_bias and penalties on the device are those of a host that recounts every sequence, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine import adjustment
from stretto.engine.adjustment import AdjustmentTables, adjust, penalty_bytes
from stretto.engine.sampler import SampledOut, sample
from stretto.engine.scratch import Scratch
from stretto.request import SamplingParams
from tests.helpers.adjustment import WIDTH, AdjustedRows, Sequence, exact_mix, staged
from tests.helpers.memory import peak_bytes
from tests.helpers.no_sync import no_host_reads
from tests.helpers.sampling import Row, mix_of, tensors_of

PLAIN = SamplingParams()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 5


VOCABULARY = 23
tokens = st.integers(0, VOCABULARY - 1)
params = st.builds(
    SamplingParams,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 20),
    logit_bias=st.one_of(st.none(), st.dictionaries(tokens, st.floats(-100, 100), max_size=12)),
)
sequences_of_all_kinds = st.lists(
    st.builds(
        Sequence,
        st.lists(tokens, min_size=1, max_size=18),
        st.lists(tokens, max_size=20),
        st.one_of(st.just(PLAIN), params),
    ),
    min_size=1,
    max_size=9,
)


@given(sequences=sequences_of_all_kinds, seed=st.integers(0, 2**16))
@settings(max_examples=300, deadline=None)
def test_any_rows_are_adjusted_as_the_host_would(sequences: list[Sequence], seed: int) -> None:
    device = AdjustedRows(sequences)
    logits = logits_of(len(sequences), VOCABULARY, seed)
    untouched = logits.clone()
    expected = device.expected(logits)
    assert torch.equal(device.adjust(logits), expected)
    exact = exact_mix(sequences)
    loose = replace(exact, num_penalised=len(sequences), penalised_length=WIDTH, max_biases=exact.max_biases * 3 + 1)
    assert torch.equal(device.adjust(logits, loose), expected)
    assert same_bits(logits, untouched)


SPECIAL = {
    "presence": SamplingParams(presence_penalty=0.5),
    "frequency": SamplingParams(frequency_penalty=0.25),
    "repetition": SamplingParams(repetition_penalty=2),
    "bias": SamplingParams(logit_bias={3: 10, "4": -1.5}),
    "all": SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2, logit_bias={0: 6, 3: -8.0}
    ),
}
WORKED = {
    # logits [4, -4, 4, 4, 4]; prompt [0, 0], output [1, 3, 3]
    "presence": [4, -4.5, 4, 3.5, 4],
    "frequency": [4, -4.25, 4, 3.5, 4],
    "repetition": [2, -8, 4, 2, 4],
    "bias": [4, -4, 4, 14, 2.5],
    "all": [5, -8.75, 4, -9, 4],
}


@pytest.mark.parametrize("name", SPECIAL)
def test_examples_worked_by_hand(name: str) -> None:
    device = AdjustedRows([Sequence([0, 0], [1, 3, 3], SPECIAL[name])])
    logits = torch.tensor([[4.0, -4, 4, 4, 4]])
    assert device.adjust(logits).tolist() == [WORKED[name]]
    assert device.expected(logits).tolist() == [WORKED[name]]


def test_the_prompt_counts_for_repetition_only() -> None:
    one = SamplingParams(presence_penalty=1, frequency_penalty=1)
    prompt_only = AdjustedRows([Sequence([2, 2, 3], [], one)])
    logits = logits_of(1, 9)
    assert same_bits(prompt_only.adjust(logits), logits)


def test_rows_without_adjustments_keep_every_bit() -> None:
    """Whatever their neighbours ask for, and whatever lies in their part of the token table."""
    logits = logits_of(6, VOCABULARY)
    logits[0, :4] = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf])
    sequences = [Sequence([1, 2], [3])] * 4 + [Sequence([5], [6, 6], params) for params in (SPECIAL["all"],) * 2]
    device = AdjustedRows(sequences)
    loose = replace(exact_mix(sequences), num_penalised=6, penalised_length=WIDTH, max_biases=200)
    for mix in (None, loose):
        assert same_bits(device.adjust(logits, mix)[:4], logits[:4])
        assert not torch.equal(device.adjust(logits, mix)[4:], logits[4:])


def test_a_row_is_adjusted_alike_alone_and_in_any_company() -> None:
    sequences = [Sequence([i, 1], [2, i, 2], params) for i, params in enumerate([*SPECIAL.values(), PLAIN] * 2)]
    logits = logits_of(len(sequences), 4103)
    together = AdjustedRows(sequences).adjust(logits)
    for i, sequence in enumerate(sequences):
        assert same_bits(AdjustedRows([sequence]).adjust(logits[i : i + 1])[0], together[i])


def test_memory_used_before_changes_nothing() -> None:
    device = AdjustedRows([Sequence([1], [2, 2, 5], SPECIAL["all"])] * 3)
    device.adjust(logits_of(3, VOCABULARY, seed=1))
    again = logits_of(3, VOCABULARY, seed=2)
    assert torch.equal(device.adjust(again), device.expected(again))


@pytest.mark.parametrize("repetition", [1e-300, 1e-45, 1e-38, 1e38, 1e300])
def test_no_penalty_makes_a_finite_logit_infinite(repetition: float) -> None:
    logits = torch.tensor([[0.0, -0.0, 50.0, -50.0, 1.0, 1e-30]])
    adjusted = AdjustedRows([Sequence([0, 1, 2], [3, 5], SamplingParams(repetition_penalty=repetition))]).adjust(logits)
    assert adjusted.isfinite().all()
    assert adjusted[0, 4] == 1.0


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_adjustment_does_not_hide_a_failure(poison: float) -> None:
    sequences = [Sequence([2], [2, 3], SPECIAL["all"]), Sequence([2], [], SamplingParams(repetition_penalty=1e300))]
    logits = torch.zeros(3, 8)
    logits[:2, 2] = poison
    sequences.append(sequences[0])
    adjusted = AdjustedRows(sequences).adjust(logits)
    out = SampledOut.allocate(3, 0, torch.device("cpu"))
    rows = [Row(temperature=0.0)] * 3
    with torch.inference_mode():
        sample(logits, tensors_of(rows), mix_of(rows, 8), out, adjusted)
    assert [token >= 0 for token in out.tokens_S.tolist()] == [False, False, True]


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 4] = -3.0
    wanted = SamplingParams(presence_penalty=-2, repetition_penalty=0.1, logit_bias={1: 100, 2: -100})
    adjusted = AdjustedRows([Sequence([1, 2], [1, 4], wanted)]).adjust(logits)
    assert adjusted.isneginf().tolist() == [[True, True, True, True, False, True]]


def test_the_choice_is_made_from_the_adjusted_logits_and_log_probabilities_are_of_the_raw_ones() -> None:
    logits = logits_of(12, 700)
    sequences = [Sequence([1, 2], [3], SamplingParams(logit_bias={i: 90}, presence_penalty=1)) for i in range(12)]
    adjusted = AdjustedRows(sequences).adjust(logits)
    rows = [Row(temperature=0.5 * (i % 3), top_k=i % 4, num_logprobs=2, seed=i) for i in range(12)]
    out = SampledOut.allocate(12, 2, torch.device("cpu"))
    with torch.inference_mode():
        sample(logits, tensors_of(rows), mix_of(rows, 700), out, adjusted)
    assert out.tokens_S.tolist() == list(range(12))
    raw = logits.log_softmax(1)
    assert torch.equal(out.logprob_S, raw.diagonal())
    assert torch.equal(out.top_logprobs_SL, raw.topk(2).values)


def test_a_slot_forgets_its_last_holder() -> None:
    device = AdjustedRows([Sequence([1, 2], [2, 2], SPECIAL["all"]), Sequence([1], [3, 3], SPECIAL["all"])])
    follower = Sequence([2, 2], [2, 2])
    words, layout = staged([follower], device.slots[:1], cached=0)
    device.tables.admit(words, layout.adjusted, device.token_ids_RL)
    device.sequences[0], device.position_S[0] = follower, follower.length
    logits = logits_of(2, VOCABULARY)
    assert torch.equal(device.adjust(logits), device.expected(logits))


def test_nothing_is_read_on_the_host() -> None:
    sequences = [Sequence([1, 2], [2, 3], params) for params in (*SPECIAL.values(), PLAIN)]
    device = AdjustedRows(sequences)
    logits = logits_of(len(sequences), VOCABULARY)
    exact = exact_mix(sequences)
    words, layout = staged(sequences, device.slots, cached=2)
    with torch.inference_mode(), no_host_reads():
        device.tables.admit(words, layout.adjusted, device.token_ids_RL)
        for penalised in (0, exact.num_penalised, len(sequences)):
            for biases in (0, 1, 2, 300):
                mix = replace(exact, num_penalised=penalised, max_biases=biases)
                adjust(
                    logits, device.tables, device.token_ids_RL, device.slot_S, device.position_S, mix, device.scratch
                )


@pytest.mark.parametrize("at_once", [1, 3 * WIDTH, 4 * WIDTH - 1])
def test_rows_that_take_turns_are_adjusted_alike(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    sequences = [Sequence([i, 1], [2, i, 2], params) for i, params in enumerate([*SPECIAL.values(), PLAIN] * 2)]
    logits = logits_of(len(sequences), 211)
    loose = replace(exact_mix(sequences), num_penalised=len(sequences), penalised_length=WIDTH)
    for mix in (None, loose):
        together = AdjustedRows(sequences).adjust(logits, mix)
        with monkeypatch.context() as patch:
            patch.setattr(adjustment, "_TOKENS_AT_ONCE", at_once)
            assert same_bits(AdjustedRows(sequences).adjust(logits, mix), together)


@pytest.mark.parametrize(
    ("rows", "length", "at_once"),
    [(64, 5000, 2**20), (64, 5000, 2**16), (1, 200_000, 2**16), (3, 70_000, 2**17), (300, 40, 2**20)],
)
def test_penalties_take_no_more_memory_than_is_told(
    monkeypatch: pytest.MonkeyPatch, rows: int, length: int, at_once: int
) -> None:
    """However many tokens rows have: beside the adjusted logits and as many counts."""
    monkeypatch.setattr(adjustment, "_TOKENS_AT_ONCE", at_once)
    vocabulary = 100
    tables = AdjustmentTables(rows + 1, torch.device("cpu"))
    token_ids = torch.randint(0, vocabulary, (rows + 1, length + 1))
    slots, positions = torch.arange(1, rows + 1), torch.full((rows,), length)
    mix = replace(mix_of([Row(temperature=0.0)] * rows, 99), num_penalised=rows, penalised_length=length)
    logits, scratch = logits_of(rows, vocabulary), Scratch()

    def work() -> None:
        with torch.inference_mode():
            adjust(logits, tables, token_ids, slots, positions, mix, scratch)

    work()  # adjusted logits and counts stay in the scratch
    told, taken = penalty_bytes(rows, length), peak_bytes(work)
    assert taken <= told
    assert taken >= 0.5 * told
