"""The embedded model computes what transformers computes from the same dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.models.decoder import Decoder
from stretto.models.loader import load_model
from tests.helpers.dense import CPU, greedy, logits_of
from tests.helpers.real_model import as_resolved, load_reference
from tests.helpers.tiny_models import reference_greedy, reference_logits

# Token ids of the model's own tokenizer, so that this file needs none.
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 30, 2, 198]
CHAT = [*SYSTEM, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PROMPTS = {"one token": [504], "chat": CHAT, "text": list(range(300, 340)), "long": CHAT * 5}


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Any:
    return load_reference(smollm2_path)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Decoder:
    return load_model(as_resolved(smollm2_path), dtype="float32", device=CPU)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_equal_transformers(prompt: str, model: Decoder, reference: Any) -> None:
    expected = reference_logits(reference, PROMPTS[prompt])
    torch.testing.assert_close(logits_of(model, PROMPTS[prompt]), expected, rtol=0, atol=1e-3)


def test_greedy_tokens_equal_transformers(model: Decoder, reference: Any) -> None:
    assert greedy(model, CHAT, 16) == reference_greedy(reference, CHAT, 16)


def test_config_is_that_of_the_published_model(model: Decoder) -> None:
    config = model.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.tie_word_embeddings, config.num_parameters) == (49_152, True, 134_515_008)
    assert config.eos_token_ids == (2,)
    assert model.max_model_len == config.context_length == 8192
