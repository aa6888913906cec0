"""Activation functions between linear layers. Legend: T tokens, F ffn."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up as [T, F], from the fused projection [T, 2F] that holds gate first, then up. hot path"""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)
