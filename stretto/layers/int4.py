"""4-bit linear layers for the CPU, computed in bfloat16.

Owns quantisation and packing. Legend: T tokens, I in-features, O out-features, G groups of in-features.
"""

from __future__ import annotations

import torch

from stretto.errors import NotSupported

GROUP = 32
"""In-features that share one scale and zero point; the group of Q4_0 and Q4_1, so that those survive requantisation."""

OUT_BLOCK = 16
"""The kernel computes out-features in blocks; other sizes are padded with zero rows."""


def quantize_int4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric round-to-nearest: codes_OI (int32, 0..15) and bfloat16 scale_OG, zero_OG.

    weight ~ (code - 8) * scale + zero, per group of 32 in-features. The codes are chosen against the *rounded* scale
    and zero, so their rounding costs no bias.
    """
    out_features, in_features = weight_OI.shape
    _check_in_features(weight_OI)
    weight_OGg = weight_OI.float().reshape(out_features, in_features // GROUP, GROUP)
    low_OG, high_OG = weight_OGg.aminmax(dim=-1)
    scale_OG = ((high_OG - low_OG) / 15).clamp_(min=1e-8).to(torch.bfloat16)
    zero_OG = (low_OG + scale_OG.float() * 8).to(torch.bfloat16)
    codes = (weight_OGg - zero_OG.float().unsqueeze(-1)) / scale_OG.float().unsqueeze(-1)
    codes = codes.round_().add_(8).clamp_(0, 15).to(torch.int32)
    return codes.view(out_features, in_features), scale_OG, zero_OG


class Int4Linear:
    """4-bit weights in groups of 32, bfloat16 activations, float32 sums: 5 bits a weight, scales included."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        _check_in_features(weight_OI)
        padding = -self.out_features % OUT_BLOCK
        if padding:
            weight_OI = torch.nn.functional.pad(weight_OI, (0, 0, 0, padding))
        codes_OI, scale_OG, zero_OG = quantize_int4(weight_OI)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(codes_OI, 1)
        self.scale_zero_GO2 = torch.stack((scale_OG.t(), zero_OG.t()), dim=-1).contiguous()
        self.bias_O = None if bias_O is None else bias_O.to(torch.bfloat16)
        self.padded = padding > 0
        self.weight_bytes = self.packed.nbytes + self.scale_zero_GO2.nbytes
        self._linear = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """hot path"""
        y_TO: torch.Tensor = self._linear(x_TI, self.packed, GROUP, self.scale_zero_GO2)
        if self.padded:
            y_TO = y_TO[:, : self.out_features]
        return y_TO if self.bias_O is None else y_TO + self.bias_O


def _check_in_features(weight_OI: torch.Tensor) -> None:
    out_features, in_features = weight_OI.shape
    if in_features % GROUP:
        raise NotSupported(f"int4 needs in-features in multiples of {GROUP}; a weight is {out_features}x{in_features}")
