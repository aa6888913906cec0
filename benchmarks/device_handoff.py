"""What one call of a device costs the host, in microseconds: `python benchmarks/device_handoff.py`.

The CPU device's calls are measured while its worker is held, so that only the host's side counts; then the round trip
(enqueue, record, synchronise) and the price of the checking device with small and with large access sets. Where there
is a GPU, the same calls on the CUDA device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from stretto.device.base import Access
from stretto.device.checking import CheckingDevice
from stretto.device.cpu import CpuDevice
from stretto.device.cuda import CudaDevice


def microseconds(call: Callable[[], object], repeats: int = 20_000, rounds: int = 5) -> float:
    """The best round's mean time of one call."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, time.perf_counter() - begin)
    return best / repeats * 1e6


def nothing() -> None:
    """The work."""


def cpu_device() -> None:
    """Host-side costs and the round trip."""
    device = CpuDevice(num_threads=1)
    stream, event, gate = device.stream("engine"), device.event(), threading.Lock()
    gate.acquire()
    stream.run(gate.acquire)
    print(f"cpu run               {microseconds(lambda: stream.run(nothing)):8.2f}")
    print(f"cpu record            {microseconds(lambda: stream.record(event)):8.2f}")
    print(f"cpu query             {microseconds(event.query):8.2f}")
    print(f"cpu wait              {microseconds(lambda: stream.wait(event)):8.2f}")
    print(f"cpu host_access       {microseconds(lambda: device.host_access(reads=())):8.2f}")
    gate.release()
    stream.synchronize()

    def round_trip() -> None:
        stream.run(nothing)
        stream.record(event)
        event.synchronize()

    with device.running():
        print(f"cpu round trip        {microseconds(round_trip, 2_000):8.2f}")
    device.close()


def checking_device(regions: int) -> None:
    """One piece of work that reads and writes `regions` pages, with its event, on the checking device."""
    device = CheckingDevice(0, device_delay=(0.0, 1e-6), host_delay=(0.0, 1e-6))
    stream, event = device.stream("engine"), device.event()
    pages = tuple(("page", index) for index in range(regions))
    device.host_access(writes=pages)
    access = Access(reads=pages, writes=pages)
    print(f"checking run, {regions:3d} pages {microseconds(lambda: stream.run(nothing, access=lambda: access)):6.2f}")
    print(f"checking record       {microseconds(lambda: stream.record(event)):8.2f}")
    device.close()


def cuda_device() -> None:
    """The same on a GPU; the work launches nothing, so `run` is only the switch of stream and mode."""
    device = CudaDevice()
    stream, other, event = device.stream("engine"), device.stream("scheduler"), device.event()

    def round_trip() -> None:
        stream.record(event)
        event.synchronize()

    print(f"cuda run              {microseconds(lambda: stream.run(nothing), 2_000):8.2f}")
    print(f"cuda record           {microseconds(lambda: stream.record(event), 2_000):8.2f}")
    print(f"cuda query            {microseconds(event.query, 2_000):8.2f}")
    print(f"cuda wait             {microseconds(lambda: stream.wait(event), 2_000):8.2f}")
    print(f"cuda wait_stream      {microseconds(lambda: stream.wait_stream(other), 2_000):8.2f}")
    print(f"cuda round trip       {microseconds(round_trip, 2_000):8.2f}")
    device.close()


if __name__ == "__main__":
    cpu_device()
    for count in (2, 24):
        checking_device(count)
    if torch.cuda.is_available():
        cuda_device()
