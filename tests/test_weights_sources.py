"""Weights come out the same from one file, from shards, from GGUF; dummy weights follow their seed; damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.errors import InvalidRequest, ModelLoadError, NotSupported
from stretto.models.loader import load_model
from stretto.models.resolve import ResolvedModel
from stretto.models.sources import INDEX_NAME
from tests.helpers.dense import CPU, logits_of
from tests.helpers.tiny_models import FAMILIES, edit_config, save, tiny_config, tiny_model

PROMPT = [1, 5, 198, 7, 42]
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny Qwen3 (untied) in one safetensors file."""
    save(tiny_model(tiny_config("qwen3")), tmp_path)
    return tmp_path


def load(directory: Path, **options: Any) -> Any:
    return load_model(ResolvedModel("directory", directory, "tiny"), **({"dtype": "float32", "device": CPU} | options))


def rewrite(directory: Path, edit: Any) -> None:
    """Load the only weight file, let `edit` change the dict of tensors, and save it again."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    save_file(tensors, path)


def shard(directory: Path) -> dict[str, str]:
    """Split the only weight file into three shards with an index; returns the index's map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-{i + 1:05}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file_name, members in shards.items():
        save_file({name: tensors[name] for name in members}, directory / file_name)
    weight_map = {name: file_name for file_name, members in shards.items() for name in members}
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_give_the_same_model_as_one_file(checkpoint: Path) -> None:
    expected = logits_of(load(checkpoint), PROMPT)
    shard(checkpoint)
    assert torch.equal(logits_of(load(checkpoint), PROMPT), expected)
    (checkpoint / INDEX_NAME).unlink()
    assert torch.equal(logits_of(load(checkpoint), PROMPT), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_checkpoint_may_store_any_float_type(checkpoint: Path, dtype: torch.dtype) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({name: t.to(dtype).float() for name, t in tensors.items()}))
    expected = logits_of(load(checkpoint), PROMPT)
    rewrite(checkpoint, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    assert torch.equal(logits_of(load(checkpoint), PROMPT), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_the_same_model_as_safetensors(family: str, tmp_path: Path) -> None:
    reference = tiny_model(tiny_config(family, tie_word_embeddings=family == "llama"))
    expected = logits_of(load_model(save(reference, tmp_path), dtype="float32", device=CPU), PROMPT)
    path = tmp_path / "tiny.gguf"
    write_gguf(reference, family, path)
    model = load_model(ResolvedModel("gguf", path, "tiny"), dtype="float32", device=CPU)
    torch.testing.assert_close(logits_of(model, PROMPT), expected, rtol=0, atol=1e-5)


def write_gguf(model: Any, family: str, path: Path) -> None:
    """What llama.cpp's converter writes: its names, and for llama its row order of q and k."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        for hf_part, gguf_part in GGUF_NAMES.items():
            name = name.replace(hf_part, gguf_part)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_old_constants_and_the_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    reference = tiny_model(tiny_config("llama", tie_word_embeddings=True))
    save(reference, tmp_path)
    expected = logits_of(load(tmp_path), PROMPT)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": reference.lm_head.weight.detach().clone(),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    assert torch.equal(logits_of(load(tmp_path), PROMPT), expected)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
class TestEveryTensorMatters:
    def test_missing(self, name: str, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda tensors: tensors.pop(name))
        with pytest.raises(ModelLoadError, match=rf"tensor '{name}' is missing"):
            load(checkpoint)

    def test_of_the_wrong_shape(self, name: str, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
        with pytest.raises(ModelLoadError, match=rf"tensor '{name}' has shape \[.*\]; the config asks for \["):
            load(checkpoint)

    def test_of_integers(self, name: str, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
        with pytest.raises(ModelLoadError, match=rf"tensor '{name}' has dtype torch.int8"):
            load(checkpoint)


def test_an_unexpected_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelLoadError, match=r"unexpected tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load(checkpoint)


def test_layers_beyond_the_config_are_unexpected(checkpoint: Path) -> None:
    edit_config(checkpoint, num_hidden_layers=2, layer_types=None)
    with pytest.raises(ModelLoadError, match=r"unexpected tensor 'model\.layers\.2\..* and 10 more"):
        load(checkpoint)


def test_an_unexpected_gguf_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    reference = tiny_model(tiny_config("qwen2"))
    reference.register_parameter("surprise", torch.nn.Parameter(torch.ones(4)))
    write_gguf(reference, "qwen2", path)
    with pytest.raises(ModelLoadError, match="unexpected tensor 'surprise'"):
        load_model(ResolvedModel("gguf", path, "tiny"), dtype="float32", device=CPU)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(kept: float, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated or not a safetensors file"):
        load(checkpoint)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors: .* missing"):
        load(checkpoint)


def test_a_tensor_that_is_not_where_the_index_says_is_named(checkpoint: Path) -> None:
    weight_map = shard(checkpoint)
    weight_map["lm_head.weight"] = weight_map["model.norm.weight"]
    (checkpoint / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"model-0000.-of-00003\.safetensors: tensor 'lm_head\.weight'"):
        load(checkpoint)


@pytest.mark.parametrize("index", ["{", "{}", "[1]", '{"a": 1}', '{"a": "../b"}'])
def test_a_damaged_index_is_named(index: str, checkpoint: Path) -> None:
    content = index if index in ("{", "{}") else f'{{"weight_map": {index}}}'
    (checkpoint / INDEX_NAME).write_text(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        load(checkpoint)


def test_a_directory_without_weights_says_what_it_has(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file \(pytorch_model\.bin"):
        load(checkpoint)


def test_dummy_weights_need_only_a_config_and_follow_the_seed(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    first, again, other = (load(checkpoint, load_format="dummy", seed=seed) for seed in (3, 3, 4))
    logits = logits_of(first, PROMPT)
    assert torch.equal(logits_of(again, PROMPT), logits)
    assert not torch.allclose(logits_of(other, PROMPT), logits)
    assert bool(logits.isfinite().all())
    assert len(set(logits[-1].tolist())) > 190  # of 199: tokens do not tie


def test_progress_counts_every_element_once(checkpoint: Path) -> None:
    for load_format in ("auto", "dummy"):
        calls: list[tuple[int, int]] = []
        model = load(checkpoint, load_format=load_format, progress=lambda *call, calls=calls: calls.append(call))
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert {total for _, total in calls} == {model.config.num_parameters}
        assert calls[-1][0] == model.config.num_parameters


def test_unknown_options_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match="load format 'quick'"):
        load(checkpoint, load_format="quick")
    with pytest.raises(InvalidRequest, match="dtype 'float8'"):
        load(checkpoint, dtype="float8")


def test_weights_that_a_format_cannot_hold_are_named(checkpoint: Path) -> None:
    with pytest.raises(NotSupported, match=r"model\.layers\.0\.self_attn\.q_proj.*int4|lm_head.*int8"):
        load(checkpoint, dtype="int4")  # a hidden size of 48 is no multiple of the group
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors[name].fill_(1e6))
    with pytest.raises(NotSupported, match=r"model\.layers\.1\.mlp\.down_proj"):
        load(checkpoint, dtype="float16")
