"""How kernels are launched: interpreted or compiled, on what GPU, and dependent launch.

Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and Synchronization"): a kernel
may begin while the one before it in the stream still runs, up to its `gdc_wait`. Every kernel here waits before it
reads or writes what another kernel touches; loads of weights may come before.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter on CPU tensors (TRITON_INTERPRET=1, for tests)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What launches depend on."""

    capability: tuple[int, int]
    shared_memory: int
    """The most bytes of it that a program may have."""
    multiprocessors: int

    @property
    def loads_tiles(self) -> bool:
        """Whether it copies tiles into shared memory by itself (TMA: Hopper and newer); elsewhere they pass through
        registers."""
        return self.capability >= (9, 0)


H200 = Gpu(capability=(9, 0), shared_memory=227 * 1024, multiprocessors=132)

stand_in = Gpu(H200.capability, H200.shared_memory, multiprocessors=3)
"""What kernels on a CPU, in the interpreter, are launched for."""


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """What `device` is; never blocks. hot path"""
    if device.type != "cuda":
        return stand_in
    found = torch.cuda.get_device_properties(device)
    shared_memory = found.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
    return Gpu((found.major, found.minor), shared_memory, found.multi_processor_count)


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` may be launched before the one in front of them has ended (Hopper and newer).

    STRETTO_DISABLE_PDL=1, when the process starts, says no: to see what it is worth.
    """
    if device.type != "cuda" or INTERPRETED or os.environ.get("STRETTO_DISABLE_PDL", "0") not in ("", "0"):
        return False
    return gpu_of(device).capability >= (9, 0)


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a small number under the interpreter. hot path"""
    return gpu_of(device).multiprocessors


def options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments that every kernel takes: `PDL`, and the launch option that goes with it."""
    if dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def dot_precision(dtype: torch.dtype) -> str:
    """How products of matrices of `dtype` are computed: float32 exactly, not in the matrix units' tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's function of this name, and that of the next, cost the host 4 us each."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, which is at least 1."""
    return 1 << (n - 1).bit_length()
