"""Configs are read from either spelling, and what cannot run is refused by name before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from stretto.errors import ModelLoadError
from stretto.models.config import RopeConfig, Traits
from stretto.models.loader import load_config
from stretto.models.registry import ARCHITECTURES, read_config
from stretto.models.resolve import ResolvedModel
from tests.helpers.tiny_models import FAMILIES, tiny_config, tiny_model

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_a_llama_config_is_read() -> None:
    config = read_config(LLAMA | {"eos_token_id": [2, 7], "bos_token_id": 1, "torch_dtype": "bfloat16"})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (100, 48, 64, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 2, 12, 256)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, False)
    assert config.rope == RopeConfig("default", 10_000.0)
    assert (config.eos_token_ids, config.bos_token_id, config.checkpoint_dtype) == ((2, 7), 1, "bfloat16")
    assert config.attention_scale == pytest.approx(12**-0.5)


@pytest.mark.parametrize(
    ("fields", "traits"),
    [
        (LLAMA, Traits(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)),
        (LLAMA | {"attention_bias": True}, Traits(qkv_bias=True, o_bias=True, mlp_bias=False, qk_norm=False)),
        (LLAMA | {"mlp_bias": True}, Traits(qkv_bias=False, o_bias=False, mlp_bias=True, qk_norm=False)),
        (QWEN2, Traits(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False)),
        (
            LLAMA | {"architectures": ["Qwen3ForCausalLM"]},
            Traits(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=True),
        ),
    ],
)
def test_families_differ_in_their_traits(fields: dict[str, object], traits: Traits) -> None:
    assert read_config(fields).traits == traits


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_the_spelling_of_transformers_5_means_the_same_as_the_old_one(config_class: type) -> None:
    old = LLAMA | {"architectures": [config_class.__name__.replace("Config", "ForCausalLM")], "head_dim": 12}
    old |= {"rope_theta": 500_000.0, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}}
    new = config_class(**old).to_dict()
    assert "rope_scaling" not in new
    assert read_config(new).rope == read_config(old).rope == RopeConfig("llama3", 500_000.0, 8.0, 64, 1.0, 4.0)


def test_the_model_type_stands_in_for_a_missing_architecture() -> None:
    assert read_config(LLAMA | {"architectures": None, "model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("biases", [False, True])
def test_parameters_are_counted(family: str, biases: bool) -> None:
    changes: dict[str, object] = {"attention_bias": True} if biases and family != "qwen2" else {}
    hf_config = tiny_config(family, tie_word_embeddings=biases, **changes)
    model = tiny_model(hf_config)
    config = read_config({"architectures": [type(model).__name__]} | hf_config.to_dict())
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_window_that_is_not_in_use_does_not_matter() -> None:
    read_config(QWEN2 | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1})
    read_config(QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2})
    read_config(QWEN2 | {"sliding_window": None, "use_sliding_window": True, "layer_types": ["full_attention"] * 2})


REFUSED = {
    "MistralForCausalLM": {"architectures": ["MistralForCausalLM"]},
    "Qwen3MoeForCausalLM": {"architectures": ["Qwen3MoeForCausalLM"]},
    "model_type = 'gpt2'": {"architectures": None, "model_type": "gpt2"},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "'fp8'": {"quantization_config": {"quant_method": "fp8"}},
    "num_local_experts = 8": {"num_local_experts": 8},
    "sliding_window = 64": {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
    "'sliding_attention'": {"layer_types": ["full_attention", "sliding_attention"]},
    "rope scaling kind 'longrope'": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
    "differs between layers": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "partial_rotary_factor 0.5": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "num_hidden_layers is missing": {"num_hidden_layers": None},
    "vocab_size is 0": {"vocab_size": 0},
    "hidden_size is '48'": {"hidden_size": "48"},
    "intermediate_size is True": {"intermediate_size": True},
    "num_attention_heads 4 is not a multiple of num_key_value_heads 3": {"num_key_value_heads": 3},
    "hidden_size 50 must be a multiple": {"hidden_size": 50},
    "head_dim 9 is odd": {"head_dim": 9},
    "rms_norm_eps is 0": {"rms_norm_eps": 0},
    "rms_norm_eps is nan": {"rms_norm_eps": float("nan")},
    "rope_theta is -1.0": {"rope_theta": -1.0},
    "tie_word_embeddings is 'yes'": {"tie_word_embeddings": "yes"},
    "eos_token_id is -1": {"eos_token_id": -1},
    "factor is missing": {"rope_scaling": {"type": "linear"}},
    "factor is 0": {"rope_scaling": {"type": "dynamic", "factor": 0}},
    "high_freq_factor is missing": {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}},
    "high_freq_factor 1.0 must be greater": {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
    "original_max_position_embeddings is 0": {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
    "attention_factor is 'x'": {"rope_scaling": YARN | {"attention_factor": "x"}},
    "rope_scaling is 'yarn'": {"rope_scaling": "yarn"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_run_is_refused_by_name(words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | REFUSED[words]))
    with pytest.raises(ModelLoadError) as error:
        load_config(ResolvedModel("directory", tmp_path, "tiny"))
    assert words in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_an_unsupported_architecture_is_told_what_is_supported() -> None:
    with pytest.raises(ModelLoadError) as error:
        read_config(LLAMA | {"architectures": ["BloomForCausalLM"]})
    assert all(name in str(error.value) for name in ("BloomForCausalLM", *ARCHITECTURES))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(ResolvedModel("directory", tmp_path, "tiny"))
