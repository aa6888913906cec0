"""What exchanging tensors between GPUs costs inside CUDA graphs: NCCL, torch's symmetric memory, and our own kernels.

`python -m stretto.bench.gpu_exchange --help`. Sums of T rows of 4,096 bf16 numbers; with and without the addition and
norm behind them; and a token for every row from logits that are split over the ranks. Microseconds of one call in a
chain of calls, the median of three runs. Each result is compared with the right one first. No multicast is used.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from stretto.bench.gpu import environment
from stretto.distributed.group import TensorGroup, connect_group
from stretto.kernels.elementwise import add_rms_norm
from stretto.kernels.exchange import add_sum_rms_norm, sum_ranks
from stretto.kernels.peer_buffers import PeerBuffers
from stretto.kernels.sampling import SampleScratch, sample_rows
from stretto.kernels.split_sampling import AgreedMaxima, sample_split_rows

HIDDEN = 4096
VOCABULARY = 151_936
SUM_ROWS = (1, 4, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SAMPLED_ROWS = (1, 32, 128)
Row = dict[str, Any]


def microseconds(work: Callable[[], object], calls: int = 20, replays: int = 10) -> float:
    """Of one call of `work` in a graph of `calls` of them. Blocks."""
    stream = torch.cuda.current_stream()
    for _ in range(3):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(calls):
            work()
    finally:
        graph.capture_end()
    times: list[float] = []
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    for _ in range(3):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        stream.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / (calls * replays))
    return statistics.median(times)


class Sums:
    """All ways to sum, on one rank."""

    def __init__(self, group: TensorGroup, nccl: TensorGroup, device: torch.device) -> None:
        """`nccl`: a group without peer memory."""
        self._nccl = nccl
        self._device = device
        self._group = group
        generator = torch.Generator().manual_seed(7)
        self._parts = [torch.randn(max(SUM_ROWS), HIDDEN, generator=generator).bfloat16() for _ in range(group.size)]
        self._symmetric: torch.Tensor | None = None
        self.peers: PeerBuffers | None = group.peers_for(torch.empty(1, HIDDEN, dtype=torch.bfloat16, device=device))

    def symmetric(self) -> torch.Tensor:
        """A buffer of torch's symmetric memory. Made by all ranks at once. Raises whatever torch does."""
        if self._symmetric is None:
            import torch.distributed._symmetric_memory as symmetric_memory

            world = dist.group.WORLD
            assert world is not None
            buffer = symmetric_memory.empty(max(SUM_ROWS), HIDDEN, dtype=torch.bfloat16, device=self._device)
            symmetric_memory.rendezvous(buffer, world)
            self._symmetric = buffer
        return self._symmetric

    def row(self, way: str, rows: int) -> Row | None:
        """Time and correctness of one way; None where it cannot take so many rows."""
        own = self._parts[self._group.rank][:rows].to(self._device)
        right = sum((part[:rows].float() for part in self._parts), torch.zeros(())).bfloat16().to(self._device)
        residual, weight = torch.zeros_like(own), torch.ones(HIDDEN, dtype=own.dtype, device=self._device)
        peers = self.peers if self.peers is not None and self.peers.holds(own) else None
        x = own.clone()
        work: Callable[[], object]
        if way.startswith("peer memory"):
            if peers is None:
                return None
            sum_ranks(x, peers)
            held = peers
            work = lambda: sum_ranks(x, held)  # noqa: E731
            if way.endswith("norm"):
                work = lambda: add_sum_rms_norm(residual, x, weight, 1e-6, held)  # noqa: E731
        elif way.startswith("nccl"):
            self._nccl.all_reduce(x)
            work = lambda: self._nccl.all_reduce(x)  # noqa: E731
            if way.endswith("norm"):
                work = lambda: add_rms_norm(residual, self._nccl.all_reduce(x), weight, 1e-6)  # noqa: E731
        else:
            part = self.symmetric()[:rows]
            part.copy_(own)
            name = "one_shot_all_reduce" if "one-shot" in way else "two_shot_all_reduce_"
            operation = getattr(torch.ops.symm_mem, name)
            assert dist.group.WORLD is not None
            group_name = dist.group.WORLD.group_name
            self._nccl.all_reduce(torch.zeros(1, device=self._device))
            x = operation(part, "sum", group_name).clone()
            self._nccl.all_reduce(torch.zeros(1, device=self._device))
            part.zero_()
            work = lambda: operation(part, "sum", group_name)  # noqa: E731
        is_right = torch.equal(x, right)
        x.zero_()
        return {"way": way, "rows": rows, "bytes": own.nbytes, "us": microseconds(work), "right": is_right}


SUM_WAYS = (
    "nccl",
    "peer memory",
    "symmetric memory, one-shot",
    "symmetric memory, two-shot",
    "nccl, norm",
    "peer memory, norm",
)


def sample_row(group: TensorGroup, nccl: TensorGroup, way: str, rows: int, device: torch.device) -> Row | None:
    """Time of choosing tokens, half of the rows greedy; and whether they are those of the whole logits."""
    width = VOCABULARY // group.size
    ids = range(group.rank * width, (group.rank + 1) * width)
    generator = torch.Generator(device).manual_seed(rows)
    logits = (torch.randn(rows, VOCABULARY, device=device, generator=generator) * 2).bfloat16()
    part = logits[:, ids.start : ids.stop].contiguous()
    slot = torch.arange(rows, device=device) + 1
    position = slot * 5
    temperature = torch.full((rows + 1,), 0.8, device=device)
    temperature[::2] = 0.0
    seed = torch.arange(rows + 1, device=device) * 7_777_777_777
    scratch, agreed = SampleScratch.allocate(rows, VOCABULARY, device), AgreedMaxima.allocate(rows, device)
    chosen = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)]
    table, length = (
        torch.zeros(rows + 1, 2048, dtype=torch.int64, device=device),
        torch.zeros_like(slot.new_zeros(rows + 1)),
    )
    fixed = (slot, position, temperature, seed, table, length)
    sample_rows(logits, *fixed, chosen[0], scratch)
    work: Callable[[], object]
    if way == "gathered":
        work = lambda: sample_rows(nccl.all_gather(part, VOCABULARY), *fixed, chosen[1], scratch)  # noqa: E731
    else:
        peers = group.peers_for(torch.empty(rows, 2, device=device))
        if peers is None:
            return None
        held = peers
        work = lambda: sample_split_rows(part, ids, *fixed, chosen[1], scratch, agreed, held)  # noqa: E731
    taken = microseconds(work, calls=10)
    return {"way": way, "rows": rows, "us": taken, "right": torch.equal(*chosen)}


def _rank(rank: int, size: int, port: int, output: Path | None) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    store = dist.distributed_c10d._get_default_store()
    group = connect_group(PrefixStore("a", store), rank, size, device)
    os.environ["STRETTO_DISABLE_PEER_MEMORY"] = "1"
    nccl = connect_group(PrefixStore("b", store), rank, size, device)
    report: dict[str, Any] = {"environment": environment(), "ranks": size, "sums": [], "sampling": []}

    def note(kind: str, found: Row | None) -> None:
        if rank == 0 and found is not None:
            report[kind].append(found)
            print(
                kind, *(f"{value:.2f}" if isinstance(value, float) else value for value in found.values()), flush=True
            )
            if output:
                output.write_text(json.dumps(report, indent=1))

    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        sums = Sums(group, nccl, device)
        for rows in SAMPLED_ROWS:
            for way in ("gathered", "candidates"):
                note("sampling", sample_row(group, nccl, way, rows, device))
        for way in SUM_WAYS:
            try:
                for rows in SUM_ROWS:
                    note("sums", sums.row(way, rows))
            except Exception:  # a way that this machine lacks; all ranks lack it
                print(f"rank {rank}: {way}: {traceback.format_exc()}", flush=True)
    torch.cuda.synchronize()
    group.close()
    nccl.close()
    os._exit(0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, options.ranks, port, options.output)) for rank in range(options.ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()
