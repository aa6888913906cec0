"""Rotary position embedding (Su et al., 2021) on interleaved pairs: (x0, x1) is one complex number, turned by an angle.

Owns the table of turns; which inverse frequencies it is built from (rope scaling) is the model's business.
Legend: T tokens of the step, L positions of the table, N heads (query and kv heads together), H head dim.
"""

from __future__ import annotations

import torch


class Rope:
    """The turns of every position up to `num_positions`, float32 whatever the activations are."""

    def __init__(self, inverse_frequency: torch.Tensor, num_positions: int, *, scale: float = 1.0) -> None:
        """`inverse_frequency`: float [H/2], radians per position; `scale` multiplies q and k (yarn), normally 1."""
        # float32 products, as in transformers: at far positions exact ones differ by more than logits forgive.
        positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequency.device)
        angle = torch.outer(positions, inverse_frequency.float())
        self._turn_LH = torch.polar(torch.full_like(angle, scale), angle)

    @property
    def turns_LH(self) -> torch.Tensor:
        """The same table as float32 [L, H], cosine and sine of every pair in turn; shares its memory."""
        return torch.view_as_real(self._turn_LH).flatten(1)

    def turns(self, positions_T: torch.Tensor) -> torch.Tensor:
        """complex64 [T, 1, H/2] for the step's positions (int64 [T]); once a step, shared by all layers. hot path"""
        return self._turn_LH.index_select(0, positions_T).unsqueeze(1)


def apply_rope(qk_TNH: torch.Tensor, turns_T1h: torch.Tensor) -> None:
    """Turn q and k in place. `qk_TNH` may be a view into the fused projection: the heads of q, then those of k.

    `turns_T1h` comes from `Rope.turns`. Head pairs are interleaved: elements 2i and 2i+1 turn together. hot path
    """
    if qk_TNH.dtype == torch.float32:
        _turn(qk_TNH, turns_T1h)
    else:
        turned_TNH = qk_TNH.to(torch.float32, memory_format=torch.contiguous_format)
        _turn(turned_TNH, turns_T1h)
        qk_TNH.copy_(turned_TNH)


def _turn(qk_TNH: torch.Tensor, turns_T1h: torch.Tensor) -> None:
    # Not `view(torch.complex64)`, which TorchScript takes for a view of another shape.
    torch.view_as_complex(qk_TNH.view(qk_TNH.shape[0], qk_TNH.shape[1], -1, 2)).mul_(turns_T1h)
