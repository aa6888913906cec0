"""A GPU's memory is divided exactly, and what cannot fit is refused with the numbers."""

from __future__ import annotations

import pytest

from stretto.engine.memory import GIB, MemoryPlan, plan_memory
from stretto.errors import InvalidRequest
from stretto.models.registry import read_config

CONFIG = read_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
    }
)


def plan(total_gib: float = 80, free_gib: float = 78, graphs: bool = True, **options: int) -> MemoryPlan:
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 4096, **options}
    return plan_memory(
        CONFIG,
        total=int(total_gib * GIB),
        free=int(free_gib * GIB),
        utilization=0.9,
        page_size=16,
        element_bytes=2,
        graphs=graphs,
        **sizes,
    )


def test_the_parts_add_up_to_what_is_allowed() -> None:
    divided = plan()
    assert divided.allowed == divided.in_use + divided.workspace + divided.graphs + divided.cache
    assert divided.in_use == 2 * GIB


def test_less_for_the_rest_is_more_for_the_cache() -> None:
    assert plan(graphs=False).cache > plan().cache
    assert plan(max_num_seqs=32).cache > plan().cache
    assert plan(max_num_batched_tokens=1024).cache > plan().cache


def test_what_cannot_fit_is_refused_with_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"3\.60 of 4\.00 GiB allowed, 3\.00 in use .* workspace, .* graphs"):
        plan(total_gib=4, free_gib=1)


def test_graphs_of_steps_with_prompts_are_counted() -> None:
    """More of them, and more room for each, the more tokens a step may have, as far as such steps are captured."""
    few, some, most, none = (plan(max_num_batched_tokens=tokens).graphs for tokens in (16, 64, 8192, 16_384))
    assert few < some < none < most
