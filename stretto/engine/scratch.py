"""Scratch: temporaries kept between calls, because fresh memory pages cost a CPU more than the work in them."""

from __future__ import annotations

import torch


class Scratch:
    """Named temporaries of one stream. Grows to the largest that was asked for; never gives memory back.

    Only on a CPU: elsewhere every `take` is a new tensor, since such allocators keep their memory themselves (and a
    captured graph must own what it writes).
    """

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}
        self._zeros: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor, valid until the same name is taken again."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = shape[0] * shape[1] * dtype.itemsize
        memory = self._bytes.get(name)
        if memory is None or memory.shape[0] < size:
            memory = torch.empty(size, dtype=torch.uint8)
            self._bytes[name] = memory
        return memory[:size].view(dtype).view(shape)

    def take_zeros(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros [size], which the caller must have made zeros again before the same name is taken again."""
        if device.type != "cpu":
            return torch.zeros(size, dtype=dtype, device=device)
        zeros = self._zeros.get(name)
        if zeros is None or zeros.shape[0] < size:
            zeros = torch.zeros(size, dtype=dtype)
            self._zeros[name] = zeros
        return zeros[:size]
