"""`kernel`: Triton's `jit` for kernels that are launched thousands of times a second.

Triton finds out at every launch what the kernel is to be specialised for and looks for a binary that fits: some 40
microseconds of the host, which is more than most kernels here run, and nothing hides it in a step that is launched
kernel by kernel. Here a launch that is like an earlier one in all that a binary depends on (device, dtypes, alignment
of pointers, divisibility of integers, constants) goes to that binary at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.kernels.launch import INTERPRETED

_LOG = logging.getLogger("stretto.kernels")
_KNOWN_VERSIONS = ("3.6.", "3.7.")
"""How a binary is launched is no promise of Triton's: read in these versions; others launch in their own way."""
_QUICK = triton.__version__.startswith(_KNOWN_VERSIONS)


@functools.cache
def _warn() -> None:
    """Once in a process."""
    _LOG.warning(
        "Triton %s is not one whose launches Stretto can shorten (%s): each kernel costs the host some 40 us more, "
        "which steps that run in CUDA graphs do not notice",
        triton.__version__,
        ", ".join(f"{version}x" for version in _KNOWN_VERSIONS),
    )


class Kernel(triton.JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel whose repeated launches cost a few microseconds of the host.

    Launched as Triton's are, `kernel[grid](*args, **constants)`: tensors and numbers by place, constants and launch
    options by name. `grid` is a tuple. That tensors are on the device is checked in the first launch of a kind only.
    """

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        super().__init__(function, **options)
        self._parameters = tuple((p.is_constexpr, not p.do_not_specialize) for p in self.params)
        self._binaries: dict[tuple[object, ...], tuple[Any, Any, Any, tuple[object, ...]]] = {}

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        """Launch on the current stream of the current device; the compiled kernel if it was looked up. hot path"""
        if warmup or not _QUICK:
            if not warmup:
                _warn()
            return super().run(*args, grid=grid, warmup=warmup, **constants)
        device = torch._C._cuda_getDevice()
        # What a binary depends on, as Triton specialises it; and the arguments as they are launched: tensors as their
        # addresses, of which Triton's launcher would ask the driver one by one.
        kinds: list[object] = [device, tuple(constants), *constants.values()]
        launched: list[object] = []
        for value, (constant, specialized) in zip(args, self._parameters, strict=False):
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                kinds.append(value.dtype)
                kinds.append(address & 15)
                launched.append(address)
                continue
            launched.append(value)
            if type(value) is int and not constant:
                kinds.append(-(2**31) <= value < 2**31)
                if specialized:
                    kinds.append(-1 if value == 1 else value & 15)
            elif isinstance(value, TensorDescriptor):
                kinds.append((value.base.dtype, *value.block_shape))
            elif type(value) is not float or constant:
                kinds.append(value)
        key = tuple(kinds)
        binary = self._binaries.get(key)
        if binary is None:
            compiled = super().run(*args, grid=grid, warmup=False, **dict(constants))  # it adds to what it gets
            if compiled is not None:
                rest = tuple(constants.get(p.name, p.default) for p in self.params[len(args) :])
                self._binaries[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
            return compiled
        run, function, metadata, rest = binary
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *launched, *rest)
        return None


def kernel(function: Any = None, **options: Any) -> Any:
    """Decorator: `triton.jit` whose result is a `Kernel`; for functions that the host launches. Options as `jit`'s."""
    if function is None:
        return lambda given: kernel(given, **options)
    return triton.jit(function, **options) if INTERPRETED else Kernel(function, **options)
