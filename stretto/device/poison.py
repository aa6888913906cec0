"""Recognisable garbage for memory that nobody may read: not yet written, or given up by its owner."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def poison_value(dtype: np.dtype[np.generic]) -> bool | int | float:
    """The garbage of a dtype: NaN for floats; for integers the bytes 0xDB, which make a signed number a large negative
    one, so that an index made of it is out of bounds; True for bool.
    """
    if dtype.kind == "f":
        return float("nan")
    if dtype.kind == "b":
        return True
    return int(np.frombuffer(b"\xdb" * dtype.itemsize, dtype=dtype)[0])


def poison(memory: npt.NDArray[np.generic] | torch.Tensor) -> None:
    """Fill an array or tensor with garbage, in place, at once, on the calling thread."""
    if isinstance(memory, torch.Tensor):
        sample = torch.empty(0, dtype=torch.float32 if memory.is_floating_point() else memory.dtype)
        memory.fill_(poison_value(sample.numpy().dtype))
    else:
        memory.fill(poison_value(memory.dtype))


def is_poison(array: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Where an array holds its dtype's garbage. Not for bool, whose garbage is a value like any other."""
    if array.dtype.kind == "b":
        raise ValueError("bool memory has no recognisable garbage")
    if array.dtype.kind == "f":
        return np.asarray(np.isnan(array), np.bool_)
    return np.asarray(np.equal(array, np.array(poison_value(array.dtype), array.dtype)), np.bool_)
