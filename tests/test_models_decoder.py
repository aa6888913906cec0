"""Llama, Qwen2 and Qwen3 compute what transformers computes, in float32, from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.models.loader import load_model
from tests.helpers.dense import CPU, DenseAttention, greedy, logits_of
from tests.helpers.tiny_models import FAMILIES, ROPES, reference_greedy, reference_logits, save, tiny_config, tiny_model

PROMPT = [1, 5, 198, 7, 7, 42, 100, 3, 0, 77, 150, 11]

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no sharing of kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama narrow heads": ("llama", {"head_dim": 6}),
    "llama one layer": ("llama", {"num_hidden_layers": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_64_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    reference = tiny_model(tiny_config(family, **changes))
    model = load_model(save(reference, tmp_path), dtype="float32", device=CPU)
    torch.testing.assert_close(logits_of(model, PROMPT), reference_logits(reference, PROMPT), rtol=0, atol=1e-4)
    assert greedy(model, PROMPT, 64) == reference_greedy(reference, PROMPT, 64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_scaling_equals_transformers(family: str, rope: str, tmp_path: Path) -> None:
    reference = tiny_model(tiny_config(family, rope_parameters=dict(ROPES[rope])))
    resolved = save(reference, tmp_path)
    model = load_model(resolved, dtype="float32", device=CPU, max_model_len=128)
    torch.testing.assert_close(logits_of(model, PROMPT), reference_logits(reference, PROMPT), rtol=0, atol=1e-4)
    assert greedy(model, PROMPT, 64) == reference_greedy(reference, PROMPT, 64)
    # At the full length that was asked for, beyond the original context where there is one.
    long_prompt = (PROMPT * 25)[:300] if rope == "dynamic" else (PROMPT * 11)[:128]
    model = load_model(resolved, dtype="float32", device=CPU, max_model_len=len(long_prompt))
    expected = reference_logits(reference, long_prompt)
    torch.testing.assert_close(logits_of(model, long_prompt), expected, rtol=0, atol=1e-4)


def test_far_positions_equal_transformers(tmp_path: Path) -> None:
    reference = tiny_model(tiny_config("llama", max_position_embeddings=40_000, rope_parameters=dict(ROPES["default"])))
    model = load_model(save(reference, tmp_path), dtype="float32", device=CPU)
    positions = torch.arange(39_000, 39_000 + len(PROMPT))
    with torch.inference_mode():
        logits = model.logits(model.forward(torch.tensor(PROMPT), positions, DenseAttention(model)))
        expected = reference(torch.tensor([PROMPT]), position_ids=positions.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_chunks_of_a_prompt_and_tokens_of_several_requests_mix_freely(tmp_path: Path) -> None:
    model = load_model(save(tiny_model(tiny_config("qwen3")), tmp_path), dtype="float32", device=CPU)
    first, second = PROMPT, PROMPT[::-1][:7]
    expected = torch.cat((logits_of(model, first)[5:], logits_of(model, second)))
    attends = DenseAttention(model), DenseAttention(model)
    logits_of(model, first[:5], attends[0])

    def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        """Rows 0-6 are the rest of the first request, the others the second."""
        return torch.cat([one(layer, *(x[part] for x in qkv)) for one, part in zip(attends, parts, strict=True)])

    parts = slice(0, 7), slice(7, 14)
    ids = torch.tensor(first[5:] + second)
    positions = torch.cat((torch.arange(5, 12), torch.arange(7)))
    with torch.inference_mode():
        found = model.logits(model.forward(ids, positions, attend))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits_of(model, first), logits_of(model, first), rtol=0, atol=0)  # nothing was kept


def test_logits_are_computed_for_the_rows_asked_for(tmp_path: Path) -> None:
    model = load_model(save(tiny_model(tiny_config("llama")), tmp_path), dtype="float32", device=CPU)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), DenseAttention(model))
        some = model.logits(hidden[[3, 11]])
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, logits_of(model, PROMPT)[[3, 11]], rtol=0, atol=1e-5)
