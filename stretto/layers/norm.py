"""RMSNorm (Zhang and Sennrich, 2019). Legend: T tokens, D hidden (or head dim for q/k norms)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32."""

    def __init__(self, weight_D: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        """`dtype`: element type of the hidden states (`activation_dtype` of the weight format)."""
        self.weight_D = weight_D.to(dtype)
        self.eps = eps
        self._shape = (weight_D.shape[0],)
        # On a CPU the steps written out below take two thirds of the time of `F.rms_norm`; on a GPU it is one kernel.
        self._written_out = weight_D.device.type == "cpu"
        self.eps_1 = torch.tensor([eps], dtype=torch.float32, device=weight_D.device)
        self.weight_float32_D = weight_D.float()

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape and dtype. Any leading dimensions. hot path"""
        if not self._written_out:
            return F.rms_norm(x_TD, self._shape, self.weight_D, self.eps)
        return written_out_norm(x_TD, self.weight_float32_D, self.eps_1)

    def add(self, residual_TD: torch.Tensor, update_TD: torch.Tensor) -> torch.Tensor:
        """residual += update in place, then the norm of it as a new tensor. hot path"""
        return self(residual_TD.add_(update_TD))


def written_out_norm(x_TD: torch.Tensor, weight_float32_D: torch.Tensor, eps_1: torch.Tensor) -> torch.Tensor:
    """RMS norm in separate steps, all of them in float32: a new tensor of x's shape and dtype. hot path"""
    x = x_TD.float()
    norm_T1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor_T1 = torch.addcmul(eps_1, norm_T1, norm_T1, value=1 / x_TD.shape[-1]).rsqrt_()
    return torch.mul(x, factor_T1).mul_(weight_float32_D).to(x_TD.dtype)
