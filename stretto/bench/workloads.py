"""The seeded workloads W1, W2, W3: token ids in, token ids out, end-of-sequence ignored, the same for every engine.

W1 is the mix that nano-vllm and mini-sglang publish, W2 the latency of decoding a batch, W3 prompts only. The shapes
are those of Qwen3, with random weights. Owns requests and shapes; knows no engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VOCABULARY_CAP = 10_000
"""Token ids are drawn from 0 to this."""

SHAPES: dict[str, dict[str, int | bool]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float


def write_model(name: str, root: Path) -> Path:
    """Write the config of a shape into its own directory under `root`; no weights."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[name]}))
    return directory


def weight_bytes(name: str) -> int:
    """Bytes of 16-bit weights that a decode step must read: all matrices once, embedding rows excluded."""
    return 2 * (_layer_weights(name) + _head_weights(name))


def _layer_weights(name: str) -> int:
    """Elements of the matrices of all layers."""
    shape = SHAPES[name]
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    per_layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * shape["intermediate_size"]
    return per_layer * shape["num_hidden_layers"]


def _head_weights(name: str) -> int:
    return SHAPES[name]["hidden_size"] * 151_936


def kv_bytes_per_token(name: str) -> int:
    """Bytes of 16-bit keys and values of one token, all layers."""
    shape = SHAPES[name]
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def prompt_flops(name: str, lengths: Sequence[int]) -> int:
    """Of products and causal attention over whole prompts, the head of each prompt's last token included."""
    shape = SHAPES[name]
    attention = 2 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    return sum(2 * (_layer_weights(name) * n + _head_weights(name)) + attention * n * n for n in lengths)


def w1(count: int = 256, low: int = 100, high: int = 1024) -> list[BenchRequest]:
    """Offline mix: prompts and outputs of 100 to 1,024 tokens at temperature 0.6."""
    rng = random.Random(0)
    prompts = [_ids(rng, rng.randint(low, high)) for _ in range(count)]
    return [BenchRequest(prompt, rng.randint(low, high), 0.6) for prompt in prompts]


def w2(batch: int, output: int = 512, prompt: int = 128) -> list[BenchRequest]:
    """Decode latency: `batch` greedy requests of equal length."""
    rng = random.Random(1)
    return [BenchRequest(_ids(rng, prompt), output, 0.0) for _ in range(batch)]


def w3(count: int = 64, prompt: int = 2048) -> list[BenchRequest]:
    """Prompts only: one greedy output token each."""
    rng = random.Random(2)
    return [BenchRequest(_ids(rng, prompt), 1, 0.0) for _ in range(count)]


def warm_up(count: int = 16, prompt: int = 64, output: int = 32) -> list[BenchRequest]:
    """A short run before anything is measured."""
    rng = random.Random(3)
    return [BenchRequest(_ids(rng, prompt), output, 0.6) for _ in range(count)]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, VOCABULARY_CAP) for _ in range(count)]
