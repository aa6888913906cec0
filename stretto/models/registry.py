"""Which HF architectures Stretto runs, and in what each differs from the plain decoder.

A new decoder family is one function here; a model of another build is a module of its own beside decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stretto.errors import ModelLoadError
from stretto.models.config import ModelConfig, Traits, flag, parse_config


def _llama(fields: Mapping[str, object]) -> Traits:
    bias = flag(fields, "attention_bias")
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=flag(fields, "mlp_bias"), qk_norm=False)


def _qwen2(fields: Mapping[str, object]) -> Traits:
    return Traits(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False)


def _qwen3(fields: Mapping[str, object]) -> Traits:
    bias = flag(fields, "attention_bias")
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True)


ARCHITECTURES: Mapping[str, Callable[[Mapping[str, object]], Traits]] = MappingProxyType(
    {"LlamaForCausalLM": _llama, "Qwen2ForCausalLM": _qwen2, "Qwen3ForCausalLM": _qwen3}
)
_ARCHITECTURE_OF_MODEL_TYPE = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)


def read_config(fields: Mapping[str, object]) -> ModelConfig:
    """Read an HF config dict of any supported architecture.

    Raises ModelLoadError naming the architecture and the supported ones, or the field that is missing, impossible or
    not supported.
    """
    architecture = architecture_name(fields)
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return parse_config(fields, architecture, ARCHITECTURES[architecture](fields))


def architecture_name(fields: Mapping[str, object]) -> str:
    """The HF class that a config is for: from `architectures`, else from `model_type`. Raises ModelLoadError."""
    named = fields.get("architectures")
    if isinstance(named, list | tuple) and named and isinstance(named[0], str):
        return named[0]
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in _ARCHITECTURE_OF_MODEL_TYPE:
        return _ARCHITECTURE_OF_MODEL_TYPE[model_type]
    raise ModelLoadError(
        f"the config names no known architecture (architectures = {named!r}, model_type = {model_type!r}); "
        f"supported: {', '.join(ARCHITECTURES)}"
    )
