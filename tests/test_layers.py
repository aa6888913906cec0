"""Layers give what plain float32 torch gives, as closely as their format can, and the same row in any batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from stretto.errors import InvalidRequest, NotSupported
from stretto.layers.activation import silu_and_mul
from stretto.layers.embedding import Embedding
from stretto.layers.formats import (
    WEIGHT_FORMATS,
    activation_dtype,
    fbgemm_float16_available,
    onednn_available,
    resolve_dtype,
)
from stretto.layers.int4 import quantize_int4
from stretto.layers.linear import make_linear
from stretto.layers.norm import RMSNorm
from stretto.layers.rope import Rope, apply_rope

CPU = torch.device("cpu")
USABLE = [
    name
    for name in WEIGHT_FORMATS
    if (name != "float16" or fbgemm_float16_available()) and (name in ("float32", "float16") or onednn_available())
]
# Rounding of float32, float16 and bfloat16; 4-bit groups of normal weights lose 8 % on average, single results more.
ERROR = {"float32": 1e-6, "float16": 3e-4, "bfloat16": 6e-3, "int4": 0.2}
BATCHES = [1, 2, 3, 5, 8, 13, 16, 31, 32, 33, 64]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        torch.manual_seed(0)
        yield


def product_error(
    y_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> float:
    """Distance from the float64 result, relative to the size that such products have (so cancellation is no excuse)."""
    exact = x_TI.double() @ weight_OI.double().T + (0 if bias_O is None else bias_O.double())
    size = torch.outer(x_TI.double().norm(dim=1), weight_OI.double().norm(dim=1)) / x_TI.shape[1] ** 0.5
    size = size + (0 if bias_O is None else bias_O.double().abs())
    return float((y_TO.double() - exact).norm() / size.norm())


@pytest.mark.parametrize("format", USABLE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (33, 96), (576, 576), (16, 32), (1, 64)])
def test_linear_is_the_float64_product_within_its_format(
    format: str, bias: bool, out_features: int, in_features: int
) -> None:
    weight_OI = torch.randn(out_features, in_features) * 0.05
    bias_O = torch.randn(out_features) if bias else None
    linear = make_linear(weight_OI, bias_O, format)
    assert (linear.in_features, linear.out_features) == (in_features, out_features)
    for rows in (1, 7, 40):
        x_TI = torch.randn(rows, in_features).to(activation_dtype(format, CPU))
        y_TO = linear(x_TI)
        assert y_TO.shape == (rows, out_features)
        assert y_TO.dtype == activation_dtype(format, CPU)
        assert product_error(y_TO, x_TI, weight_OI, bias_O) < ERROR[format]


@pytest.mark.parametrize("format", [name for name in USABLE if name != "int4"])
def test_linear_takes_in_features_of_any_size(format: str) -> None:
    weight_OI, x_TI = torch.randn(50, 37), torch.randn(3, 37).to(activation_dtype(format, CPU))
    assert product_error(make_linear(weight_OI, None, format)(x_TI), x_TI, weight_OI, None) < ERROR[format]


@pytest.mark.parametrize("format", USABLE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_linear_packs_weights_of_any_float_type(format: str, dtype: torch.dtype) -> None:
    weight_OI = torch.randn(32, 64).to(dtype)
    x_TI = torch.randn(4, 64).to(activation_dtype(format, CPU))
    assert product_error(make_linear(weight_OI, None, format)(x_TI), x_TI, weight_OI, None) < ERROR[format]


@pytest.mark.skipif("float16" not in USABLE, reason="no FBGEMM here")
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (577, 100)])
def test_a_row_of_float16_linear_is_bit_equal_in_any_batch(out_features: int, in_features: int) -> None:
    linear = make_linear(torch.randn(out_features, in_features), torch.randn(out_features), "float16")
    x_TI = torch.randn(64, in_features)
    y_TO = linear(x_TI)
    for rows in BATCHES:
        assert torch.equal(linear(x_TI[:rows]), y_TO[:rows]), rows
    order = torch.randperm(64)
    assert torch.equal(linear(x_TI[order]), y_TO[order])


@pytest.mark.skipif("float16" not in USABLE, reason="no FBGEMM here")
def test_float16_linear_is_exact_for_weights_that_float16_holds() -> None:
    weight_OI, x_TI = torch.randn(64, 64).half().float(), torch.randn(5, 64)
    assert product_error(make_linear(weight_OI, None, "float16")(x_TI), x_TI, weight_OI, None) < 1e-6


@pytest.mark.skipif("float16" not in USABLE, reason="no FBGEMM here")
@pytest.mark.parametrize("value", [65520.0, -1e6, math.inf, math.nan])
def test_weights_that_float16_cannot_hold_are_refused(value: float) -> None:
    weight_OI = torch.zeros(48, 64)
    weight_OI[3, 5] = value
    with pytest.raises(NotSupported, match=r"48x64 holds .*float16 ends at 65504"):
        make_linear(weight_OI, None, "float16")


@pytest.mark.skipif("int4" not in USABLE, reason="no oneDNN here")
def test_int4_says_which_shapes_it_cannot_hold() -> None:
    with pytest.raises(NotSupported, match="50x37"):
        make_linear(torch.randn(50, 37), None, "int4")


@pytest.mark.skipif("int4" not in USABLE, reason="no oneDNN here")
def test_an_int4_models_head_is_bfloat16_and_of_any_shape() -> None:
    weight_OI, x_TI = torch.randn(500, 37), torch.randn(5, 37).bfloat16()
    head = make_linear(weight_OI, None, "int4", head=True)
    assert product_error(head(x_TI), x_TI, weight_OI, None) < ERROR["bfloat16"]


def test_int4_codes_recover_a_grid_of_16_levels() -> None:
    """Weights that were 4-bit before (Q4_0, Q4_1) lose only what bfloat16 scales lose."""
    codes_OI = torch.randint(0, 16, (8, 64))
    codes_OI[:, ::32], codes_OI[:, 1::32] = 0, 15
    weight_OI = (codes_OI - 8) * 0.125 + 0.25
    found_OI, scale_OG, zero_OG = quantize_int4(weight_OI)
    assert torch.equal(found_OI, codes_OI.int())
    assert (scale_OG == 0.125).all()
    assert (zero_OG == 0.25).all()


@pytest.mark.skipif("int4" not in USABLE, reason="no oneDNN here")
def test_constant_weights_survive_int4() -> None:
    x_TI = torch.ones(2, 32, dtype=torch.bfloat16)
    for value in (0.0, 0.5, -3.0):
        y_TO = make_linear(torch.full((16, 32), value), None, "int4")(x_TI)
        torch.testing.assert_close(y_TO, torch.full((2, 16), value * 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("format", USABLE)
def test_a_bias_of_another_size_is_refused(format: str) -> None:
    with pytest.raises(ValueError, match="does not fit weight 32x64"):
        make_linear(torch.randn(32, 64), torch.randn(31), format)


@pytest.mark.parametrize("format", USABLE)
def test_embedding_rows_are_those_of_the_table(format: str) -> None:
    weight_VD = torch.randn(50, 16).half().float()
    embedding = Embedding(weight_VD, format)
    ids_T = torch.tensor([3, 49, 3, 0])
    hidden_TD = embedding(ids_T)
    assert hidden_TD.dtype == activation_dtype(format, CPU)
    torch.testing.assert_close(hidden_TD, weight_VD[ids_T].to(hidden_TD.dtype), rtol=0, atol=0)
    hidden_TD.add_(1)  # the caller owns it
    torch.testing.assert_close(embedding(ids_T), weight_VD[ids_T].to(hidden_TD.dtype), rtol=0, atol=0)
    assert embedding.table_bytes == 50 * 16 * (4 if format == "float32" else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 576])
def test_rms_norm_is_torchs(dtype: torch.dtype, size: int) -> None:
    weight_D, x_TD = torch.rand(size).to(dtype), (torch.randn(9, size) * 3).to(dtype)
    norm = RMSNorm(weight_D, 1e-5, dtype)
    expected = F.rms_norm(x_TD.double(), (size,), weight_D.double(), 1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(norm(x_TD).double(), expected, rtol=tolerance, atol=tolerance)
    assert norm(x_TD).dtype == dtype
    small = RMSNorm(weight_D, 1.0, dtype)(x_TD * 0)
    assert (small == 0).all()  # eps keeps it finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_rms_norm_is_bit_equal_in_any_batch(dtype: torch.dtype) -> None:
    norm, x_TD = RMSNorm(torch.rand(576), 1e-5, dtype), torch.randn(64, 576).to(dtype)
    y_TD = norm(x_TD)
    for rows in BATCHES:
        assert torch.equal(norm(x_TD[:rows]), y_TD[:rows])


def test_norm_with_addition_updates_the_residual_in_place() -> None:
    norm = RMSNorm(torch.rand(64), 1e-5, torch.float32)
    residual_TD, update_TD = torch.randn(3, 64), torch.randn(3, 64)
    total_TD = residual_TD + update_TD
    y_TD = norm.add(residual_TD, update_TD)
    assert torch.equal(residual_TD, total_TD)
    assert torch.equal(y_TD, norm(total_TD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_each_pair_of_q_and_k_by_position_times_frequency(dtype: torch.dtype) -> None:
    frequency_h = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    positions_T = torch.tensor([0, 5, 99, 5])
    qkv_TXH = torch.randn(4, 6, 16).to(dtype)
    before = qkv_TXH.clone()
    turns = Rope(frequency_h, 100, scale=1.5).turns(positions_T)
    apply_rope(qkv_TXH[:, :5], turns)
    angle_T1h = (positions_T[:, None] * frequency_h)[:, None].double()
    even, odd = before[:, :5, ::2].double(), before[:, :5, 1::2].double()
    expected = torch.empty(4, 5, 16, dtype=torch.float64)
    expected[..., ::2] = 1.5 * (even * angle_T1h.cos() - odd * angle_T1h.sin())
    expected[..., 1::2] = 1.5 * (even * angle_T1h.sin() + odd * angle_T1h.cos())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(qkv_TXH[:, :5].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(qkv_TXH[:, 5:], before[:, 5:])  # v is not turned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    gate_TF, up_TF = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype)
    fused = torch.cat((gate_TF, up_TF), dim=1)
    torch.testing.assert_close(silu_and_mul(fused), F.silu(gate_TF) * up_TF)
    assert torch.equal(fused, torch.cat((gate_TF, up_TF), dim=1))


def test_auto_dtype_says_what_it_chose_and_why() -> None:
    chosen = resolve_dtype("auto", CPU, None)
    assert chosen.format in USABLE
    assert chosen.reason
    if fbgemm_float16_available():
        assert chosen.format == "float16"


@pytest.mark.parametrize(
    ("checkpoint_dtype", "format"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), (None, "bfloat16")],
)
def test_auto_dtype_on_a_gpu_keeps_a_checkpoint_of_16_bits_as_it_is(checkpoint_dtype: str | None, format: str) -> None:
    """A float16 checkpoint used to be rounded to bfloat16. On a CPU the machine decides."""
    chosen = resolve_dtype("auto", torch.device("cuda"), checkpoint_dtype)
    assert (chosen.format, bool(chosen.reason)) == (format, True)
    assert resolve_dtype("auto", CPU, checkpoint_dtype) == resolve_dtype("auto", CPU, None)
    assert resolve_dtype("float32", torch.device("cuda"), checkpoint_dtype).format == "float32"


@pytest.mark.parametrize("format", USABLE)
def test_a_requested_dtype_is_taken(format: str) -> None:
    assert resolve_dtype(format, CPU, None).format == format


def test_unknown_and_impossible_dtypes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'int3' is not known; use one of auto, float32"):
        resolve_dtype("int3", CPU, None)
    with pytest.raises(NotSupported, match="CPU only"):
        resolve_dtype("int4", torch.device("cuda"), None)
    with pytest.raises(InvalidRequest, match="int3"):
        activation_dtype("int3", CPU)


def test_without_fbgemm_auto_falls_back_and_float16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert resolve_dtype("auto", CPU, None).format in ("bfloat16", "float32")
    with pytest.raises(NotSupported, match="needs x86"):
        resolve_dtype("float16", CPU, None)
