"""Memory that attention reuses from layer to layer and from step to step: large fresh tensors cost page faults."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Named flat buffers that only ever grow; taking a name again overwrites what was taken under it before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor; one name always has one dtype."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # Half as much again, so that contexts that grow step by step seldom meet the end.
            buffer = torch.empty(size + size // 2, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)
