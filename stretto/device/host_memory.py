"""Host memory that both sides see: a numpy array for the host, a torch tensor for work on streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import NotSupported

NUMPY_DTYPES = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A `HostBuffer`: `array` and `tensor` are two views of one memory, which lives as long as either."""

    array: npt.NDArray[np.generic]
    tensor: torch.Tensor


def shared_buffer(shape: tuple[int, ...], dtype: torch.dtype, *, page_locked: bool) -> SharedBuffer:
    """Allocate host memory with undefined contents; `page_locked` needs CUDA.

    Raises NotSupported for a dtype that numpy does not have.
    """
    if dtype not in NUMPY_DTYPES:
        allowed = ", ".join(str(known).removeprefix("torch.") for known in NUMPY_DTYPES)
        raise NotSupported(f"a pinned buffer of {dtype}: numpy has no such type; use one of {allowed}")
    tensor = torch.empty(shape, dtype=dtype, pin_memory=page_locked)
    return SharedBuffer(array=tensor.numpy(), tensor=tensor)
