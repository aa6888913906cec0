"""Rotary frequencies: equal to transformers' for every scaling kind, whichever way the config spells it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stretto.models.config import ModelConfig
from stretto.models.registry import read_config
from stretto.models.rope import halves_as_pairs, inverse_frequencies
from tests.helpers.tiny_models import ROPES, tiny_config

# As the published models have them.
PUBLISHED = {
    "llama-3.1": {
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen2.5-yarn": {
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32_768, "type": "yarn"},
    },
    "linear": {
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "no-scaling": {"rope_theta": 100_000.0, "max_position_embeddings": 8192, "rope_scaling": None},
}
SIZES = {"vocab_size": 8, "hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8}


def reference(config: LlamaConfig, **options: int) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, **options)


def read(config: LlamaConfig) -> ModelConfig:
    return read_config({"architectures": ["LlamaForCausalLM"]} | config.to_dict())


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [4, 16, 64, 96])
def test_frequencies_equal_transformers(rope: str, head_dim: int) -> None:
    hf_config = tiny_config("llama", rope_parameters=dict(ROPES[rope]), head_dim=head_dim)
    config = read(hf_config)
    expected, attention_factor = reference(hf_config)
    torch.testing.assert_close(inverse_frequencies(config, 128), expected, rtol=2e-7, atol=0)
    assert config.rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_in_the_old_spelling(name: str) -> None:
    fields = SIZES | PUBLISHED[name]
    hf_config = LlamaConfig(**{key: dict(value) if isinstance(value, dict) else value for key, value in fields.items()})
    config = read_config({"architectures": ["LlamaForCausalLM"]} | fields)
    expected, attention_factor = reference(hf_config)
    torch.testing.assert_close(inverse_frequencies(config, 4096), expected, rtol=2e-7, atol=0)
    assert config.rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize(("length", "stretched"), [(64, False), (128, False), (129, True), (300, True), (1000, True)])
def test_dynamic_scaling_is_that_of_the_longest_sequence_allowed(length: int, stretched: bool) -> None:
    hf_config = tiny_config("llama", rope_parameters=dict(ROPES["dynamic"]))
    expected, _ = reference(hf_config, seq_len=length)
    unscaled, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(hf_config)
    found = inverse_frequencies(read(hf_config), length)
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
    assert torch.allclose(found, unscaled, rtol=1e-6) is not stretched


def test_context_length_is_what_scaling_stretches_it_to() -> None:
    lengths = {
        name: read_config({"architectures": ["LlamaForCausalLM"]} | SIZES | fields).context_length
        for name, fields in PUBLISHED.items()
    }
    assert lengths == {"llama-3.1": 131_072, "qwen2.5-yarn": 131_072, "linear": 10_240, "no-scaling": 8192}


def test_pair_order_puts_both_coordinates_of_a_frequency_side_by_side() -> None:
    rows = torch.arange(2 * 6).unsqueeze(1).expand(-1, 3)  # two heads of six rows
    pairs = halves_as_pairs(rows, head_dim=6)
    assert pairs.shape == (2, 3, 2, 3)
    assert pairs[:, :, :, 0].flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
