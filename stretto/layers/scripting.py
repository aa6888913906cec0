"""Runs of small operations as one call: compiled by TorchScript, so that no Python lies between them.

Owns how a module is compiled, and the weight formats' products as modules that can be. On a CPU a decode step is well
over a thousand operations of a few microseconds each, and Python between them costs as much again: handing packed
float16 weights to their product takes ten microseconds from Python, and one from here. The operations, their order
and so every bit stay what they are. Legend: T tokens, I in-features, O out-features.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.layers.int4 import GROUP, Int4Linear
from stretto.layers.linear import Float16Linear, Linear, PrepackedLinear

Compiled = Callable[..., Any]


def can_compile() -> bool:
    """Whether this Python's torch still has TorchScript."""
    return sys.version_info < (3, 14)


def compiled(module: nn.Module) -> Compiled:
    """`module.forward` without Python inside. Takes some tens of milliseconds."""
    with warnings.catch_warnings():
        # It is on its way out, but nothing else takes the Python away without a C++ compiler on the user's machine.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        entry: Compiled = torch.jit.script(module).forward
    return entry


def products_of(linears: Sequence[Linear]) -> nn.Module | None:
    """Layers as one module that can be compiled: (number of the layer, x_TI) -> y_TO, on the same packed weights.

    None if the layers are not all of one kind, or need more than torch.
    """
    biases = [getattr(linear, "bias_O", None) is not None for linear in linears]
    first, bias = linears[0], biases[0]
    if any(other != bias for other in biases):
        return None
    if all(isinstance(linear, Float16Linear) for linear in linears):
        return _Float16Products(cast(Sequence[Float16Linear], linears))
    if all(isinstance(linear, PrepackedLinear) for linear in linears):
        prepacked = cast(Sequence[PrepackedLinear], linears)
        return _BiasedPrepackedProducts(prepacked) if bias else _PrepackedProducts(prepacked)
    if all(isinstance(linear, Int4Linear) and linear.out_features == first.out_features for linear in linears):
        int4 = cast(Sequence[Int4Linear], linears)
        return _BiasedInt4Products(int4) if bias else _Int4Products(int4)
    return None


class _Float16Products(nn.Module):
    def __init__(self, linears: Sequence[Float16Linear]) -> None:
        super().__init__()
        self.packed = [linear.packed for linear in linears]

    def forward(self, layer: int, x_TI: Tensor) -> Tensor:
        """hot path"""
        y_TO: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_TI, self.packed[layer])
        return y_TO


class _PrepackedProducts(nn.Module):
    def __init__(self, linears: Sequence[PrepackedLinear]) -> None:
        super().__init__()
        self.packed = [linear.packed for linear in linears]

    def forward(self, layer: int, x_TI: Tensor) -> Tensor:
        """hot path"""
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.packed[layer], None, "none", [], "")
        return y_TO


class _BiasedPrepackedProducts(nn.Module):
    def __init__(self, linears: Sequence[PrepackedLinear]) -> None:
        super().__init__()
        self.packed = [linear.packed for linear in linears]
        self.biases = [linear.bias_O for linear in linears if linear.bias_O is not None]

    def forward(self, layer: int, x_TI: Tensor) -> Tensor:
        """hot path"""
        packed, bias_O = self.packed[layer], self.biases[layer]
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
        return y_TO


class _Int4Products(nn.Module):
    def __init__(self, linears: Sequence[Int4Linear]) -> None:
        super().__init__()
        self.packed = [linear.packed for linear in linears]
        self.scales_zeros = [linear.scale_zero_GO2 for linear in linears]
        self.group = GROUP
        self.out_features = linears[0].out_features
        self.padded = linears[0].padded

    def forward(self, layer: int, x_TI: Tensor) -> Tensor:
        """hot path"""
        packed, scale_zero_GO2 = self.packed[layer], self.scales_zeros[layer]
        y_TO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TI, packed, self.group, scale_zero_GO2)
        return y_TO.narrow(1, 0, self.out_features) if self.padded else y_TO


class _BiasedInt4Products(nn.Module):
    def __init__(self, linears: Sequence[Int4Linear]) -> None:
        super().__init__()
        self.products = _Int4Products(linears)
        self.biases = [linear.bias_O for linear in linears if linear.bias_O is not None]

    def forward(self, layer: int, x_TI: Tensor) -> Tensor:
        """hot path"""
        y_TO: Tensor = self.products(layer, x_TI)
        return y_TO + self.biases[layer]
