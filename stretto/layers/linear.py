"""Linear layers in every weight format: one class a format, all callable as x_TI -> y_TO.

Owns the packed weights; `formats.py` says which formats there are. Legend: T tokens, I in-features, O out-features.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from stretto.errors import NotSupported
from stretto.layers.formats import activation_dtype, onednn_available
from stretto.layers.int4 import Int4Linear

PACK_ROWS_HINT = 8
"""Rows that oneDNN is told to expect when it chooses a weight layout: measured best or near it from 1 to 512 rows."""

FLOAT16_MAX = 65504.0


class Linear(Protocol):
    """y_TO = x_TI @ weight_OI.T + bias_O. x and y have the format's activation dtype; never blocks the host."""

    in_features: int
    out_features: int
    weight_bytes: int
    """Bytes that one call reads from memory."""

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """hot path"""


def make_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, format: str, *, head: bool = False) -> Linear:
    """Pack `weight_OI` (any float dtype) into `format` on the weight's own device.

    `head` marks the output head, which int4 keeps in bfloat16 (see below). The caller may drop `weight_OI` afterwards,
    except that unpacked formats (CUDA) keep it when its dtype already fits. Raises NotSupported, naming the shape,
    where the format cannot hold these weights.
    """
    out_features, in_features = weight_OI.shape
    if bias_O is not None and bias_O.shape != (out_features,):
        raise ValueError(f"bias {tuple(bias_O.shape)} does not fit weight {out_features}x{in_features}")
    device = weight_OI.device
    dtype = activation_dtype(format, device)
    if device.type != "cpu":
        if format == "int4":
            raise NotSupported(f"int4 weights are built for the CPU only, not for {device.type}")
        return PlainLinear(weight_OI, bias_O, dtype)
    if format == "float16":
        return Float16Linear(weight_OI, bias_O)
    # torch's 8-bit kernel is no faster than a packed bfloat16 head at one row, and three times slower from eight on.
    if format == "int4" and not head:
        return Int4Linear(weight_OI, bias_O)
    if not onednn_available():
        return PlainLinear(weight_OI, bias_O, dtype)
    return PrepackedLinear(weight_OI, bias_O, dtype)


class PlainLinear:
    """The weight as torch stores it; for CUDA, and for a CPU without oneDNN."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.weight_OI = weight_OI.to(dtype).contiguous()
        self.bias_O = None if bias_O is None else bias_O.to(dtype)
        self.weight_bytes = self.weight_OI.nbytes

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """hot path"""
        return F.linear(x_TI, self.weight_OI, self.bias_O)


class PrepackedLinear:
    """float32 or bfloat16, packed once into oneDNN's blocked layout (2-3x faster than `F.linear` at small batches).

    Sums are in float32. Which kernel oneDNN takes depends on the number of rows, so one row's result may differ in
    its last bits between batch sizes.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight_OI.shape
        weight = weight_OI.to(dtype).contiguous()
        self.weight_bytes = weight.nbytes
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        self.bias_O = None if bias_O is None else bias_O.to(dtype).contiguous()
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """hot path"""
        y_TO: torch.Tensor = self._linear(x_TI, self.packed, self.bias_O, "none", [], "")
        return y_TO


class Float16Linear:
    """float16 weights in FBGEMM's layout, float32 activations and sums; a row's result is bit-equal in any batch.

    As exact as float32 for weights that float16 holds exactly, with half the memory traffic.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        low, high = torch.aminmax(weight_OI)
        largest = float(torch.maximum(-low, high))
        if not largest <= FLOAT16_MAX:
            raise NotSupported(
                f"a weight {self.out_features}x{self.in_features} holds {largest:g}; float16 ends at "
                f"{FLOAT16_MAX:g}: use dtype bfloat16 or float32"
            )
        # Rounding here is vectorised; the packer's own rounding, one element at a time, takes longer than the rest.
        rounded = weight_OI.to(torch.float16).to(torch.float32).contiguous()
        self.weight_bytes = rounded.nbytes // 2
        bias = None if bias_O is None else bias_O.to(torch.float32).contiguous()
        self.packed = torch.ops.quantized.linear_prepack_fp16(rounded, bias)
        self._linear = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """hot path"""
        y_TO: torch.Tensor = self._linear(x_TI, self.packed)
        return y_TO
