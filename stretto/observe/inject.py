"""Faults on purpose: a hidden sync, a pageable upload, a slow host, a slow device, each at a line that can be found.

Commits the faults that `faults.py` spells. They change when things happen, never a result. The two syncs are the
classic ones: a truth value of a device tensor in sampling (the overlap is lost), and plan data from pageable memory
(the launch is late). On the CPU device, whose tensors are host memory, the sync waits for the worker as CUDA's would
for the GPU.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch

from stretto.device.base import Device, Stream
from stretto.device.checking import CheckingDevice
from stretto.errors import NotSupported
from stretto.observe.faults import Faults
from stretto.observe.host_reads import READING_CALLS

_NUMBERS = 4096
"""Length of the list that `pageable@stage` uploads."""
_BLOCK = bytes(65536)


class Injector:
    """Commits the faults of one engine, in its thread."""

    def __init__(self, faults: Faults, device: Device) -> None:
        self._faults = faults
        self._device = device
        self._cycles = 0
        if faults.slow_device_s:
            if isinstance(device, CheckingDevice):
                raise NotSupported("slow-device on a virtual device: give the device a cost instead")
            if device.torch_device.type == "cuda":
                self._cycles = int(faults.slow_device_s * _cycles_per_s())

    def before_launch(self, scheduler_stream: Stream) -> None:
        """Where the plan of a step is staged."""
        if self._faults.slow_host_s:
            self._be_busy(self._faults.slow_host_s)
        if self._faults.pageable_at_stage:
            numbers = list(range(_NUMBERS))
            if self._device.torch_device.type == "cuda":
                scheduler_stream.run(stage_from_pageable_memory, numbers, self._device.torch_device)
            else:
                stage_from_pageable_memory(numbers, self._device.torch_device)
            if isinstance(self._device, CheckingDevice):
                scheduler_stream.synchronize()

    def after_step(self, tokens_S: torch.Tensor, engine_stream: Stream) -> None:
        """Where a step's tokens are sampled, its work being enqueued. `tokens_S` is the sampler's own buffer."""
        if not self._faults.sync_at_sample:
            return
        if self._device.torch_device.type == "cuda":
            engine_stream.run(look_at_samples, tokens_S)
        else:
            look_at_samples(_as_on_a_device(tokens_S, engine_stream))

    def in_step(self) -> None:
        """As work on the engine stream."""
        if self._cycles:
            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        elif self._faults.slow_device_s:
            time.sleep(self._faults.slow_device_s)

    def _be_busy(self, seconds: float) -> None:
        """Compute for so long, mostly without holding the GIL, so that only the host is slow."""
        if isinstance(self._device, CheckingDevice):
            self._device.host_work(seconds)
            return
        compute_on_the_host(seconds)


def compute_on_the_host(seconds: float) -> None:
    """The slow host."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        hashlib.sha256(_BLOCK)


def look_at_samples(tokens_S: torch.Tensor) -> None:
    """The hidden sync."""
    if (tokens_S >= 0).all():  # the one innocent line: the host waits until the tensor's value is there
        return


def stage_from_pageable_memory(numbers: list[int], device: torch.device) -> None:
    """The pageable upload."""
    torch.tensor(numbers, device=device)  # from pageable memory: the host waits for the copy


def _as_on_a_device(tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
    """A view of a CPU device's tensor that behaves on the host as a GPU's: asking for its value waits for `stream`."""

    class OnDevice(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in READING_CALLS:
                stream.synchronize()
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    return tensor.as_subclass(OnDevice)


def _cycles_per_s() -> float:
    """Clock cycles of `torch.cuda._sleep` in a second, measured. Blocks for some 10 ms."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cycles = 10_000_000
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    begin.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    return cycles / (1e-3 * float(begin.elapsed_time(end)))
