"""The embedded model in transformers, in float32, with the very weights that Stretto loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stretto.models.gguf import GGUFFile, config_from_gguf
from stretto.models.resolve import ResolvedModel
from tests.helpers.gguf_weights import iter_weights


def as_resolved(path: Path) -> ResolvedModel:
    """What `resolve_model` says of a GGUF file or a model directory."""
    return ResolvedModel("directory" if path.is_dir() else "gguf", path, path.name)


def load_reference(path: Path) -> Any:
    """A transformers LlamaForCausalLM from a directory, or filled with a GGUF file's dequantised weights."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    gguf = GGUFFile(path)
    fields = config_from_gguf(gguf)
    config = LlamaConfig(**{name: fields[name] for name in fields if name not in ("architectures", "model_type")})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(iter_weights(gguf)), strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    # Computed, not stored, and so still without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
