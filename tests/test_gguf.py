"""GGUF files: read completely, dequantised to the bit, translated to Hugging Face's names, and refused when damaged."""

import math
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import ModelLoadError, NotSupported, StrettoError
from stretto.models.gguf import GGUFFile, config_from_gguf, dequantize
from tests.helpers.gguf_weights import iter_weights

Types = reference.GGMLQuantizationType
# Where the float16 scales are in a block; other bytes may be anything.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def write(path: Path, architecture: str = "llama", metadata: dict | None = None, tensors: dict | None = None) -> Path:
    """A GGUF file by the reference writer; tensors are arrays, or (raw bytes, ggml type)."""
    writer = reference.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in (tensors or {}).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(type_name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    block, size = reference.GGML_QUANT_SIZES[Types[type_name]]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for offset in HALVES[type_name]:
        scales = random.normal(0, 0.1, len(raw)).astype(np.float16)
        raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("type_name", HALVES)
# One block, a few, and more than are converted at a time.
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 512), (300, 1024)])
def test_quantised_tensors_are_bit_equal_to_the_reference(
    tmp_path: Path, type_name: str, rows: int, columns: int
) -> None:
    raw = random_blocks(type_name, rows, columns, seed=rows)
    file = GGUFFile(write(tmp_path / "x.gguf", tensors={"t": (raw, Types[type_name])}))
    tensor = file.tensors["t"]
    assert (tensor.type_name, tensor.shape) == (type_name, (rows, columns))
    ours = dequantize(tensor)
    theirs = reference.dequantize(raw, Types[type_name])
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy().view(np.int32), theirs.view(np.int32))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(7,), (5, 9), (2, 3, 4)])
def test_plain_tensors_are_bit_equal_to_the_reference(tmp_path: Path, type_name: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    raw = reference.quantize(values, Types[type_name])
    stored = {"t": (raw, Types.BF16)} if type_name == "BF16" else {"t": raw}
    file = GGUFFile(write(tmp_path / "x.gguf", tensors=stored))
    ours = dequantize(file.tensors["t"])
    assert ours.shape == shape
    np.testing.assert_array_equal(
        ours.numpy().view(np.int32), reference.dequantize(raw, Types[type_name]).view(np.int32)
    )


def test_the_embedded_model_reads_as_with_the_reference_reader(smollm2_path: Path) -> None:
    ours, theirs = GGUFFile(smollm2_path), reference.GGUFReader(smollm2_path)
    for key in theirs.fields.keys() - {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}:
        if not key.startswith("tokenizer.ggml.merges"):  # two seconds in the reference
            assert ours.metadata[key] == theirs.fields[key].contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors[:12]:
        expected = reference.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(dequantize(ours.tensors[tensor.name]).numpy(), expected)


def test_every_kind_of_metadata_value_is_read(tmp_path: Path) -> None:
    writer = reference.GGUFWriter(tmp_path / "x.gguf", "llama")
    values = {
        "uint8": 200,
        "int8": -100,
        "uint16": 60000,
        "int16": -30000,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": math.pi,
        "bool": True,
        "string": "Grüße 👋",
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    arrays = {"a.strings": ["", "é", "x" * 300], "a.ints": [1, -2, 3], "a.floats": [0.5, 2.0], "a.bools": [True, False]}
    for key, array in arrays.items():
        writer.add_array(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(tmp_path / "x.gguf").metadata == {"general.architecture": "llama"} | values | arrays


# Damage


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    metadata = {"tokenizer.ggml.tokens": ["a", "b", "cd"], "llama.block_count": 1, "x": [1, 2, 3]}
    write(
        path,
        metadata=metadata,
        tensors={"u": np.ones((2, 3), np.float32), "v": (np.zeros((2, 18), np.uint8), Types.Q4_0)},
    )
    return path.read_bytes()


def open_bytes(content: bytes, tmp_path: Path) -> GGUFFile:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def test_a_file_cut_anywhere_is_refused_with_its_name(small_file: bytes, scratch: Path) -> None:
    assert open_bytes(small_file, scratch).tensors.keys() == {"u", "v"}
    used = small_file[: len(small_file) - 28]  # "v" has 36 bytes and is padded to 64
    for length in range(len(used)):
        with pytest.raises(ModelLoadError, match=r"damaged\.gguf"):
            open_bytes(used[:length], scratch)


def test_a_truncated_tensor_is_named(small_file: bytes, scratch: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tensor 'v' \(Q4_0, shape \(2, 32\)\) needs bytes .* truncated"):
        open_bytes(small_file[:-32], scratch)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), length=st.sampled_from([1, 4, 8]))
def test_damaged_bytes_never_end_in_anything_but_an_error_of_ours(
    small_file: bytes, scratch: Path, position: int, value: int, length: int
) -> None:
    position %= len(small_file)
    damaged = (small_file[:position] + bytes([value]) * length + small_file[position + length :])[: len(small_file)]
    try:
        file = open_bytes(damaged, scratch)
        for tensor in file.tensors.values():
            dequantize(tensor)
        config_from_gguf(file)
    except StrettoError as error:
        if "damaged.gguf" not in str(error):
            raise


def test_impossible_counts_are_refused_before_anything_is_allocated(small_file: bytes, scratch: Path) -> None:
    huge = (2**62).to_bytes(8, "little")
    for position in (8, 16, 24):  # tensors, metadata entries, length of the first key
        with pytest.raises(ModelLoadError, match="truncated or damaged"):
            open_bytes(small_file[:position] + huge + small_file[position + 8 :], scratch)
    tokens = small_file.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens"):
        open_bytes(small_file[:tokens] + huge + small_file[tokens + 8 :], scratch)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a GGUF file"),
        (b"GGML" + b"\0" * 100, "not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + b"\0" * 100, "GGUF version 1; versions 2 and 3 are supported"),
        (b"GGUF" + (4).to_bytes(4, "little") + b"\0" * 100, "GGUF version 4"),
        (b"GGUF" + (3).to_bytes(4, "big") + b"\0" * 100, "big-endian"),
    ],
)
def test_other_files_are_refused(content: bytes, problem: str, scratch: Path) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        open_bytes(content, scratch)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            GGUFFile(path)


def test_types_without_a_kernel_and_unknown_types_are_named(small_file: bytes, tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "x.gguf", tensors={"odd": (np.zeros((1, 66), np.uint8), Types.IQ2_XXS)}))
    with pytest.raises(NotSupported, match="'odd' has type IQ2_XXS; supported are F32"):
        dequantize(file.tensors["odd"])
    entry = small_file.index((1).to_bytes(8, "little") + b"v") + 9 + 4 + 16
    with pytest.raises(ModelLoadError, match="'v' has the unknown ggml type 77"):
        open_bytes(small_file[:entry] + (77).to_bytes(4, "little") + small_file[entry + 4 :], tmp_path)


# Configuration and names


def tiny_model(model_type: str, **changes: object) -> torch.nn.Module:
    import transformers

    arguments = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 40,
        "max_position_embeddings": 256,
        "rms_norm_eps": 2.0**-17,
        "tie_word_embeddings": False,
    }
    config = transformers.AutoConfig.for_model(model_type, **(arguments | changes))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)


def write_model(path: Path, model: torch.nn.Module, extra: dict | None = None, tensors: dict | None = None) -> Path:
    """The model as llama.cpp's converter stores it: its tensor names and its order of q and k rows."""
    config, architecture = model.config, model.config.model_type
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
    } | (extra or {})
    arch = next(key for key, name in reference.MODEL_ARCH_NAMES.items() if name == architecture)
    names = reference.get_tensor_name_map(arch, config.num_hidden_layers)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            value = value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
        stored[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(value)
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()}
    return write(path, architecture, metadata | {"tokenizer.ggml.eos_token_id": 2}, stored | (tensors or {}))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_weights_and_configuration_survive_the_way_through_gguf(tmp_path: Path, model_type: str, changes: dict) -> None:
    model = tiny_model(model_type, **changes)
    file = GGUFFile(write_model(tmp_path / "x.gguf", model))
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = dict(iter_weights(file))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    config = config_from_gguf(file)
    assert config["architectures"] == [type(model).__name__]
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert config[key] == getattr(model.config, key)
    for key in ("rms_norm_eps", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "model_type"):
        assert config[key] == getattr(model.config, key)
    assert (config["head_dim"], config["rope_theta"], config["rope_scaling"]) == (16, 10000.0, None)
    assert config["attention_bias"] == (model_type == "qwen2" or bool(changes.get("attention_bias")))
    assert config["mlp_bias"] == bool(changes.get("mlp_bias"))
    assert (config["eos_token_id"], config["bos_token_id"]) == (2, None)


def test_how_a_file_stores_matrices_is_not_the_models_dtype(tmp_path: Path) -> None:
    """Those of bfloat16 models are often stored as F16, in which what they compute might overflow."""
    model = tiny_model("llama").to(torch.float16)
    assert "dtype" not in config_from_gguf(GGUFFile(write_model(tmp_path / "x.gguf", model)))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.attn_factor": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1.0),
            },
        ),
    ],
)
def test_rope_scaling_keys_are_translated(tmp_path: Path, extra: dict, expected: dict | None) -> None:
    file = GGUFFile(write_model(tmp_path / "x.gguf", tiny_model("llama"), extra))
    assert config_from_gguf(file)["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "original"),
    [
        (64, 500000.0, 32.0, 1.0, 4.0, 8192),
        (128, 500000.0, 8.0, 1.0, 4.0, 8192),
        (128, 10000.0, 4.0, 2.0, 12.0, 2048),
        (16, 10000.0, 8.0, 1.0, 4.0, 8192),
    ],
)
def test_llama3_parameters_are_recovered_from_the_stored_divisors(
    tmp_path: Path, head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def frequencies(scaling: dict) -> torch.Tensor:
        config = transformers.LlamaConfig(
            head_dim=head_dim, max_position_embeddings=131072, rope_parameters={"rope_theta": theta, **scaling}
        )
        return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]

    wanted = frequencies(
        {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    )
    plain = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    model = tiny_model("llama", head_dim=head_dim)
    extra = {"rope.freq_base": theta}
    file = GGUFFile(write_model(tmp_path / "x.gguf", model, extra, {"rope_freqs.weight": (plain / wanted).numpy()}))
    scaling = config_from_gguf(file)["rope_scaling"]
    assert isinstance(scaling, dict)
    assert scaling["factor"] == pytest.approx(factor, rel=1e-6)
    torch.testing.assert_close(frequencies(scaling), wanted, rtol=1e-4, atol=0)
    assert "rope_freqs.weight" not in dict(iter_weights(file))


@pytest.mark.parametrize(
    ("extra", "tensors", "problem"),
    [
        ({"attention.value_length": 8}, {}, "attention.value_length is 8"),
        ({"expert_count": 8}, {}, "mixture-of-experts"),
        ({"block_count": 3}, {}, r"'blk\.2\.attn_q\.weight' is missing"),
        ({"block_count": "two"}, {}, "'llama.block_count' is 'two', not a number"),
        ({"attention.head_count_kv": [2, 1]}, {}, "differs from layer to layer"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, {}, "'longrope' is not supported"),
        ({}, {"rope_freqs.weight": np.array([1, 9, 1, 9, 1, 9, 1, 9], np.float32)}, "follows no llama3 rope scaling"),
        ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, "does not hold 8 divisors"),
    ],
)
def test_variants_that_are_not_built_are_refused(tmp_path: Path, extra: dict, tensors: dict, problem: str) -> None:
    file = GGUFFile(write_model(tmp_path / "x.gguf", tiny_model("llama"), extra, tensors))
    with pytest.raises((ModelLoadError, NotSupported), match=problem):
        config_from_gguf(file)


def test_other_architectures_and_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="'mamba' is not supported; supported are llama, qwen2, qwen3"):
        config_from_gguf(GGUFFile(write(tmp_path / "x.gguf", "mamba")))
    with pytest.raises(ModelLoadError, match=r"'llama\.embedding_length' is missing"):
        config_from_gguf(GGUFFile(write(tmp_path / "y.gguf")))
