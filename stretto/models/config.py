"""What a decoder-only model looks like: read from an HF config dict and checked, so that no later code need doubt it.

Owns the meaning of the config's fields. Which architectures there are, and how each differs, is registry.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from stretto.errors import ModelLoadError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What rotation frequencies are computed from (in rope.py). Fields that a kind does not use keep their defaults."""

    kind: str
    """One of ROPE_KINDS."""
    theta: float
    """Base of the wavelengths."""
    factor: float = 1.0
    """By how much the context is stretched."""
    original_context: int = 0
    """llama3, yarn: tokens of context before stretching."""
    low_freq_factor: float | None = None
    """llama3: wavelengths longer than original_context / this are stretched by the whole factor."""
    high_freq_factor: float | None = None
    """llama3: wavelengths shorter than original_context / this are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within original_context are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched by the whole factor."""
    truncate: bool = True
    """yarn: round the two bounds outwards to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: factor on cos and sin, given or derived from mscale."""


@dataclass(frozen=True, slots=True)
class Traits:
    """In what the decoder families differ; everything else about them is equal."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Each head of q and k goes through an RMS norm before the rotation."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMS norm, rotary positions, grouped-query attention, SiLU-gated MLP."""

    architecture: str
    """HF class name, e.g. "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    traits: Traits
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    """Empty if the config names none."""
    bos_token_id: int | None
    checkpoint_dtype: str | None
    """Element type that the config says its weights have, e.g. "bfloat16"; None if it does not say."""

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, a tied head counted once."""
        hidden, ffn, traits = self.hidden_size, self.intermediate_size, self.traits
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = (hidden + traits.qkv_bias) * (heads + 2 * kv_heads) + traits.qk_norm * 2 * self.head_dim
        attention = qkv + (heads + traits.o_bias) * hidden
        mlp = 3 * hidden * ffn + traits.mlp_bias * (2 * ffn + hidden)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * hidden) + hidden + embeddings

    @property
    def attention_scale(self) -> float:
        """Factor on q.k before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def context_length(self) -> int:
        """Tokens that the model can attend over, stretched by rope scaling."""
        match self.rope.kind:
            case "linear" | "dynamic":
                return int(self.max_position_embeddings * self.rope.factor)
            case "yarn":  # some configs give the stretched length, others the original one
                return max(self.max_position_embeddings, int(self.rope.original_context * self.rope.factor))
            case _:
                return self.max_position_embeddings


def parse_config(fields: Mapping[str, object], architecture: str, traits: Traits) -> ModelConfig:
    """Read a model's HF config dict (`config.json`, old or transformers-5 keys).

    Raises ModelLoadError naming the field: one that is missing or has an impossible value, or one that asks for
    something that is not supported (sliding windows, experts, quantised checkpoints, other activations).
    """
    _refuse_unsupported(fields, architecture)
    hidden_size = _positive_int(fields, "hidden_size")
    num_layers = _positive_int(fields, "num_hidden_layers")
    num_heads = _positive_int(fields, "num_attention_heads")
    num_kv_heads = _positive_int(fields, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        _fail(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        _fail(f"without head_dim, hidden_size {hidden_size} must be a multiple of num_attention_heads {num_heads}")
    head_dim = _positive_int(fields, "head_dim", default=max(1, hidden_size // num_heads))
    if head_dim % 2:
        _fail(f"head_dim {head_dim} is odd; rotary positions need pairs")
    max_position_embeddings = _positive_int(fields, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive_int(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=_number(fields, "rms_norm_eps", default=1e-6, above=0.0),
        tie_word_embeddings=flag(fields, "tie_word_embeddings"),
        traits=traits,
        rope=_rope_config(fields, max_position_embeddings),
        eos_token_ids=_token_ids(fields, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id")), None),
        checkpoint_dtype=_dtype_name(fields),
    )


def flag(fields: Mapping[str, object], name: str) -> bool:
    """A boolean field, False where it is absent or null."""
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        _fail(f"{name} is {value!r}; true or false is expected")
    return value


def _fail(problem: str) -> NoReturn:
    raise ModelLoadError(f"model config: {problem}")


def _refuse_unsupported(fields: Mapping[str, object], architecture: str) -> None:
    activation = fields.get("hidden_act") or "silu"
    if activation != "silu":
        _fail(f"hidden_act {activation!r} is not supported for {architecture}; supported: 'silu'")
    if (quantization := fields.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else quantization
        _fail(
            f"the checkpoint is quantised (quantization_config: {method!r}), which is not supported; use the "
            "unquantised checkpoint, or a GGUF file"
        )
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.get(name):
            _fail(f"mixture-of-experts layers ({name} = {fields[name]!r}) are not supported")
    num_layers = fields.get("num_hidden_layers")
    first_windowed = fields.get("max_window_layers")
    # Qwen configs carry a window that is switched off, or switched on for layers past the last one: neither is in use.
    if fields.get("use_sliding_window") and fields.get("sliding_window") is not None:
        none_left = isinstance(first_windowed, int) and isinstance(num_layers, int) and first_windowed >= num_layers
        if not none_left:
            _fail(f"sliding-window attention (sliding_window = {fields['sliding_window']!r}) is not supported")
    if other := set(_list(fields, "layer_types")) - {"full_attention"}:
        _fail(f"layer_types has {sorted(map(str, other))}; only 'full_attention' is supported")


def _rope_config(fields: Mapping[str, object], max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(name) or {}
    if not isinstance(rope, Mapping):
        _fail(f"{name} is {rope!r}; an object is expected")
    if any(isinstance(value, Mapping) for value in rope.values()):
        _fail(f"{name} differs between layers ({sorted(map(str, rope))}), which is not supported")
    for where in (rope, fields):
        if where.get("partial_rotary_factor") not in (None, 1, 1.0):
            _fail(f"partial_rotary_factor {where['partial_rotary_factor']!r} is not supported; supported: 1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        _fail(f"rope scaling kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    theta = _number(rope if rope.get("rope_theta") is not None else fields, "rope_theta", default=10_000.0, above=1.0)
    if kind == "default":
        return RopeConfig("default", theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, _number(rope, "factor", above=0.0))
    # A length beside the rope fields wins over one among them, as in transformers.
    where = fields if fields.get("original_max_position_embeddings") is not None else rope
    original_context = _positive_int(where, "original_max_position_embeddings", default=max_position_embeddings)
    if kind == "llama3":
        low = _number(rope, "low_freq_factor", above=0.0)
        high = _number(rope, "high_freq_factor", above=0.0)
        if high <= low:
            _fail(f"rope high_freq_factor {high} must be greater than low_freq_factor {low}")
        factor = _number(rope, "factor", above=0.0)
        return RopeConfig(kind, theta, factor, original_context, low, high)
    factor = _number(rope, "factor", default=max_position_embeddings / original_context, above=0.0)
    return RopeConfig(
        kind,
        theta,
        factor,
        original_context,
        beta_fast=_number(rope, "beta_fast", default=32.0, above=0.0),
        beta_slow=_number(rope, "beta_slow", default=1.0, above=0.0),
        truncate=flag(rope, "truncate") if rope.get("truncate") is not None else True,
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Mapping[str, object], factor: float) -> float:
    """YaRN (Peng et al. 2023, eq. 22), with the mscale pair that DeepSeek's configs brought."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor", above=0.0)

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(_number(rope, "mscale")) / temperature(_number(rope, "mscale_all_dim"))
    return temperature(1.0)


def _positive_int(fields: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        if default is None:
            _fail(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _fail(f"{name} is {value!r}; a positive integer is expected")
    return value


def _number(fields: Mapping[str, object], name: str, default: float | None = None, above: float | None = None) -> float:
    value = fields.get(name)
    if value is None:
        if default is None:
            _fail(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _fail(f"{name} is {value!r}; a finite number is expected")
    if above is not None and value <= above:
        _fail(f"{name} is {value!r}; it must be greater than {above:g}")
    return float(value)


def _list(fields: Mapping[str, object], name: str) -> list[object]:
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        _fail(f"{name} is {value!r}; a list is expected")
    return list(value)


def _token_ids(fields: Mapping[str, object], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    values = [value] if isinstance(value, int) else _list(fields, name)
    ids = []
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            _fail(f"{name} is {value!r}; a token id or a list of them is expected")
        ids.append(token)
    return tuple(ids)


def _dtype_name(fields: Mapping[str, object]) -> str | None:
    value = fields.get("dtype") or fields.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")
