"""Place: where a rank is among all ranks, and where they meet. From options, or from what torchrun says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.config import EngineConfig, split_address
from stretto.errors import InvalidRequest

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a tensor-parallel engine. On every host the ranks are consecutive."""

    rank: int
    size: int
    local_rank: int
    """Number of the rank on its host: which GPU it takes."""
    num_local: int
    """Ranks on this host."""
    address: tuple[str, int] | None
    """Host and port where the ranks meet; None: a free port of this host."""
    launched: bool = False
    """By torchrun: one process a rank is there already, and `address` is where torchrun's store may be."""

    @property
    def leads(self) -> bool:
        """Whether this is the leader."""
        return self.rank == 0

    @property
    def single_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.num_local == self.size

    def neighbours(self) -> list[Place]:
        """The other ranks of this host, for its first rank to start."""
        first = self.rank - self.local_rank
        return [
            Place(first + local, self.size, local, self.num_local, self.address)
            for local in range(self.num_local)
            if local != self.local_rank
        ]


def place_of(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process: rank 0, the first rank of a further host, or the rank that torchrun gave it.

    Raises InvalidRequest if options and torchrun's environment do not fit together.
    """
    size = config.tensor_parallel_size
    if size > 1 and all(environment.get(name) for name in _TORCHRUN):
        return _launched_place(config, environment)
    local = config.ranks_per_node
    address = None if config.dist_init_addr is None else split_address(config.dist_init_addr)
    return Place(config.node_rank * local, size, 0, local, address)


def _launched_place(config: EngineConfig, environment: Mapping[str, str]) -> Place:
    try:
        rank, size, local_rank, num_local, port = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        )
    except ValueError as error:
        raise InvalidRequest(f"the environment of torchrun is broken: {error}") from error
    if size != config.tensor_parallel_size:
        raise InvalidRequest(
            f"torchrun started {size} processes, but tensor_parallel_size is {config.tensor_parallel_size}: they must "
            "be equal (one process is one rank), or tensor_parallel_size 1 (each process an engine of its own)"
        )
    if config.nnodes != 1 or config.dist_init_addr is not None:
        raise InvalidRequest(
            "under torchrun leave nnodes, node_rank and dist_init_addr alone: torchrun knows where the ranks are"
        )
    return Place(rank, size, local_rank, num_local, (environment["MASTER_ADDR"], port), launched=True)
