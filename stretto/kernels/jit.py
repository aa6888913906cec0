"""`kernel`: Triton's `jit` for kernels that are launched thousands of times a second.

Triton finds out at every launch what the kernel is to be specialised for and looks for a binary that fits: some 40
microseconds of the host, which is more than most kernels here run, and nothing hides it in a step that is launched
kernel by kernel. Here a launch that is like an earlier one in all that a binary depends on (device, dtypes, alignment
of pointers, divisibility of integers, constants) goes to that binary at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from stretto.kernels.launch import INTERPRETED

_KNOWN_VERSIONS = ("3.6.", "3.7.")
"""How a binary is launched is no promise of Triton's: read in these versions; others launch in their own way."""
_QUICK = triton.__version__.startswith(_KNOWN_VERSIONS)


class Kernel(triton.JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel whose repeated launches cost a few microseconds of the host.

    Launched as Triton's are, `kernel[grid](*args, **constants)`: tensors and numbers by place, constants and launch
    options by name. `grid` is a tuple. With a tensor descriptor among the arguments, Triton's own launch is used.
    """

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        super().__init__(function, **options)
        self._parameters = tuple((p.is_constexpr, not p.do_not_specialize) for p in self.params)
        self._binaries: dict[tuple[object, ...], tuple[Any, Any, Any, tuple[object, ...]]] = {}

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        """Launch on the current stream of the current device; the compiled kernel if it was looked up. hot path"""
        if warmup or not _QUICK:
            return super().run(*args, grid=grid, warmup=warmup, **constants)
        device = torch._C._cuda_getDevice()
        # What a binary depends on, as Triton specialises it.
        kinds: list[object] = [device, tuple(constants), *constants.values()]
        for value, (constant, specialized) in zip(args, self._parameters, strict=False):
            if isinstance(value, torch.Tensor):
                kinds.append(value.dtype)
                kinds.append(value.data_ptr() & 15)
            elif type(value) is int and not constant:
                kinds.append(-(2**31) <= value < 2**31)
                if specialized:
                    kinds.append(-1 if value == 1 else value & 15)
            elif type(value) is not float or constant:
                kinds.append(value)
        key = tuple(kinds)
        try:
            binary = self._binaries.get(key)
        except TypeError:  # an argument that nothing is known of here, a tensor descriptor say
            return super().run(*args, grid=grid, warmup=False, **constants)
        if binary is None:
            given = dict(constants)  # Triton adds to what it gets
            compiled = super().run(*args, grid=grid, warmup=False, **given)
            if compiled is not None:
                rest = tuple(constants.get(p.name, p.default) for p in self.params[len(args) :])
                self._binaries[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
            return compiled
        run, function, metadata, rest = binary
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *args, *rest)
        return None


def kernel(function: Any = None, **options: Any) -> Any:
    """Decorator: `triton.jit` whose result is a `Kernel`; for functions that the host launches. Options as `jit`'s."""
    if function is None:
        return lambda given: kernel(given, **options)
    return triton.jit(function, **options) if INTERPRETED else Kernel(function, **options)
