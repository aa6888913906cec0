"""A decoder's layers on the CPU, two compiled calls each, before and after attention: same operations, same bits.

Owns which layers can be compiled; `decoder.py` says what a layer computes, and is what this is tested against. All
layers share one module for each half, which takes the layer's number: compiling takes longer than loading a layer.
Legend as in `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stretto.layers.activation import silu_and_mul
from stretto.layers.norm import RMSNorm, written_out_norm
from stretto.layers.rope import apply_rope
from stretto.layers.scripting import Compiled, can_compile, compiled, products_of

if TYPE_CHECKING:
    from stretto.models.decoder import Attention, DecoderLayer


@dataclass(frozen=True, slots=True)
class ScriptedLayers:
    """All layers of a model, on their own weights."""

    num_layers: int
    before: Compiled
    """(layer, residual_TD, update_TD or None, turns_T1h) -> q_TNH, k_TKH, v_TKH; adds the update to the residual."""
    after: Compiled
    """(layer, residual_TD, o_TNH) -> the layer's own update_TD; adds that of its attention to the residual."""

    def forward(
        self, residual_TD: Tensor, turns_T1h: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Hidden states after the last layer, in the residual's memory. hot path"""
        before, after = self.before, self.after
        update_TD: Tensor | None = None
        for layer in range(self.num_layers):
            q_TNH, k_TKH, v_TKH = before(layer, residual_TD, update_TD, turns_T1h)
            update_TD = after(layer, residual_TD, attend(layer, q_TNH, k_TKH, v_TKH))
        assert update_TD is not None  # a config has at least one layer
        return residual_TD.add_(update_TD)


def scripted_layers(layers: Sequence[DecoderLayer]) -> ScriptedLayers | None:
    """None where a part cannot be compiled: on a GPU, with products summed over ranks, without FBGEMM and oneDNN."""
    if not can_compile():
        return None
    qkv = products_of([layer.attention.qkv for layer in layers])
    o = products_of([layer.attention.o for layer in layers])
    gate_up = products_of([layer.mlp.gate_up for layer in layers])
    down = products_of([layer.mlp.down for layer in layers])
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    attentions = [layer.attention for layer in layers]
    head_norms = None if attentions[0].qk_norm is None else _HeadNorms(attentions)
    before = _Before(attentions[0], [layer.attention_norm for layer in layers], qkv, head_norms or _NoHeadNorms())
    after = _After([layer.mlp_norm for layer in layers], o, gate_up, down)
    return ScriptedLayers(len(layers), compiled(before), compiled(after))


class _Norms(nn.Module):
    def __init__(self, norms: Sequence[RMSNorm]) -> None:
        super().__init__()
        self.weights = [norm.weight_float32_D for norm in norms]
        self.eps_1 = norms[0].eps_1

    def forward(self, layer: int, x_TD: Tensor) -> Tensor:
        """hot path"""
        return written_out_norm(x_TD, self.weights[layer], self.eps_1)


class _NoHeadNorms(nn.Module):
    def forward(self, layer: int, qk_TQH: Tensor) -> Tensor:
        """hot path"""
        return qk_TQH


class _HeadNorms(nn.Module):
    def __init__(self, attentions: Sequence[Attention]) -> None:
        super().__init__()
        norms = [attention.qk_norm for attention in attentions if attention.qk_norm is not None]
        self.weights = [norm.weight_QH for norm in norms]
        self.eps = norms[0].eps

    def forward(self, layer: int, qk_TQH: Tensor) -> Tensor:
        """hot path"""
        return torch.rms_norm(qk_TQH, [qk_TQH.shape[-1]], None, self.eps).mul_(self.weights[layer])


class _Before(nn.Module):
    """Norm, projection, norms of heads, rotary positions."""

    def __init__(self, like: Attention, norms: Sequence[RMSNorm], qkv: nn.Module, head_norms: nn.Module) -> None:
        super().__init__()
        self.norms, self.qkv, self.head_norms = _Norms(norms), qkv, head_norms
        self.num_heads, self.num_kv_heads, self.head_dim = like.num_heads, like.num_kv_heads, like.head_dim

    def forward(
        self, layer: int, residual_TD: Tensor, update_TD: Tensor | None, turns_T1h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hot path"""
        if update_TD is not None:
            residual_TD.add_(update_TD)
        x_TD = self.norms(layer, residual_TD)
        qkv_TXH = self.qkv(layer, x_TD).view(x_TD.shape[0], -1, self.head_dim)
        qk_TQH, v_TKH = qkv_TXH.split_with_sizes([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        qk_TQH = self.head_norms(layer, qk_TQH)
        apply_rope(qk_TQH, turns_T1h)
        q_TNH, k_TKH = qk_TQH.split_with_sizes([self.num_heads, self.num_kv_heads], dim=1)
        return q_TNH, k_TKH, v_TKH


class _After(nn.Module):
    """Output projection, norm, feed-forward."""

    def __init__(self, norms: Sequence[RMSNorm], o: nn.Module, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norms, self.o, self.gate_up, self.down = _Norms(norms), o, gate_up, down

    def forward(self, layer: int, residual_TD: Tensor, o_TNH: Tensor) -> Tensor:
        """hot path"""
        residual_TD.add_(self.o(layer, o_TNH.flatten(1)))
        x_TD = self.norms(layer, residual_TD)
        own_TD: Tensor = self.down(layer, silu_and_mul(self.gate_up(layer, x_TD)))
        return own_TD
