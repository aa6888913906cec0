"""A model split over real processes computes what it computes alone: logits, and every sampled token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from stretto.distributed.group import SOLO, connect_group
from stretto.errors import EngineBroken
from stretto.request import SamplingParams
from tests.helpers.rank_pool import RankPool
from tests.helpers.tensor_parallel import Case, compute, error_of_rank_0, sample_both_ways, sum_and_gather
from tests.helpers.tiny_models import edit_config, save, tiny_config, tiny_model

PROMPTS = [[5, 17, 99, 3], [1], list(range(20, 57)), [7] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MIX = [
    GREEDY,
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True),
    SamplingParams(top_k=5, top_p=0.8, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias={7: 2}, max_tokens=8, ignore_eos=True),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()


def assert_equal_to_one_rank(pool: RankPool, size: int, case: Case, atol: float = 1e-4, limit_s: float = 60.0) -> None:
    alone = compute(SOLO, case)
    ranks = pool.run(size, compute, case, limit_s=limit_s)
    for found in ranks:
        torch.testing.assert_close(found.logits, alone.logits, rtol=0, atol=atol)
        assert torch.equal(found.logits, ranks[0].logits)  # not close: the very same
        assert found.tokens == (alone if case.dtype == "float32" else ranks[0]).tokens
        heads, kv_heads = alone.shape
        assert found.shape == (heads // size, max(1, kv_heads // size))


CASES = [
    ("llama", 2, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("llama", 4, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen2", 2, {"num_key_value_heads": 2}),
    ("qwen2", 4, {"num_key_value_heads": 1, "vocab_size": 200, "tie_word_embeddings": True}),
    ("qwen3", 2, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen3", 4, {"num_key_value_heads": 4}),
]


@pytest.mark.parametrize(
    ("family", "size", "changes"), CASES, ids=[f"{f}-{s}-{i}" for i, (f, s, _) in enumerate(CASES)]
)
def test_logits_and_tokens_are_those_of_one_rank(
    family: str, size: int, changes: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    save(tiny_model(tiny_config(family, **changes)), tmp_path)
    assert_equal_to_one_rank(pool, size, Case(tmp_path, PROMPTS, MIX))


def test_a_vocabulary_smaller_than_its_padding_is_never_left(pool: RankPool, tmp_path: Path) -> None:
    save(tiny_model(tiny_config("llama", vocab_size=5)), tmp_path)  # parts of 2, 2, 1 and no tokens
    hot = SamplingParams(temperature=50.0, max_tokens=30, ignore_eos=True)
    assert_equal_to_one_rank(pool, 4, Case(tmp_path, [[1, 4, 0], [2]], [hot]))


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 2e-3), ("int4", 0.3)])
def test_packed_formats_are_split_too(dtype: str, atol: float, pool: RankPool, tmp_path: Path) -> None:
    config = tiny_config("qwen3", hidden_size=64, intermediate_size=128, head_dim=32)
    save(tiny_model(config), tmp_path)
    assert_equal_to_one_rank(pool, 2, Case(tmp_path, PROMPTS, MIX, dtype=dtype), atol=atol)


def test_random_weights_are_the_same_model(pool: RankPool, tmp_path: Path) -> None:
    save(tiny_model(tiny_config("llama")), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, hidden_size=96)
    assert_equal_to_one_rank(pool, 4, Case(tmp_path, PROMPTS, MIX, load_format="dummy"))


def test_smollm2_is_the_same_on_three_ranks(pool: RankPool, smollm2_path: Path) -> None:
    chat = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    seeded = SamplingParams(temperature=0.9, max_tokens=4, ignore_eos=True)
    assert_equal_to_one_rank(pool, 3, Case(smollm2_path, [chat, [504]], [greedy, seeded]), limit_s=120)


def test_fused_kernels_take_part(pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    save(tiny_model(tiny_config("qwen3", num_hidden_layers=1, num_key_value_heads=1)), tmp_path)
    short = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(max_tokens=2, ignore_eos=True),
    ]
    alone = compute(SOLO, Case(tmp_path, PROMPTS[:2], short))
    for found in pool.run(2, compute, Case(tmp_path, PROMPTS[:2], short, fused=True), limit_s=120):
        assert found.tokens == alone.tokens


def test_a_result_is_the_same_on_every_rank_to_the_bit(pool: RankPool) -> None:
    results = pool.run(4, sum_and_gather)
    expected = torch.stack([torch.randn(3, 1001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)])
    for total, gathered in results:
        assert torch.equal(total, results[0][0])
        torch.testing.assert_close(total, expected.sum(0))
        assert gathered.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3]] * 2


@pytest.mark.parametrize(("how", "said"), [("lost", "lost"), ("late", "Timed out"), ("aborted", "was broken off")])
def test_a_rank_that_waits_in_vain_says_so(how: str, said: str, pool: RankPool) -> None:
    timeout_s = 1.0 if how == "late" else 30.0
    message, _ = pool.run(2, error_of_rank_0, how, timeout_s=timeout_s, limit_s=20)
    first, again = message.split("\n")
    assert first.startswith("rank 0 of 2: an all-reduce")
    assert said in first
    assert again.startswith("rank 0 of 2: ")


def test_waiting_for_a_rank_that_never_comes_can_be_given_up() -> None:
    def look() -> None:
        raise EngineBroken("rank 1 is dead")

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    with pytest.raises(EngineBroken, match="rank 1 is dead"):
        connect_group(client, 0, 2, torch.device("cpu"), timeout_s=20.0, look=look)
    del server  # whoever waits in it hears of that: a thread that is left would end the process badly
    for thread in threading.enumerate():
        if thread.name == "stretto-tensors-connect":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("vocabulary", [5, 199, 5000])
def test_the_ranks_candidates_give_the_tokens_of_the_whole_vocabulary(vocabulary: int, pool: RankPool) -> None:
    for split, whole in pool.run(4, sample_both_ways, vocabulary):
        assert split.tolist() == whole.tolist()
        assert split[:4].tolist() == [-1, -1, -1, whole[3]]
        assert len(set(split.tolist())) >= min(vocabulary, 50)
