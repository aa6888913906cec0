"""On a GPU a model computes what it computes on the CPU, and shares and places its weights there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stretto.models.loader import load_model
from stretto.models.resolve import ResolvedModel
from tests.helpers.dense import CPU, logits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PROMPT = [1, 5, 198, 7, 42, 3, 3, 150]
FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
# A Qwen3-0.6B but for the number of layers: large enough that its memory shows.
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}


def bare_config(directory: Path, **fields: object) -> ResolvedModel:
    (directory / "config.json").write_text(json.dumps(FIELDS | fields))
    return ResolvedModel("directory", directory, "bare config")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 0.02), ("bfloat16", 0.15)])
def test_logits_equal_the_cpu_float32_ones(
    architecture: str, tied: bool, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    resolved = bare_config(tmp_path, architectures=[architecture], tie_word_embeddings=tied)
    cuda = torch.device("cuda")
    expected = logits_of(load_model(resolved, dtype="float32", device=CPU, load_format="dummy"), PROMPT)
    model = load_model(resolved, dtype=dtype, device=cuda, load_format="dummy")
    found = logits_of(model, PROMPT, device=cuda)
    assert found.is_cuda
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=tolerance * float(expected.std()))


def test_a_tied_embedding_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    resolved = bare_config(tmp_path, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True, **LARGE)
    before = torch.cuda.memory_allocated()
    model = load_model(resolved, dtype="bfloat16", device=torch.device("cuda"), load_format="dummy")
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(2 * model.config.num_parameters, rel=0.02)


def test_peak_memory_is_the_model_and_one_parameter(tmp_path: Path) -> None:
    resolved = bare_config(tmp_path, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False, **LARGE)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(resolved, dtype="bfloat16", device=torch.device("cuda"), load_format="dummy")
    peak = torch.cuda.max_memory_allocated() - before
    largest = 4 * LARGE["vocab_size"] * LARGE["hidden_size"]  # made up in float32
    assert peak <= 2 * model.config.num_parameters + largest + (64 << 20)
