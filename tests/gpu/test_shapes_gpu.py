"""Models of real shapes, one layer deep, give the tokens of plain torch: blocks and launches follow from the widths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stretto import LLM, SamplingParams
from tests.helpers.compile_kernels import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in (4, 6, 12)]
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 60, 17)]
"""The last is alone for its last tokens."""


def write_config(name: str, directory: Path) -> None:
    shape = SHAPES[name]
    family = "qwen2" if name.startswith("Qwen2.5") else "qwen3" if name.startswith("Qwen3") else "llama"
    config = {
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}.get(family, "LlamaForCausalLM")],
        "model_type": family,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", [name for name in SHAPES if "ranks" not in name])
def test_tokens_of_real_shapes_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    answers = []
    for backend in ("triton", "torch"):
        llm = LLM(
            str(tmp_path),
            load_format="dummy",
            dtype="float32",
            device="cuda",
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=2**27,
            attention_backend=backend,
        )
        with llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert answers[0] == answers[1]
