"""Runs of small operations as one call: compiled by TorchScript, so that no Python lies between them.

Owns how a module is compiled, and the weight formats' products as modules that can be. On a CPU a decode step is well
over a thousand operations of a few microseconds each, and Python between them costs as much again: handing packed
float16 weights to their product takes ten microseconds from Python, and one from here. The operations, their order
and so every bit stay what they are. Legend: T tokens, I in-features, O out-features.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.layers.int4 import GROUP, Int4Linear
from stretto.layers.linear import Float16Linear, Linear, PrepackedLinear

Compiled = Callable[..., Any]


def can_compile() -> bool:
    """Whether this Python's torch still has TorchScript."""
    return sys.version_info < (3, 14)


def compiled(module: nn.Module) -> Compiled:
    """`module.forward` without Python inside.

    A class is compiled once; for others of it with parts of the same kinds this takes about a millisecond.
    """
    with warnings.catch_warnings():
        # It is on its way out, but nothing else takes the Python away without a C++ compiler on the user's machine.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        entry: Compiled = torch.jit.script(module).forward
    return entry


def product_of(linear: Linear) -> nn.Module | None:
    """The layer as a module that can be compiled, on the same packed weights; None if it needs more than torch."""
    if isinstance(linear, Float16Linear):
        return _Float16Product(linear)
    if isinstance(linear, PrepackedLinear):
        return _PrepackedProduct(linear)
    if isinstance(linear, Int4Linear):
        return _Int4Product(linear)
    return None


class _Float16Product(nn.Module):
    def __init__(self, linear: Float16Linear) -> None:
        super().__init__()
        self.packed = linear.packed

    def forward(self, x_TI: Tensor) -> Tensor:
        """hot path"""
        y_TO: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_TI, self.packed)
        return y_TO


class _PrepackedProduct(nn.Module):
    def __init__(self, linear: PrepackedLinear) -> None:
        super().__init__()
        self.packed = linear.packed
        self.bias_O = linear.bias_O

    def forward(self, x_TI: Tensor) -> Tensor:
        """hot path"""
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.packed, self.bias_O, "none", [], "")
        return y_TO


class _Int4Product(nn.Module):
    __constants__ = ("group", "out_features", "padded")

    def __init__(self, linear: Int4Linear) -> None:
        super().__init__()
        self.packed = linear.packed
        self.scale_zero_GO2 = linear.scale_zero_GO2
        self.bias_O = linear.bias_O
        self.group = GROUP
        self.out_features = linear.out_features
        self.padded = linear.padded

    def forward(self, x_TI: Tensor) -> Tensor:
        """hot path"""
        y_TO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TI, self.packed, self.group, self.scale_zero_GO2)
        if self.padded:
            y_TO = y_TO.narrow(1, 0, self.out_features)
        if self.bias_O is not None:
            y_TO = y_TO + self.bias_O
        return y_TO
