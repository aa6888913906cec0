"""On a GPU logits are adjusted as on a CPU, and the host never waits."""

import pytest
import torch

from stretto.engine.adjustment import adjust
from stretto.request import SamplingParams
from tests.helpers.adjustment import AdjustedRows, Sequence, exact_mix, staged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

KINDS = [
    SamplingParams(),
    SamplingParams(presence_penalty=1.3, frequency_penalty=-0.7),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(logit_bias={i: i / 7 - 3 for i in range(40)}),
    SamplingParams(presence_penalty=-0.2, repetition_penalty=0.8, logit_bias={3: 5.0}),
]


@pytest.mark.parametrize("vocabulary", [61, 49152])
def test_logits_are_adjusted_as_on_a_cpu_and_nothing_waits(vocabulary: int) -> None:
    sequences = [Sequence([i % 9, 3, 3], [3, i % 7, 5, 5][: i % 5], KINDS[i % len(KINDS)]) for i in range(37)]
    logits = torch.randn(37, vocabulary, generator=torch.Generator().manual_seed(0)) * 5
    rows = AdjustedRows(sequences, device="cuda")
    words, layout = staged(sequences, rows.slots, cached=2)
    on_device, words, mix = logits.cuda(), words.cuda(), exact_mix(sequences)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            rows.tables.admit(words, layout.adjusted, rows.token_ids_RL)
            adjusted = adjust(
                on_device, rows.tables, rows.token_ids_RL, rows.slot_S, rows.position_S, mix, rows.scratch
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(adjusted.cpu(), rows.expected(logits), rtol=1e-6, atol=1e-6)
