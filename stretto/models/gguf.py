"""A GGUF file as a model: its configuration and tensors under the names that Hugging Face checkpoints use.

Owns the translation of keys and tensor names. The container is gguf_file.py, block formats gguf_quants.py, reading the
weights sources.py.
"""

import math
import re

import torch

from stretto.errors import ModelLoadError, NotSupported
from stretto.models.gguf_file import GGUFFile, GGUFTensor
from stretto.models.gguf_quants import dequantize

__all__ = ["GGUFFile", "GGUFTensor", "config_from_gguf", "dequantize", "hf_name"]

# general.architecture -> (HF architecture, HF model_type).
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Says how the rotary frequencies are scaled; it belongs to the configuration, not to the weights.
_ROPE_FREQUENCIES = "rope_freqs.weight"
# Constants that old converters wrote out and every program recomputes.
_IGNORED = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs)\b.*")


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor ("blk.0.attn_q.weight" -> "model.layers.0.self_attn.q_proj.weight").

    None for a tensor that is no weight (rotary frequency factors). Raises KeyError for an unknown name.
    """
    if name == _ROPE_FREQUENCIES or _IGNORED.fullmatch(name):
        return None
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _TOP_LEVEL:
            return f"{_TOP_LEVEL[stem]}.{kind}"
        if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and match[2] in _IN_LAYER:
            return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{kind}"
    raise KeyError(name)


def config_from_gguf(gguf: GGUFFile) -> dict[str, object]:
    """The model's configuration with the keys of a Hugging Face config.json (llama, qwen2 and qwen3 architectures).

    Raises ModelLoadError for a missing or ill-typed key, NotSupported for an architecture or variant that is not built.
    """
    architecture = _architecture(gguf)
    hf_architecture, model_type = _ARCHITECTURES[architecture]
    hidden_size, heads = _integer(gguf, "embedding_length"), _integer(gguf, "attention.head_count")
    head_dim = _integer(gguf, "attention.key_length", hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := _integer(gguf, key, head_dim)) != head_dim:
            raise NotSupported(f"{gguf.path}: {key} is {size}, but only the head size {head_dim} is supported")
    if _integer(gguf, "expert_count", 0):
        raise NotSupported(f"{gguf.path}: mixture-of-experts models are not supported")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelLoadError(f"{gguf.path}: tensor 'token_embd.weight' is missing")
    layers = _integer(gguf, "block_count")
    for index in range(layers):
        if f"blk.{index}.attn_q.weight" not in gguf.tensors:
            raise ModelLoadError(
                f"{gguf.path}: tensor 'blk.{index}.attn_q.weight' is missing (the file announces {layers} layers)"
            )
    theta = _number(gguf, "rope.freq_base", 10000.0)
    return {
        "architectures": [hf_architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(gguf),
        "head_dim": head_dim,
        "intermediate_size": _integer(gguf, "feed_forward_length"),
        "rms_norm_eps": _number(gguf, "attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(gguf, theta, head_dim),
        "max_position_embeddings": _integer(gguf, "context_length"),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _architecture(gguf: GGUFFile) -> str:
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelLoadError(f"{gguf.path}: metadata key 'general.architecture' is missing")
    if name not in _ARCHITECTURES:
        raise NotSupported(
            f"{gguf.path}: architecture {name!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    return name


def _kv_heads(gguf: GGUFFile) -> int:
    return _integer(gguf, "attention.head_count_kv", _integer(gguf, "attention.head_count"))


def _number(gguf: GGUFFile, key: str, default: float | None = None) -> float:
    full_key = f"{_architecture(gguf)}.{key}"
    value = gguf.metadata.get(full_key, default)
    if value is None:
        raise ModelLoadError(f"{gguf.path}: metadata key {full_key!r} is missing")
    if isinstance(value, list):
        raise NotSupported(f"{gguf.path}: {full_key!r} differs from layer to layer, which is not supported")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelLoadError(f"{gguf.path}: metadata key {full_key!r} is {value!r}, not a number")
    return value


def _integer(gguf: GGUFFile, key: str, default: int | None = None) -> int:
    value = _number(gguf, key, default)
    smallest = 1 if default is None else 0
    if not isinstance(value, int) or value < smallest:
        raise ModelLoadError(
            f"{gguf.path}: metadata key '{_architecture(gguf)}.{key}' is {value!r}, not a positive integer"
        )
    return value


def _rope_scaling(gguf: GGUFFile, theta: float, head_dim: int) -> dict[str, object] | None:
    factors = gguf.tensors.get(_ROPE_FREQUENCIES)
    if factors is not None:
        return _llama3_scaling(factors, theta, head_dim)
    # Files older than rope.scaling.* give a bare factor for linear scaling.
    old_factor = _number(gguf, "rope.scale_linear", 0.0)
    kind = gguf.metadata.get(f"{_architecture(gguf)}.rope.scaling.type", "linear" if old_factor else "none")
    factor = _number(gguf, "rope.scaling.factor", old_factor)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise NotSupported(
            f"{gguf.path}: rope scaling of type {kind!r} is not supported; supported are none, linear and yarn"
        )
    original = _integer(gguf, "rope.scaling.original_context_length", _integer(gguf, "context_length"))
    scaling: dict[str, object] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if (value := _number(gguf, f"rope.scaling.yarn_{key}", -1.0)) >= 0:
            scaling[key] = value
    # Multiplies the attention factor that follows from the scaling factor; the Hugging Face key replaces it.
    if (relative := _number(gguf, "rope.scaling.attn_factor", 1.0)) != 1.0:
        scaling["attention_factor"] = relative * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(tensor: GGUFTensor, theta: float, head_dim: int) -> dict[str, object] | None:
    """The llama3 parameters that give these divisors of the rotary frequencies.

    llama.cpp keeps only the result: a divisor of 1 for short wavelengths, `factor` for long ones, and between them
    1 / divisor = (1 - s) / factor + s with s = (original / wavelength - low) / (high - low). s is linear in 1 /
    wavelength, so a straight line through the values between gives original and high for low = 1, which only sets the
    scale.
    """
    divisors = dequantize(tensor).double()
    if divisors.shape != (head_dim // 2,) or not bool((divisors > 0.999).all()):
        raise ModelLoadError(
            f"{tensor.file}: tensor {tensor.name!r} does not hold {head_dim // 2} divisors of at least 1"
        )
    factor = float(divisors.max())
    if factor < 1.001:
        return None
    turns = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / (2 * math.pi)
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)  # the divisors are rounded to float32
    candidates = [(8192.0, 4.0)]  # what the published models of this kind have
    if int(between.sum()) >= 2:
        design = torch.stack((turns[between], torch.ones_like(turns[between])), dim=1)
        slope, offset = torch.linalg.lstsq(design, smooth[between].unsqueeze(1)).solution.flatten().tolist()
        if offset < 0:
            high = 1 - 1 / offset
            candidates.append((float(round(slope * (high - 1))), round(high, 4)))
    for original, high in candidates:
        s = ((original * turns - 1) / (high - 1)).clamp(0, 1)
        if torch.allclose(1 / ((1 - s) / factor + s), divisors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original),
            }
    raise NotSupported(f"{tensor.file}: tensor {tensor.name!r} follows no llama3 rope scaling")
