"""Ranks that write each other's memory sum, and choose tokens, as one rank does; the kernels interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from stretto.distributed.group import SOLO
from stretto.request import SamplingParams
from tests.helpers.rank_pool import RankPool
from tests.helpers.shared_peers import compute_with_peers, draw_with_peers, sum_with_peers
from tests.helpers.tensor_parallel import Case, compute
from tests.helpers.tiny_models import save, tiny_config, tiny_model


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(3)
    yield made
    made.close()


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_torch_and_equal_on_all_ranks(size: int, pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(size, sum_with_peers, tmp_path)
    for results in zip(*ranks, strict=True):
        for rank in results:
            assert all(torch.equal(a, b) for a, b in zip(rank, results[0], strict=True))
        total, expected_total, added, expected_added, again, once, norm, expected_norm = results[0]
        assert torch.equal(total, expected_total)
        assert torch.equal(added, expected_added)
        assert torch.equal(again, once)
        torch.testing.assert_close(norm, expected_norm)


@pytest.mark.parametrize(("size", "vocabulary"), [(2, 4099), (3, 4)])
def test_candidates_give_the_tokens_of_the_whole_vocabulary(
    size: int, vocabulary: int, pool: RankPool, tmp_path: Path
) -> None:
    for split, whole in pool.run(size, draw_with_peers, tmp_path, vocabulary):
        assert torch.equal(split, whole)


def test_an_engine_over_peer_memory_gives_the_tokens_of_one_rank(pool: RankPool, tmp_path: Path) -> None:
    save(tiny_model(tiny_config("qwen3", num_hidden_layers=1, num_key_value_heads=1)), tmp_path)
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True),
    ]
    case = Case(tmp_path, [[5, 17, 99, 3], [1]], params)
    alone = compute(SOLO, case)
    (tmp_path / "buffers").mkdir()
    fused = Case(tmp_path, case.prompts, params, fused=True)
    for found, exchanges in pool.run(2, compute_with_peers, tmp_path / "buffers", fused, limit_s=120):
        assert found.tokens == alone.tokens
        assert exchanges > 20
