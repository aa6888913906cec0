"""A decoder layer on the CPU as two compiled calls, before and after attention: same operations, same bits, no Python.

Owns which layers can be compiled; `decoder.py` says what a layer computes, and is what this is tested against.
Legend as in `decoder.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stretto.layers.activation import silu_and_mul
from stretto.layers.norm import written_out_norm
from stretto.layers.rope import apply_rope
from stretto.layers.scripting import Compiled, can_compile, compiled, product_of

if TYPE_CHECKING:
    from stretto.models.decoder import DecoderLayer


@dataclass(frozen=True, slots=True)
class ScriptedLayer:
    """Both halves of one layer, on the layer's own weights."""

    before: Compiled
    """(residual_TD, update_TD or None, turns_T1h) -> q_TNH, k_TKH, v_TKH, turned; adds the update to the residual."""
    after: Compiled
    """(residual_TD, o_TNH) -> the layer's update_TD; adds that of attention to the residual."""


def scripted_layer(layer: DecoderLayer) -> ScriptedLayer | None:
    """None where a part cannot be compiled: on a GPU, with products summed over ranks, without FBGEMM and oneDNN."""
    if not can_compile():
        return None
    attention, mlp = layer.attention, layer.mlp
    products = [product_of(linear) for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    qkv, o, gate_up, down = products
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    before = _Before(layer, qkv) if attention.qk_norm is None else _BeforeWithHeadNorm(layer, qkv)
    return ScriptedLayer(compiled(before), compiled(_After(layer, o, gate_up, down)))


class _Before(nn.Module):
    """Norm, projection, rotary positions."""

    def __init__(self, layer: DecoderLayer, qkv: nn.Module) -> None:
        super().__init__()
        attention = layer.attention
        self.qkv = qkv
        self.weight_float32_D, self.eps_1 = layer.attention_norm.weight_float32_D, layer.attention_norm.eps_1
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim

    def forward(
        self, residual_TD: Tensor, update_TD: Tensor | None, turns_T1h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hot path"""
        if update_TD is not None:
            residual_TD.add_(update_TD)
        x_TD = written_out_norm(residual_TD, self.weight_float32_D, self.eps_1)
        qkv_TXH = self.qkv(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        apply_rope(qkv_TXH.narrow(1, 0, self.num_heads + self.num_kv_heads), turns_T1h)
        q_TNH, k_TKH, v_TKH = qkv_TXH.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q_TNH, k_TKH, v_TKH


class _BeforeWithHeadNorm(_Before):
    """With a norm of every head of q and k before they turn."""

    def __init__(self, layer: DecoderLayer, qkv: nn.Module) -> None:
        super().__init__(layer, qkv)
        qk_norm = layer.attention.qk_norm
        assert qk_norm is not None
        self.weight_QH, self.head_eps = qk_norm.weight_QH, qk_norm.eps

    def forward(
        self, residual_TD: Tensor, update_TD: Tensor | None, turns_T1h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hot path"""
        if update_TD is not None:
            residual_TD.add_(update_TD)
        x_TD = written_out_norm(residual_TD, self.weight_float32_D, self.eps_1)
        qkv_TXH = self.qkv(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        qk_TQH, v_TKH = qkv_TXH.split_with_sizes([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        qk_TQH = torch.rms_norm(qk_TQH, [self.head_dim], None, self.head_eps).mul_(self.weight_QH)
        apply_rope(qk_TQH, turns_T1h)
        q_TNH, k_TKH = qk_TQH.split_with_sizes([self.num_heads, self.num_kv_heads], dim=1)
        return q_TNH, k_TKH, v_TKH


class _After(nn.Module):
    """Output projection, norm, feed-forward."""

    def __init__(self, layer: DecoderLayer, o: nn.Module, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.o, self.gate_up, self.down = o, gate_up, down
        self.weight_float32_D, self.eps_1 = layer.mlp_norm.weight_float32_D, layer.mlp_norm.eps_1

    def forward(self, residual_TD: Tensor, o_TNH: Tensor) -> Tensor:
        """hot path"""
        residual_TD.add_(self.o(o_TNH.flatten(1)))
        x_TD = written_out_norm(residual_TD, self.weight_float32_D, self.eps_1)
        own_TD: Tensor = self.down(silu_and_mul(self.gate_up(x_TD)))
        return own_TD
