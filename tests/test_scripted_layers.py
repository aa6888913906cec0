"""A compiled decoder layer is the plain one to the bit: in every weight format, architecture and batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto.layers.formats import WEIGHT_FORMATS, activation_dtype, fbgemm_float16_available, onednn_available
from stretto.layers.linear import PlainLinear, make_linear
from stretto.layers.scripting import can_compile, compiled, products_of
from stretto.models.decoder import Decoder
from stretto.models.loader import load_model
from tests.helpers.dense import CPU, DenseAttention
from tests.helpers.tiny_models import save, tiny_config, tiny_model

pytestmark = pytest.mark.skipif(not can_compile(), reason="no TorchScript for this Python")

USABLE = [name for name in WEIGHT_FORMATS if (fbgemm_float16_available() if name == "float16" else onednn_available())]
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        torch.manual_seed(0)
        yield


def plain(model: Decoder) -> Decoder:
    """The same model with Python between the operations."""
    return dataclasses.replace(model, scripted=None)


def hidden_states(model: Decoder, chunks: list[list[int]]) -> list[Tensor]:
    """Of one request whose tokens come in these chunks."""
    attend, position, found = DenseAttention(model), 0, []
    for ids in chunks:
        positions = torch.arange(position, position + len(ids))
        found.append(model.forward(torch.tensor(ids), positions, attend))
        position += len(ids)
    return found


@pytest.mark.parametrize("format", USABLE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_layer_is_the_plain_one_to_the_bit(variant: str, format: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    widths = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # whole groups of int4
    resolved = save(tiny_model(tiny_config(family, **widths, **changes)), tmp_path)
    model = load_model(resolved, dtype=format, device=CPU)
    assert model.scripted is not None
    # Several shapes, some of them twice: what the compiler learns from the first calls must not change a bit.
    chunks = [[1, 5, 9, 7], [3], [8], [2, 2, 11], [4], list(range(1, 33)), [6]]
    for ours, theirs in zip(hidden_states(model, chunks), hidden_states(plain(model), chunks), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("format", USABLE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features", [96, 33])
def test_compiled_products_are_the_layers_own(format: str, bias: bool, out_features: int) -> None:
    biases = [torch.randn(out_features) if bias else None for _ in range(3)]
    linears = [make_linear(torch.randn(out_features, 64), bias_O, format) for bias_O in biases]
    module = products_of(linears)
    assert module is not None
    product = compiled(module)
    for rows in (1, 8, 3, 40, 8):
        x_TI = torch.randn(rows, 64).to(activation_dtype(format, CPU))
        for layer, linear in enumerate(linears):
            assert torch.equal(product(layer, x_TI), linear(x_TI))


def test_layers_that_torch_alone_cannot_compute_or_of_several_kinds_are_not_compiled() -> None:
    plain_linear = PlainLinear(torch.zeros(32, 32), None, torch.float32)
    assert products_of([plain_linear]) is None
    assert products_of([make_linear(torch.zeros(32, 32), None, USABLE[0]), plain_linear]) is None
