"""Peer memory between processes on CPUs: the kernels of `exchange.py`, interpreted, over files that all ranks map."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stretto.distributed.group import TensorGroup
from stretto.kernels.elementwise import add_rms_norm_reference
from stretto.kernels.exchange import add_sum, add_sum_rms_norm, sum_ranks
from stretto.kernels.peer_buffers import STATE_WORDS, PeerBuffers
from tests.helpers.gpu_ranks import draw_both_ways
from tests.helpers.tensor_parallel import Case, Found, compute

FLAGGED, SIGNALLED = 512, 8192


class WithPeers:
    """A `TensorGroup` whose ranks can write each other's memory; everything else is another group's."""

    def __init__(self, group: TensorGroup, directory: Path) -> None:
        """`directory`: empty, the same for all ranks."""
        self.rank, self.size = group.rank, group.size
        self._group = group
        words = PeerBuffers.bytes_of(group.size, FLAGGED, SIGNALLED) // 8
        self._buffers = [
            torch.from_file(str(directory / str(rank)), shared=True, size=words, dtype=torch.int64)
            for rank in range(group.size)
        ]
        addresses = torch.tensor([buffer.data_ptr() for buffer in self._buffers])
        state = torch.zeros(STATE_WORDS, dtype=torch.int32)
        self.peers = PeerBuffers(addresses, state, self.rank, self.size, FLAGGED, SIGNALLED)
        self._group.all_reduce(torch.zeros(1))  # every file is there

    def peers_for(self, x: Tensor) -> PeerBuffers | None:
        return self.peers if self.peers.holds(x) else None

    def all_reduce(self, x: Tensor) -> Tensor:
        peers = self.peers_for(x)
        return self._group.all_reduce(x) if peers is None else sum_ranks(x, peers)

    def all_gather(self, x_XL: Tensor, total: int) -> Tensor:
        return self._group.all_gather(x_XL, total)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()


def compute_with_peers(group: TensorGroup, directory: Path, case: Case) -> tuple[Found, int]:
    """`compute`, and how many exchanges there were."""
    peered = WithPeers(group, directory)
    return compute(peered, case), int(peered.peers.state[0])


def draw_with_peers(group: TensorGroup, directory: Path, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens from candidates, and from the whole logits."""
    peered = WithPeers(group, directory)  # keeps the files mapped
    return draw_both_ways(peered.peers, vocabulary, 24, torch.device("cpu"))


def sum_with_peers(group: TensorGroup, directory: Path) -> list[tuple[Tensor, ...]]:
    """Results of every kernel and what plain torch finds, for shapes that end inside blocks and repeat halves."""
    peered, found = WithPeers(group, directory), []
    peers = peered.peers
    for rows, width in ((1, 64), (3, 96), (5, 130), (2, 1040), (1, 4096), (5, 4096), (150, 20)):
        generator = torch.Generator().manual_seed(rows)
        parts = [torch.randn(rows, width, generator=generator) for _ in range(group.size)]
        residual, weight = torch.randn(rows, width, generator=generator), torch.randn(width, generator=generator)
        total = sum(parts[1:], parts[0])
        added, again = residual.clone(), residual.clone()
        add_sum(added, parts[group.rank].clone(), peers)
        norm = add_sum_rms_norm(again, parts[group.rank].clone(), weight, 1e-6, peers)
        expected = add_rms_norm_reference(residual + total, None, weight, 1e-6)
        found.append(
            (sum_ranks(parts[group.rank].clone(), peers), total, added, residual + total, again, added, norm, expected)
        )
    return found
