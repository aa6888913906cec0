"""Tiny random models made with transformers, to compare Stretto's models with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stretto.models.resolve import ResolvedModel

FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.4,
        "mscale_all_dim": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn_given": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "truncate": False,
    },
}


def tiny_config(family: str, **changes: object) -> Any:
    """A transformers config of a few thousand weights; `changes` override its fields."""
    fields: dict[str, object] = {
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": dict(ROPES["default"]),
        "tie_word_embeddings": False,
        # Far larger than usual, so that attention and positions show in the logits.
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config_class, _ = FAMILIES[family]
    return config_class(**(fields | changes))


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A float32 transformers model with random weights, norms and biases included."""
    torch.manual_seed(seed)
    _, model_class = next(pair for pair in FAMILIES.values() if isinstance(config, pair[0]))
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def save(model: Any, directory: Path, **options: object) -> ResolvedModel:
    """Save a transformers model as safetensors; `options` go to save_pretrained (max_shard_size)."""
    model.save_pretrained(directory, **options)
    return ResolvedModel("directory", directory, directory.name)


def edit_config(directory: Path, **changes: object) -> None:
    """Change fields of a saved config; None removes one."""
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """transformers' logits [T, V]."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@torch.inference_mode()
def reference_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """transformers' greedy continuation, which no token ends."""
    ids = torch.tensor([prompt])
    settings = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)
    model.generation_config = settings
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation
