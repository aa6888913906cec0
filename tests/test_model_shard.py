"""How a model is divided, what is refused, and that a rank reads its own part of every tensor and no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.distributed.group import SoloGroup
from stretto.errors import InvalidRequest, NotSupported
from stretto.models.config import ModelConfig
from stretto.models.decoder import Decoder
from stretto.models.gguf import GGUFFile
from stretto.models.loader import load_config
from stretto.models.shard import shard_of
from stretto.models.sources import GGUFSource, RandomSource, SafetensorsSource, TensorPart, WeightSource
from stretto.models.weights import WeightReader
from tests.helpers.dense import CPU
from tests.helpers.tiny_models import save, tiny_config, tiny_model


class OneOfMany(SoloGroup):
    """Stands for one rank while weights are read, which needs no other."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


class Counted:
    """A source that counts the elements which are read of each tensor."""

    def __init__(self, source: WeightSource) -> None:
        self.origin, self.rows_in_pairs = source.origin, source.rows_in_pairs
        self.names, self.total_elements = source.names, source.total_elements
        self.elements: Counter[str] = Counter()
        self._source = source

    def read(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        found = self._source.read(name, shape, part)
        self.elements[name] += found.numel()
        return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A tiny Llama's."""
    return load_config(save(tiny_model(tiny_config("llama")), tmp_path_factory.mktemp("llama")))


@given(st.data())
def test_ranks_divide_a_model_and_keep_query_heads_with_their_kv_head(config: ModelConfig, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    kv_heads = size * data.draw(st.integers(1, 3)) if data.draw(st.booleans()) else 1
    if size % 2 == 0 and data.draw(st.booleans()):
        kv_heads = size // 2
    # A multiple of both, so that every rank has as many query heads of each of its kv heads.
    heads = max(kv_heads, size) * data.draw(st.integers(1, 4))
    whole = replace(
        config,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=size * data.draw(st.integers(1, 9)),
        vocab_size=data.draw(st.integers(1, 50)),
    )
    shards = [shard_of(whole, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads] == list(range(heads))
    assert [column for shard in shards for column in shard.ffn] == list(range(whole.intermediate_size))
    assert [token for shard in shards for token in shard.vocabulary] == list(range(whole.vocab_size))
    assert {head for shard in shards for head in shard.kv_heads} == set(range(kv_heads))
    for shard in shards:
        mine = shard.config
        assert (mine.num_heads, mine.num_kv_heads) == (len(shard.heads), len(shard.kv_heads))
        assert len(shard.vocabulary) <= shard.vocabulary_rows == shards[0].vocabulary_rows
        for local, head in enumerate(shard.heads):
            local_kv_head = local // (mine.num_heads // mine.num_kv_heads)
            assert shard.kv_heads[local_kv_head] == head // (heads // kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ffn", "size", "allowed"),
    [(9, 3, 1536, 2, "1, 3"), (9, 3, 1536, 9, "1, 3"), (8, 2, 64, 16, "1, 2, 4, 8"), (12, 6, 96, 4, "1, 2, 3, 6, 12")],
)
def test_a_size_that_does_not_divide_the_model_is_refused_with_numbers(
    config: ModelConfig, heads: int, kv_heads: int, ffn: int, size: int, allowed: str
) -> None:
    whole = replace(config, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=ffn)
    with pytest.raises(
        InvalidRequest, match=rf"tensor_parallel_size is {size}, .* {heads} .* {kv_heads} .* {ffn}"
    ) as e:
        shard_of(whole, 0, size)
    assert str(e.value).endswith(f"allowed: {allowed}")


def load_rank(source: WeightSource, config: ModelConfig, rank: int, size: int, dtype: str = "float32") -> Decoder:
    group = OneOfMany(rank, size)
    weights = WeightReader(source, weight_format=dtype, device=CPU, group=group)
    model = Decoder.load(config, weights, 128, group)
    weights.finish()
    return model


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
def test_a_rank_reads_its_part_and_no_more(size: int, kv_heads: int, tmp_path: Path) -> None:
    changes = {"num_key_value_heads": kv_heads, "attention_bias": True, "mlp_bias": True}
    resolved = save(tiny_model(tiny_config("llama", **changes)), tmp_path)
    config = load_config(resolved)
    sources = [Counted(SafetensorsSource(resolved.path)) for _ in range(size)]
    for rank, source in enumerate(sources):
        load_rank(source, config, rank, size)
    whole = Counted(SafetensorsSource(resolved.path))
    load_rank(whole, config, 0, 1)
    copies = max(1, size // kv_heads)
    for name, elements in whole.elements.items():
        read = [source.elements[name] for source in sources]
        if "o_proj.bias" in name or "down_proj.bias" in name:
            assert read == [elements] + [0] * (size - 1), name
        elif "norm" in name:
            assert read == [elements] * size, name
        elif "embed" in name or "lm_head" in name:
            assert sum(read) == elements, name
            assert max(read) == -(-config.vocab_size // size) * config.hidden_size, name
        elif "k_proj" in name or "v_proj" in name:
            assert read == [elements * copies // size] * size, name
        else:
            assert read == [elements // size] * size, name


def assert_parts_are_of_the_whole(source: WeightSource, name: str, shape: tuple[int, ...]) -> None:
    whole = source.read(name, shape).clone()
    for begin, end in ((0, shape[0]), (0, shape[0] // 3), (shape[0] // 3, shape[0])):
        assert torch.equal(source.read(name, shape, TensorPart(0, range(begin, end))), whole[begin:end])
    width = shape[1]
    for begin, end in ((0, width), (0, width // 2), (width // 2, width), (width // 3 + 1, width // 3 + 2), (5, 77)):
        assert torch.equal(source.read(name, shape, TensorPart(1, range(begin, end))), whole[:, begin:end])


def test_parts_of_a_gguf_file_are_parts_of_its_tensors(smollm2_path: Path) -> None:
    gguf = GGUFFile(smollm2_path)
    source = GGUFSource(gguf)
    layer = "model.layers.7"
    assert_parts_are_of_the_whole(source, f"{layer}.mlp.down_proj.weight", (576, 1536))
    assert_parts_are_of_the_whole(source, f"{layer}.self_attn.o_proj.weight", (576, 576))
    name = f"{layer}.input_layernorm.weight"
    assert torch.equal(source.read(name, (576,), TensorPart(0, range(9, 40))), source.read(name, (576,))[9:40])


def test_parts_of_a_safetensors_file_are_parts_of_its_tensors(tmp_path: Path) -> None:
    resolved = save(tiny_model(tiny_config("llama")), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    assert_parts_are_of_the_whole(SafetensorsSource(resolved.path), name, (48, 80))


def test_parts_of_random_weights_are_parts_of_the_tensors() -> None:
    source = RandomSource(3, CPU, 0)
    source._BLOCK = 997  # so that tensors go round it more than once
    source._block = source._block[:997].clone()
    for shape in ((48, 80), (300, 1500)):
        assert_parts_are_of_the_whole(source, "model.layers.1.mlp.down_proj.weight", shape)


def test_int4_needs_whole_groups_on_every_rank(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2}
    resolved = save(tiny_model(tiny_config("llama", **changes)), tmp_path)
    config = load_config(resolved)
    load_rank(SafetensorsSource(resolved.path), config, 0, 1, "int4")
    with pytest.raises(NotSupported, match=r"down_proj: int4 .* multiples of 32; a weight is 64x48"):
        load_rank(SafetensorsSource(resolved.path), config, 0, 2, "int4")
